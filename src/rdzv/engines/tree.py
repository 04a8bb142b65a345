"""The keys of a reference engine, by name and by directory, with a count of the work that searches make."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator

from .port import Item, Order

DIRECTORY_STEPS = 3
"""Steps that a directory counts as when a search comes to it. A key that is looked at is one."""
DEAD_MIN = 4
STEPS_PER_KEY = DIRECTORY_STEPS + 2 + DEAD_MIN
"""Most steps of a search per key, if each is in a directory of its own: its entry, and those of deleted keys beside it."""


class Meter:
    """A count of work: keys looked at, and other things that take about as long. A step is less than a microsecond."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class _Directory:
    """The keys with one directory part (up to the last '/'), in the order of their creation.

    Deletion is cheap: deleted keys stay in the lists until they are the majority. An entry is valid if its `created`
    equals the existing item's. `created` is sorted, so "the newest before revision r" needs no walk.
    """

    __slots__ = ("created", "keys", "live")

    def __init__(self) -> None:
        self.created: list[int] = []
        self.keys: list[str] = []
        self.live = 0

    def span(self, newest: bool, below: int) -> range:
        """Return the indices of the entries created before revision `below` (0: all), in the order in which to look."""
        end = bisect_left(self.created, below) if below else len(self.keys)
        return range(end - 1, -1, -1) if newest else range(end)

    def sweep(self, items: dict[str, Item]) -> int:
        """Drop the entries of deleted keys, if there are many. Return how many entries were looked at."""
        looks = len(self.keys)
        if looks <= 2 * self.live + DEAD_MIN:
            return 0
        entries = zip(self.keys, self.created, strict=True)
        left = [item for key, created in entries if (item := items.get(key)) and item.created == created]
        self.keys = [item.key for item in left]
        self.created = [item.created for item in left]
        return looks


class Tree:
    """All items, by key and by directory."""

    def __init__(self, meter: Meter) -> None:
        self.items: dict[str, Item] = {}
        self.meter = meter
        self.steps_end = sys.maxsize
        """The count at which a search is given up with ValueError."""
        self._directories: dict[str, _Directory] = {}
        self._names: list[str] = []

    def put(self, item: Item) -> None:
        if item.key not in self.items:
            name = item.key[: item.key.rfind("/") + 1]
            directory = self._directories.get(name)
            if directory is None:
                directory = self._directories[name] = _Directory()
                insort(self._names, name)
                self.meter.steps += len(self._names) // 2000  # Half of the list moves.
            directory.created.append(item.created)
            directory.keys.append(item.key)
            directory.live += 1
        self.items[item.key] = item

    def remove(self, key: str) -> None:
        del self.items[key]
        name = key[: key.rfind("/") + 1]
        directory = self._directories[name]
        directory.live -= 1
        if directory.live:
            self.meter.steps += directory.sweep(self.items)
        else:
            del self._directories[name]
            del self._names[bisect_left(self._names, name)]

    def find(self, prefix: str, order: Order, limit: int = 0, below: int = 0, after: str = "") -> tuple[Item, ...]:
        """Return the items that a `List` asks for."""
        # ANY counts as newest: members that each watch one other member should not all watch the oldest.
        newest = order is Order.NEWEST or order is Order.ANY
        items, sources = self.items, 0
        found: list[Item] = []
        for directory, whole in self._within(prefix):
            room = limit if order is not Order.KEY else 0
            keys, created, span = directory.keys, directory.created, directory.span(newest, below)
            index = span.start - span.step
            for index in span:
                item = items.get(keys[index])
                if item is None or item.created != created[index]:
                    continue
                if (whole or item.key.startswith(prefix)) and (not after or item.key > after):
                    found.append(item)
                    room -= 1
                    if room == 0:
                        break
            self.meter.steps += (index - span.start) * span.step + 1
            sources += 1
            if order is Order.ANY and found and room == 0:
                break
        if order is Order.KEY:
            found.sort(key=lambda item: item.key)
        elif sources > 1 and order is not Order.ANY:
            found.sort(key=lambda item: item.created, reverse=newest)
        return tuple(found[:limit] if limit else found)

    def empty(self, prefix: str, since: int) -> bool:
        """Whether no key with that prefix was created after revision `since`."""
        for directory, whole in self._within(prefix):
            keys, created, span = directory.keys, directory.created, directory.span(newest=True, below=0)
            index = span.start - span.step
            for index in span:
                if created[index] <= since:
                    break
                item = self.items.get(keys[index])
                if item is not None and item.created == created[index] and (whole or item.key.startswith(prefix)):
                    self.meter.steps += span.start - index + 1
                    return False
            self.meter.steps += span.start - index + 1
        return True

    def check_steps(self) -> None:
        """Raise ValueError if a search was given up."""
        if self.meter.steps > self.steps_end:
            raise ValueError("the transaction looks at more keys than this server allows at once: split it, or ask for less")

    def _within(self, prefix: str) -> Iterator[tuple[_Directory, bool]]:
        """Yield the directories that can hold keys with that prefix, and whether all of their keys have it."""
        name = prefix[: prefix.rfind("/") + 1]
        if name != prefix and name in self._directories:
            yield self._directories[name], False
        for index in range(bisect_left(self._names, prefix), len(self._names)):
            if not self._names[index].startswith(prefix):
                return
            self.meter.steps += DIRECTORY_STEPS
            if self.meter.steps > self.steps_end:
                return
            yield self._directories[self._names[index]], True
