"""One run on a server: an engine of its own, its sessions, and what is known of its members' lives. No I/O; time is passed in.

An engine for each run keeps runs apart: no key, watch, limit or flood of changes of one run is felt by another, and the silence
of one run is not hidden by the noise of the next. A *presence* is a lease that stands for a member's process. It ends when

- its lease runs out, or
- its connection is gone and does not come back for a while (the *linger*), unless many connections went together: then the
  network is to blame, and the lease decides.

Time passes for presences only while some member of the run is connected and heard. A server that no one can reach cannot tell
its own isolation from the death of all members. When a member is heard again after a long silence, every presence starts anew:
the first to be back must not condemn those who are about to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ...errors import LimitExceeded
from ..port import (
    STORED,
    AllCreated,
    Batch,
    Case,
    Compare,
    Delete,
    DeletePrefix,
    Empty,
    Get,
    List,
    Operation,
    Outcome,
    Put,
)
from ..reference import Engine
from .frames import KEY_MAX
from .lease_clock import STEP_MAX_S
from .limits import Limits, Room
from .turns import Share

if TYPE_CHECKING:
    from .session import ServerSession

QUIET_MIN_S = 0.5
"""A shorter pause is no silence, however short the leases are."""
ABANDONED_S = 3600.0
"""After this time without a word no member will come back, and the leases may run out."""
TTL_MAX_S = 10 * 366 * 86_400.0
PREFIXES_MAX = 1000
"""Prefixes in one transaction. Each is compared with all writes of the transaction."""
PAIRS_MAX = 250_000
RUN_BYTES, KEY_BYTES, HISTORY_BYTES, LEASE_BYTES, TARGET_BYTES = 4096, 640, 1024, 256, 768
"""Bytes that a run, a key beside its value, a remembered change, a lease and a watched key take: measured and rounded up."""
RECORDS_SHARE = 1.5
"""A run's own records are let in up to so many times the limits of keys and bytes that a program may fill the store to."""
WAITS_SHARE = 0.8
"""Watches of keys alone, by which programs wait for values, may have so much of what a run may watch."""
HISTORY_MIN = 16
"""Changes that a run may always remember."""


class _Presence(msgspec.Struct):
    """A lease that stands for a process."""

    ttl_s: float
    home: ServerSession
    """The connection by which the process was heard last."""


