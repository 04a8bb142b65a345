"""Sockets that a forked child must not keep.

A child inherits every descriptor. One that it keeps open hides its parent's death: the peer of a connection sees no end of
it, and a listening socket occupies the address although nobody accepts there any more. So the child replaces each of them
by an empty one. Not by closing: the objects that own these numbers will close them, and must not hit another file then.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Held(Protocol):
    """What has a descriptor; -1 once it has none."""

    def fileno(self) -> int:
        """Its number."""


_held: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[object] = []
"""In a child: never freed, because an event loop's objects complain, and act, when they are."""


def let_go_in_children(held: Held) -> None:
    """A child forked from now on will not have this open."""
    _held.add(held)


def _let_go() -> None:
    global _held
    inherited, _held = list(_held), weakref.WeakSet()
    numbers = [number for held in inherited if (number := held.fileno()) >= 0]
    if not numbers:
        return
    _inherited.extend(inherited)
    empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        os.dup2(empty, number, inheritable=False)
    os.close(empty)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
