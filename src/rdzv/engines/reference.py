"""The reference engine: the port's semantics as plain data and rules. One thread, no clock, no asyncio.

The embedded server is this engine behind sockets, the simulator puts it behind a hostile network, the memory driver
shares it within one process, and a register holds it as one value. Costs do not grow with the number of members: a
transaction pays for its own keys, a commit for the watchers of the changed keys, and a time step for the leases that
end.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from .leases import Leases
from .port import (
    AllCreated,
    Away,
    Batch,
    Case,
    Compare,
    Compares,
    Created,
    Delete,
    DeletePrefix,
    Equals,
    Event,
    Gap,
    Get,
    Item,
    LeaseGone,
    List,
    Modified,
    Operation,
    Operations,
    Order,
    Outcome,
    Put,
)
from .tree import STEPS_PER_KEY, Meter, Tree

CHANGE_STEPS = 10
"""Steps that one change of a key counts as, beside those of the watchers that are told. A key that is looked at is one."""
TELL_STEPS = 5


class _Watcher:
    """A subscription to changes after revision `seen`. A change that two of its targets match is delivered once.

    Called, it ends. A server has one for each member, so it is small: no function of its own, tuples in place of sets.
    """

    __slots__ = ("deliver", "end", "ends", "keys", "live", "prefixes", "seen")

    def __init__(
        self, targets: Sequence[str], seen: int, deliver: Callable[[Batch], None], ends: Sequence[str],
        end: Callable[[_Watcher], None],
    ) -> None:  # fmt: skip
        prefixes = {target for target in targets if target[-1:] == "/"}
        self.prefixes: tuple[str, ...] = ()
        self.keys = tuple(dict.fromkeys(targets))
        if prefixes:
            self.prefixes = tuple(
                sorted(one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes))
            )
            self.keys = tuple(one for one in self.keys if not one.startswith(self.prefixes))
        self.ends = tuple(dict.fromkeys(ends))
        """Keys of which the deletion is delivered, and nothing else unless a target matches them, too."""
        self.seen = seen
        self.deliver = deliver
        self.live = True
        self.end = end

    def __call__(self) -> None:
        if self.live:
            self.live = False
            self.end(self)

    def wants(self, event: Event) -> bool:
        key = event.key
        if event.item is None and key in self.ends:
            return True
        return key in self.keys or key.startswith(self.prefixes) or starred(key) in self.keys


_Index: TypeAlias = dict[str, "tuple[_Watcher] | dict[_Watcher, None]"]
"""The watchers of each name. Nearly every name has one, and a tuple takes a sixth of a dictionary's memory."""