class Run:
    """One run. Every `now` is a reading of the same clock."""

    def __init__(self, name: str, instance: str, limits: Limits, now: float, room: Room | None = None) -> None:
        self.name = name
        self.opened_by = ""
        """Host of the client that opened it."""
        self.share = Share(now)
        self.engine = Engine(instance, history_max=limits.history, steps_max=limits.steps, meter=self.share)
        self.engine.observers.append(self._count)
        self.sessions: dict[str, ServerSession] = {}
        self.bytes = 0
        self.began_at = self.heard_at = self._stepped_at = now
        self._limits = limits
        self.room = room or Room(limits.stored)
        self.room.runs += 1
        self.taken = 0
        """Bytes that this run takes of the room."""
        self.targets = 0
        self.prefixes = 0
        """Keys and prefixes, and prefixes alone, that its clients watch."""
        self._sizes: dict[str, int] = {}
        self._presences: dict[int, _Presence] = {}
        self._quiet_max_s = math.inf
        self.measure()
        self._some_ended = False
        """Presences have ended since `_quiet_max_s` was computed. It is not computed for each: thousands may leave at once."""

    @property
    def is_empty(self) -> bool:
        return not (self.sessions or len(self.engine) or len(self.engine.leases))

    @property
    def presences(self) -> int:
        """The number of members that are there or may come back."""
        if self._some_ended:
            self._drop_ended()
        return len(self._presences)

    @property
    def is_deserted(self) -> bool:
        """Whether nobody is connected and no lease says that anybody may come back."""
        return not (self.sessions or len(self.engine.leases))

    def forget(self) -> None:
        """Give back the room: the server drops this run."""
        self.room.runs -= 1
        self.room.taken -= self.taken

    # ---- requests

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation],
        instead: Sequence[Case] = (),
    ) -> Outcome:  # fmt: skip
        """Apply a transaction. Raise LeaseGone, ValueError or LimitExceeded if nothing was changed."""
        self._check_compares(compares)
        self._check_operations(then)
        for case in instead:
            self._check_compares(case.compares)
            self._check_operations(case.then)
        self._check_operations(otherwise)
        # The end of a process is judged more finely than in steps. If the next step is late, what waits in the sockets may not
        # have been read, and its time does not count yet.
        passing_s = max(0.0, self.heard_at - self._stepped_at)
        self.engine.leases.passing_s = passing_s if passing_s <= STEP_MAX_S else 0.0
        return self.engine.txn(compares, then, otherwise, instead)

    def grant(self, ttl_s: float, home: ServerSession | None, lease: int = 0) -> int:
        """Begin a lease. `home`: the connection of the process that it stands for. `lease`: its id; 0 for any.

        Only a presence ends with its connection. The run's own records hang on an ordinary lease, or they would go with the
        first leader.
        """
        if len(self.engine.leases) >= self._limits.leases:
            msg = f"run {self.name!r} has {len(self.engine.leases)} leases, at most {self._limits.leases} are allowed"
            raise ValueError(msg)
        if not 0 < ttl_s <= TTL_MAX_S:
            raise ValueError(f"a lease of {ttl_s} s: its time to live must be positive and at most {TTL_MAX_S:.0f} s")
        if self.room.taken + LEASE_BYTES > self.room.half and not self.room.has(self.taken, LEASE_BYTES):
            raise self._no_room(LEASE_BYTES)
        lease = self.engine.grant(ttl_s + STEP_MAX_S, lease)
        if home is not None:
            self._presences[lease] = _Presence(ttl_s, home)
            home.leases.add(lease)
            self._quiet_max_s = min(self._quiet_max_s, max(ttl_s / 2, QUIET_MIN_S))
        self.taken += LEASE_BYTES
        self.room.taken += LEASE_BYTES
        return lease

    def renew(self, lease: int, home: ServerSession) -> None:
        """Start the lease's time anew. Raise LeaseGone if it has ended."""
        self.engine.renew(lease)
        self._move(lease, home)

    def revoke(self, lease: int) -> None:
        if self._presences.pop(lease, None) is not None:
            self._some_ended = True
        self.engine.revoke(lease)

    # ---- connections

    def enter(self, home: ServerSession, instance: str, leases: Iterable[int]) -> bool:
        """Take a session in, with the presences it brings back if it knows this instance.

        Return False if a later connection of the session is there already. Presences that have ended are not an error: the
        session finds out when it renews them.
        """
        former = self.sessions.get(home.session)
        if former is not None and former.attempt >= home.attempt:
            return False
        self.sessions[home.session] = home
        for lease in leases if instance == self.engine.instance else ():
            if lease in self.engine.leases and self._move(lease, home):
                self.engine.leases.come_back(lease)
        if former is not None:
            former.replaced()
        return True

    def leave(self, home: ServerSession) -> None:
        """Forget a connection that is over."""
        if self.sessions.get(home.session) is home:
            del self.sessions[home.session]

    def hang_up(self, home: ServerSession, linger_s: float, now: float) -> None:
        """Start the linger: the connection broke, perhaps because its member died."""
        self.engine.leases.passing_s = min(now - self._stepped_at, STEP_MAX_S)
        if linger_s:  # It must last for `linger_s` at least, even if the next step begins now and is the longest.
            linger_s += STEP_MAX_S
        for lease in self._presences_of(home):
            self.engine.leases.hang_up(lease, linger_s, process_ended=home.process_ended)

    def let_go(self, home: ServerSession) -> None:
        """Make the session's presences ordinary leases: it said goodbye."""
        for lease in self._presences_of(home):
            del self._presences[lease]
            self._some_ended = True

    def _presences_of(self, home: ServerSession) -> list[int]:
        return [one for one in home.leases if (held := self._presences.get(one)) is not None and held.home is home]

    def _move(self, lease: int, home: ServerSession) -> bool:
        """Hang the lease on this connection, unless this is a late frame of one that was given up."""
        presence = self._presences.get(lease)
        if presence is not None and presence.home is home:
            return True
        if presence is None or presence.home.session != home.session or presence.home.attempt > home.attempt:
            return False
        presence.home.leases.discard(lease)
        presence.home = home
        home.leases.add(lease)
        return True

    # ---- time

    def hear(self, now: float) -> None:
        """Note that a member of this run was heard. Call this before serving its request."""
        if now - self.heard_at > self._quiet_max_s:
            self._drop_ended()
            for lease in self._presences:
                self.engine.renew(lease)
        self.heard_at = now

    def pass_time(self, elapsed_s: float, now: float) -> None:
        """Let time pass for the leases, if it passes for this run at all."""
        self._stepped_at = now
        if self._some_ended:
            self._drop_ended()
        if self._presences:
            silent_s = now - self.heard_at
            heard = self.sessions and silent_s <= self._quiet_max_s
            if not heard and silent_s < ABANDONED_S:
                return
        self._some_ended = self.engine.pass_time(elapsed_s)

    def _drop_ended(self) -> None:
        self._some_ended = False
        self.measure()
        self._presences = {lease: held for lease, held in self._presences.items() if lease in self.engine.leases}
        # Members renew in thirds of a lease, so a silence of half the shortest one means that none of them gets through.
        shortest_s = min((held.ttl_s for held in self._presences.values()), default=math.inf)
        self._quiet_max_s = max(shortest_s / 2, QUIET_MIN_S)

    # ---- limits

    def _check_compares(self, compares: Sequence[Compare]) -> None:
        count, scans = 0, 0
        for compare in compares:
            count += len(compare.revisions) if type(compare) is AllCreated else 1
            scans += type(compare) is Empty
        if count > self._limits.operations or scans > PREFIXES_MAX:
            raise ValueError(
                f"a transaction with {count} compares, {scans} of prefixes: "
                f"at most {self._limits.operations} are allowed, {PREFIXES_MAX} of prefixes; split it"
            )

    def _check_operations(self, operations: Sequence[Operation]) -> None:
        """Check all that the engine does not check itself."""
        puts: list[Put] = []
        count, scans, added = len(operations), 0, 0
        for operation in operations:
            if type(operation) is Get:  # The most frequent one.
                continue
            if type(operation) is Put:
                puts.append(operation)
                size = len(operation.key)
                added += size + len(operation.value)
                if size > KEY_MAX:
                    raise ValueError(long_key(operation.key))
            elif type(operation) is List:
                scans += 1
                if operation.limit < 0 or operation.created_below < 0:
                    msg = f"a list with limit {operation.limit}, created below {operation.created_below}: neither is negative"
                    raise ValueError(msg)
            elif type(operation) is DeletePrefix:
                scans += 1
            elif type(operation) is Delete and len(operation.key) > KEY_MAX:
                raise ValueError(long_key(operation.key))
        if count > self._limits.operations or scans > PREFIXES_MAX or scans * count > PAIRS_MAX:
            raise ValueError(
                f"a transaction with {count} operations, {scans} of prefixes: at most "
                f"{self._limits.operations} are allowed, {PREFIXES_MAX} of prefixes; split it"
            )
        if puts and (
            self.bytes + added > self._limits.bytes
            or len(self._sizes) + len(puts) > self._limits.keys
            or self.room.taken + added + len(puts) * KEY_BYTES > self.room.half
        ):
            self._check_room(puts)

    def _check_room(self, puts: list[Put]) -> None:
        """Refuse puts that need more room than there is. Others are let in, so that a full run can still end."""
        share = 1.0 if any(STORED in put.key for put in puts) else RECORDS_SHARE
        bytes_max, keys_max = int(self._limits.bytes * share), int(self._limits.keys * share)
        new = sum(put.key not in self._sizes for put in puts)
        more = sum(len(put.key) + len(put.value) - self._sizes.get(put.key, 0) for put in puts)
        if more > 0 and self.bytes + more > bytes_max:
            raise LimitExceeded(f"run {self.name!r} on this server", self.bytes + more, bytes_max)
        if new and len(self._sizes) + new > keys_max:
            msg = f"run {self.name!r} would have {len(self._sizes) + new} keys, at most {keys_max} are allowed"
            raise ValueError(msg)
        more += new * KEY_BYTES
        if more > 0 and not self.room.has(self.taken, more, share):
            raise self._no_room(more)

    def _no_room(self, more: int) -> LimitExceeded:
        return LimitExceeded("this server, with all its runs,", self.room.taken + more, self._limits.stored)

    def why_not_wait(self, targets: Sequence[str]) -> str:
        """Return why there is no room for a watch of keys alone, by which a program waits for values; empty: there is.

        Many programs may wait for many, and the watches of members must have room, too.
        """
        return "" if any(target[-1:] == "/" for target in targets) else self.why_not_watch(len(targets), 0, WAITS_SHARE)

    def why_not_watch(self, targets: int, prefixes: int, share: float = 1.0) -> str:
        """Return why there is no room for a client to watch so much; empty: there is. `share`: of what the run may watch."""
        limits, targets_max = self._limits, int(self._limits.run_targets * share)
        if self.targets + targets > targets_max or self.prefixes + prefixes > limits.run_prefixes:
            return (
                f"run {self.name!r} would watch {self.targets + targets} keys or prefixes, {self.prefixes + prefixes} of them "
                f"prefixes: at most {targets_max} and {limits.run_prefixes} are allowed"
            )
        more = targets * TARGET_BYTES
        if self.room.taken + more > self.room.half and not self.room.has(self.taken, more):
            return self._no_room(more).sentence
        return ""

    def watch(self, targets: int, prefixes: int) -> None:
        """Count what a client begins to watch."""
        self.targets += targets
        self.prefixes += prefixes
        self._take(targets * TARGET_BYTES)

    def unwatch(self, targets: int, prefixes: int) -> None:
        self.targets -= targets
        self.prefixes -= prefixes
        self._take(-targets * TARGET_BYTES)

    def _take(self, more: int) -> None:
        self.taken += more
        self.room.taken += more

    def measure(self) -> None:
        """Compute anew how much of the server's memory this run takes."""
        self._remembered = self.engine.history_size
        taken = (
            RUN_BYTES + self.bytes + len(self._sizes) * KEY_BYTES + self._remembered * HISTORY_BYTES
            + len(self.engine.leases) * LEASE_BYTES + self.targets * TARGET_BYTES
        )  # fmt: skip
        self._take(taken - self.taken)

    def _count(self, batch: Batch) -> None:
        sizes, keys, more, remembered = self._sizes, len(self._sizes), 0, self.engine.history_size
        for event in batch.events:
            more -= sizes.pop(event.key, 0)
            if event.item is not None:
                size = sizes[event.key] = len(event.key) + len(event.item.value)
                more += size
        self.bytes += more
        more += (len(sizes) - keys) * KEY_BYTES + (remembered - self._remembered) * HISTORY_BYTES
        self._remembered = remembered
        self.taken += more
        self.room.taken += more
        if self.room.taken > self.room.half and self.taken > self.room.share:
            self.engine.shorten_history(max(HISTORY_MIN, self.room.share // 4 // HISTORY_BYTES))
            self.measure()


def long_key(key: str) -> str:
    """Return why a long key is refused. Every engine has such a limit, and long keys make short requests expensive."""
    return f"key {key[:64]!r}... has {len(key)} characters, at most {KEY_MAX} are allowed"
