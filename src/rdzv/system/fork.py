"""Sockets that a forked child must not keep, objects that it must not free, and moments at which nobody may fork.

A child inherits every descriptor. One that it keeps open hides its parent's death: the peer of a connection sees no end of it,
and a listening socket occupies the address although no process accepts there any more. So the child replaces each of them by an
empty one. It does not close them: the objects that own these numbers will, and must not hit another file then.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class Held(Protocol):
    """An object with a descriptor; -1 once it has none."""

    def fileno(self) -> int: ...


_held: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[object] = []
"""Objects that a child never frees: an event loop's objects complain, and act, when they are freed."""
_undying: weakref.WeakSet[Any] = weakref.WeakSet()

fork_lock = threading.RLock()
"""Held by a thread that forks. A thread that holds it can make descriptors and close them again unseen by any child."""


def let_go_in_children(held: Held) -> None:
    """Have children forked from now on close this."""
    _held.add(held)


def never_free_in_children(owner: object) -> None:
    """Have children forked from now on keep this until they end, also while their interpreter ends.

    For an object with a thread of its own in C++: its destructor joins the thread, which the child does not have, and aborts.
    """
    _undying.add(owner)


def _let_go() -> None:
    global _held
    for owner in _undying:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
    inherited, _held = list(_held), weakref.WeakSet()
    numbers = [number for held in inherited if (number := held.fileno()) >= 0]
    if not numbers:
        return
    _inherited.extend(inherited)
    replace_by_empty(numbers)


def replace_by_empty(numbers: Iterable[int]) -> None:
    """Let go of what the descriptors stand for. The numbers stay open, on /dev/null."""
    empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        os.dup2(empty, number, inheritable=False)
    os.close(empty)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=fork_lock.acquire, after_in_parent=fork_lock.release, after_in_child=fork_lock.release)
    os.register_at_fork(after_in_child=_let_go)