class Engine:
    """An engine in memory with the semantics of `port`. Its owner calls it from one thread at a time and passes time.

    A watcher's callback may call the engine again; its changes are delivered after the change it was called for. A
    callback must not raise: the change has happened, and other watchers still wait for it.
    """

    def __init__(
        self, instance: str, *, history_max: int = 65536, steps_max: int = sys.maxsize, meter: Meter | None = None
    ) -> None:
        """Start empty. `history_max`: events kept for watches from the past; a large one counts once per KiB begun.

        `steps_max`: keys that the compares and reads of one transaction may look at. `meter`: counts all work.
        """
        self.instance = instance
        self.meter = meter or Meter()
        self.revision = 1
        self.leases = Leases()
        self.observers: list[Callable[[Batch], None]] = []
        """Callbacks for every whole commit, called before the watchers."""
        self._tree = Tree(self.meter)
        self._owned: dict[int, dict[str, None]] = {}
        self._history: deque[Batch] = deque()
        self._history_max = history_max
        self._steps_max = steps_max
        self.history_size = 0
        """Events kept for watches from the past. A large one counts once per KiB begun."""
        self._forgotten = 0
        self._changed: dict[str, int] = {}
        self._by_key: _Index = {}
        self._by_prefix: _Index = {}
        self._by_end: _Index = {}
        self._untold: deque[tuple[Batch, list[str]]] = deque()
        """Commits to be told, with the star targets of their events."""
        self._telling = False
        self._end_watcher = self._unsubscribe  # One method object for all of them.

    def __len__(self) -> int:
        return len(self._tree.items)

    def load(self, items: Iterable[Item], revision: int) -> None:
        """Start with these items, given in the order of their creation. There must be no watchers yet."""
        self.revision = self._forgotten = revision
        for item in items:
            self._tree.put(item)
            if item.lease:
                self._owned.setdefault(item.lease, {})[item.key] = None

    def items(self) -> Iterable[Item]:
        """Return all items in the order of creation."""
        return self._tree.items.values()

    def get(self, key: str) -> Item | None:
        return self._tree.items.get(key)

    # ---- transactions

    def txn(
        self, compares: Compares = (), then: Operations = (), otherwise: Operations = (), instead: Sequence[Case] = ()
    ) -> Outcome:
        """Judge and apply at one revision, all or nothing: LeaseGone and ValueError come before any change."""
        cases = (Case(tuple(compares), tuple(then)), *instead)
        operations = tuple(otherwise)
        refuse_double_writes(operations)
        for case in cases:
            refuse_double_writes(case.then)
        tree = self._tree
        tree.steps_end = self.meter.steps + self._steps_max
        taken = None
        for index, case in enumerate(cases):
            if all(map(self._holds, case.compares)):
                taken, operations = index, case.then
                break
        scans = 0
        for operation in operations:
            if type(operation) is Put:
                if operation.lease and operation.lease not in self.leases:
                    raise LeaseGone(f"lease {operation.lease} has ended: {operation.key} cannot be put under it")
            elif type(operation) is List or type(operation) is DeletePrefix:
                scans += 1
        if scans * STEPS_PER_KEY * len(tree.items) > tree.steps_end - self.meter.steps:
            self._try_searches(operations)
        tree.steps_end = sys.maxsize
        events: list[Event] = []
        reads = tuple([self._apply(operation, events) for operation in operations])
        revision = self.revision + 1 if events else self.revision
        outcome = Outcome(taken is not None, revision, reads, taken or 0)
        self._commit(events)
        return outcome

    def _try_searches(self, operations: Sequence[Operation]) -> None:
        """Raise ValueError if the searches of a branch look at too many keys: once keys have changed, it is too late."""
        for operation in operations:
            if type(operation) is List:
                self._apply(operation, [])
            elif type(operation) is DeletePrefix:
                self._tree.find(operation.prefix, Order.ANY)
            self._tree.check_steps()

    def _holds(self, compare: Compare) -> bool:
        items = self._tree.items
        if type(compare) is Created:
            item = items.get(compare.key)
            return (item.created if item else 0) == compare.revision
        if type(compare) is Modified:
            item = items.get(compare.key)
            return (item.modified if item else 0) == compare.revision
        if type(compare) is Equals:
            item = items.get(compare.key)
            return item is not None and item.value == compare.value
        if type(compare) is AllCreated:
            return all(
                (item.created if (item := items.get(key)) else 0) == revision
                for key, revision in compare.revisions.items()
            )
        if type(compare) is Away:
            item = items.get(compare.key)
            return item is not None and self.leases.away_s(item.lease) >= max(compare.s, 0.0)
        is_empty = self._tree.empty(compare.prefix, compare.since)
        self._tree.check_steps()
        return is_empty

    def _apply(self, operation: Operation, events: list[Event]) -> tuple[Item, ...]:
        tree = self._tree
        if type(operation) is Put:
            self._put(operation, events)
        elif type(operation) is Get:
            item = tree.items.get(operation.key)
            return (item,) if item else ()
        elif type(operation) is List:
            wanted = operation
            return tree.find(wanted.prefix, wanted.order, wanted.limit, wanted.created_below, wanted.after)
        elif type(operation) is Delete:
            self._delete(operation.key, events)
        else:
            for item in tree.find(operation.prefix, Order.KEY):
                self._delete(item.key, events)
        return ()

    def _put(self, put: Put, events: list[Event]) -> None:
        former = self._tree.items.get(put.key)
        revision = self.revision + 1
        item = Item(put.key, put.value, former.created if former else revision, revision, put.lease)
        self._tree.put(item)
        events.append(Event(put.key, revision, item))
        left = former.lease if former else 0
        if left != put.lease:
            if left:
                self._disown(left, put.key)
            if put.lease:
                self._owned.setdefault(put.lease, {})[put.key] = None

    def _delete(self, key: str, events: list[Event]) -> None:
        item = self._tree.items.get(key)
        if item is None:
            return
        self._tree.remove(key)
        events.append(Event(key, self.revision + 1, None))
        if item.lease:
            self._disown(item.lease, key)

    def _disown(self, lease: int, key: str) -> None:
        # An ended lease owns no key any more, hence the defaults.
        owned = self._owned.get(lease, {})
        owned.pop(key, None)
        if not owned:
            self._owned.pop(lease, None)

    # ---- leases

    def grant(self, ttl_s: float, lease: int = 0) -> int:
        return self.leases.grant(ttl_s, lease)

    def renew(self, lease: int) -> None:
        self.leases.renew(lease)

    def revoke(self, lease: int) -> None:
        if self.leases.revoke(lease):
            self._bury(lease)

    def pass_time(self, elapsed_s: float) -> bool:
        """Advance the time of the leases and delete the keys of those that end, at one revision for each lease.

        Return whether any has ended.
        """
        ended = self.leases.pass_time(elapsed_s)
        for lease in ended:
            self._bury(lease)
        return bool(ended)

    def _bury(self, lease: int) -> None:
        events: list[Event] = []
        for key in self._owned.pop(lease, ()):
            self._delete(key, events)
        self._commit(events)

    # ---- watches

    def subscribe(
        self, targets: Sequence[str], since: int, deliver: Callable[[Batch], None], ends: Sequence[str] = ()
    ) -> Callable[[], None]:
        """Deliver every change of the targets after revision `since`, and return a function that ends the subscription.

        Of the keys in `ends`, only the deletions are delivered.

        Past changes are delivered before this returns, as one batch, or Gap is raised. Then one batch per commit
        follows. All watchers of the same events get the same object, so that a server encodes it once.
        """
        if not self._forgotten <= since <= self.revision:
            raise Gap(f"revisions {self._forgotten} to {self.revision} can be watched from, not {since}")
        watcher = _Watcher(targets, self.revision, deliver, ends, self._end_watcher)
        for index, names in self._indices(watcher):
            for name in names:
                known = index.get(name)
                if known is None:
                    index[name] = (watcher,)
                elif isinstance(known, dict):
                    known[watcher] = None
                else:
                    index[name] = {known[0]: None, watcher: None}
        missed = self._missed(watcher, since) if since < self.revision else ()
        if missed:
            self.meter.steps += len(missed)
            deliver(Batch(self.revision, missed))
        return watcher

    def _unsubscribe(self, watcher: _Watcher) -> None:
        for index, names in self._indices(watcher):
            for name in names:
                known = index[name]
                if isinstance(known, dict) and len(known) > 1:
                    del known[watcher]
                else:
                    del index[name]

    def _indices(self, watcher: _Watcher) -> tuple[tuple[_Index, tuple[str, ...]], ...]:
        return (self._by_key, watcher.keys), (self._by_end, watcher.ends), (self._by_prefix, watcher.prefixes)

    def _missed(self, watcher: _Watcher, since: int) -> tuple[Event, ...]:
        names = watcher.keys + watcher.ends
        if not watcher.prefixes and max([self._changed.get(name, 0) for name in names], default=0) <= since:
            return ()
        missed: list[Event] = []
        # Backwards: most watches begin near the end of the history.
        for batch in reversed(self._history):
            if batch.revision <= since:
                break
            self.meter.steps += len(batch.events)
            missed.extend(event for event in reversed(batch.events) if watcher.wants(event))
        return tuple(reversed(missed))

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including that revision. A watch from before it raises Gap."""
        while self._history and self._history[0].revision <= revision:
            self._forget_oldest()
        self._forgotten = max(self._forgotten, min(revision, self.revision))

    def shorten_history(self, size: int) -> None:
        """Forget the oldest changes until at most that many events are kept."""
        while self.history_size > size:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        batch = self._history.popleft()
        self._forgotten = batch.revision
        for event in batch.events:
            self.history_size -= _size(event)
            for name in (event.key, starred(event.key)):
                if self._changed.get(name) == batch.revision:
                    del self._changed[name]

    def _commit(self, events: list[Event]) -> None:
        if not events:
            return
        self.revision += 1
        batch = Batch(self.revision, tuple(events))
        self._history.append(batch)
        self.meter.steps += CHANGE_STEPS * len(events)
        stars = [starred(event.key) for event in events]
        changed, revision = self._changed, self.revision
        for event, star in zip(events, stars, strict=True):
            self.history_size += _size(event)
            changed[event.key] = changed[star] = revision
        self.shorten_history(self._history_max)
        self._untold.append((batch, stars))
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                self._tell(*self._untold.popleft())
        finally:
            self._telling = False

    def _tell(self, batch: Batch, stars: list[str]) -> None:
        for observer in tuple(self.observers):
            observer(batch)
        if len(stars) == 1:
            self._tell_one(batch, stars[0])
        else:
            self._tell_many(batch, stars)

    def _tell_one(self, batch: Batch, star: str) -> None:
        (event,) = batch.events
        key, by_key, by_prefix = event.key, self._by_key, self._by_prefix
        found: dict[_Watcher, None] = dict.fromkeys(by_key.get(key, ()))
        if star in by_key:
            found.update(dict.fromkeys(by_key[star]))
        if event.item is None and key in self._by_end:
            found.update(dict.fromkeys(self._by_end[key]))
        for name in _ancestors(key[: key.rfind("/") + 1]) if by_prefix else ():
            if name in by_prefix:
                found.update(dict.fromkeys(by_prefix[name]))
        self.meter.steps += TELL_STEPS * len(found)
        for watcher in found:
            if watcher.live and watcher.seen < batch.revision:
                watcher.deliver(batch)

    def _tell_many(self, batch: Batch, stars: list[str]) -> None:
        # A prefix keeps one list of its events for all its watchers, so that a large commit costs each of them one look.
        found: dict[_Watcher, dict[int, None]] = {}
        of_prefix: dict[str, list[int]] = {}
        prefixes: dict[_Watcher, list[list[int]]] = {}
        above: dict[str, list[str]] = {}
        for index, event in enumerate(batch.events):
            for name in (event.key, stars[index]):
                for watcher in self._by_key.get(name, ()):
                    found.setdefault(watcher, {})[index] = None
            if event.item is None:
                for watcher in self._by_end.get(event.key, ()):
                    found.setdefault(watcher, {})[index] = None
            if not self._by_prefix:
                continue
            name = event.key[: event.key.rfind("/") + 1]
            if name not in above:
                above[name] = [one for one in _ancestors(name) if one in self._by_prefix]
            for prefix in above[name]:
                if prefix in of_prefix:
                    of_prefix[prefix].append(index)
                    continue
                indices = of_prefix[prefix] = [index]
                for watcher in self._by_prefix[prefix]:
                    found.setdefault(watcher, {})
                    prefixes.setdefault(watcher, []).append(indices)
        self.meter.steps += TELL_STEPS * len(found)
        parts = {tuple(range(len(batch.events))): batch} if found else {}
        wide: dict[int, Batch] = {}
        for watcher, own in found.items():
            if not watcher.live or watcher.seen >= batch.revision:
                continue
            lists = prefixes.get(watcher) if prefixes else None
            if lists is not None and len(lists) == 1 and not own:
                part = wide.get(id(lists[0]))
                if part is None:
                    part = wide[id(lists[0])] = self._part(batch, parts, tuple(lists[0]))
            else:
                part = self._part(batch, parts, tuple(own) if lists is None else tuple(sorted(set(own).union(*lists))))
            watcher.deliver(part)

    def _part(self, batch: Batch, parts: dict[tuple[int, ...], Batch], chosen: tuple[int, ...]) -> Batch:
        """Return the events at these indices, as the same object each time."""
        part = parts.get(chosen)
        if part is None:
            self.meter.steps += len(chosen)
            part = parts[chosen] = Batch(batch.revision, tuple([batch.events[index] for index in chosen]))
        return part


def starred(key: str) -> str:
    """Return the star target that matches the key: its last directory's name replaced by a star."""
    end = key.rfind("/")
    return key if end < 0 else f"{key[: key.rfind('/', 0, end) + 1]}*{key[end:]}"


def _ancestors(directory: str) -> list[str]:
    found = []
    end = directory.find("/") + 1
    while end:
        found.append(directory[:end])
        end = directory.find("/", end) + 1
    return found


def _size(event: Event) -> int:
    return 1 + (len(event.key) + (len(event.item.value) if event.item else 0)) // 1024


def refuse_double_writes(operations: Sequence[Operation]) -> None:
    """Raise ValueError if a branch writes a key twice.

    Checked for branches not taken too: the caller is wrong in any case, and etcd refuses it in the same way.
    """
    writes = [operation for operation in operations if type(operation) is not Get and type(operation) is not List]
    if len(writes) < 2:
        return
    keys: set[str] = set()
    prefixes: tuple[str, ...] = ()
    for write in writes:
        if type(write) is DeletePrefix:
            name = write.prefix
            twice = name.startswith(prefixes) or any(other.startswith(name) for other in (*prefixes, *keys))
            prefixes += (name,)
        else:
            name = write.key
            twice = name in keys or name.startswith(prefixes)
            keys.add(name)
        if twice:
            raise ValueError(f"{name} would be written twice in one transaction")
