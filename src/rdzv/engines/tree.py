"""The keys of a reference engine, by name and by directory, with a count of the work that searches make."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator

from .port import Item, Order

DIRECTORY_STEPS = 3
"""Steps that a directory counts as when a search comes to it. A key that is looked at is one."""
DEAD_MIN = 4
ENTRIES_PER_KEY = 3 + DEAD_MIN
"""Bound of the steps of a search, per key: its entry, one of a deleted key, a directory with a few deleted keys more."""


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

    def walk(self, tree: Tree, newest: bool, below: int) -> Iterator[Item]:
        """Yield the items created before revision `below` (0: all), and count the entries that were looked at."""
        items = tree.items
        end = bisect_left(self.created, below) if below else len(self.keys)
        index = end if newest else -1
        try:
            for index in range(end - 1, -1, -1) if newest else range(end):
                item = items.get(self.keys[index])
                if item is not None and item.created == self.created[index]:
                    yield item
        finally:
            tree.meter.steps += end - index if newest else index + 1

    def sweep(self, tree: Tree) -> None:
        """Drop the entries of deleted keys, if there are many."""
        if len(self.keys) > 2 * self.live + DEAD_MIN:
            left = list(self.walk(tree, newest=False, below=0))
            self.created = [item.created for item in left]
            self.keys = [item.key for item in left]


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
            directory.sweep(self)
        else:
            del self._directories[name]
            del self._names[bisect_left(self._names, name)]

    def find(self, prefix: str, order: Order, limit: int = 0, below: int = 0, after: str = "") -> tuple[Item, ...]:
        """Return the items that a `List` asks for."""
        # ANY counts as newest: members that each watch one other member should not all watch the oldest.
        newest = order is Order.NEWEST or order is Order.ANY
        found: list[Item] = []
        sources = 0
        for directory, whole in self._within(prefix):
            room = limit if order is not Order.KEY else 0
            for item in directory.walk(self, newest, below):
                if (whole or item.key.startswith(prefix)) and (not after or item.key > after):
                    found.append(item)
                    room -= 1
                    if room == 0:
                        break
            sources += 1
        if order is Order.KEY:
            found.sort(key=lambda item: item.key)
        elif sources > 1 and order is not Order.ANY:
            found.sort(key=lambda item: item.created, reverse=newest)
        return tuple(found[:limit] if limit else found)

    def empty(self, prefix: str, since: int) -> bool:
        """Whether no key with that prefix was created after revision `since`."""
        for directory, whole in self._within(prefix):
            for item in directory.walk(self, newest=True, below=0):
                if item.created <= since:
                    break
                if whole or item.key.startswith(prefix):
                    return False
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
