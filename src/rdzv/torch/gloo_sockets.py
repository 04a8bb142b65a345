"""The sockets that gloo's groups use, found in this process, so that a thread that gloo blocks can be freed.

gloo has no abort. A collective whose peer is paused waits for its timeout, and so does one whose peer waits for another peer
in turn. `shutdown(SHUT_RD)`, from any thread, makes gloo see the end of the connection at once. Two other calls are
dangerous: SHUT_RDWR can hang the thread for good, and shutting a listening socket aborts the process.

gloo then closes the connection, and that end must not reach the peer. A write of the peer that meets a closed connection
is put aside by its gloo, which forgets it when it ends the other operations: the thread that waits for that write waits
for the whole timeout. So a copy of each descriptor keeps the connection open until the peers have left the round too.

gloo does not tell its sockets, but the kernel does. Each device of gloo watches one listening socket and its connections
with one epoll, whose members Linux lists. This also finds the groups that a program, DDP or a DeviceMesh makes later. It
does not touch other threads' connections: Python's event loops and libuv register a descriptor under its own number, gloo
under a pointer.
"""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..system.fork import replace_by_empty

_OPEN, _INFO = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_WATCHED = re.compile(r"^tfd: *(\d+) +events: *\w+ +data: *(\w+) .*\bino:(\w+)", re.MULTILINE)


class GlooSockets:
    """The sockets of all groups that are made from now on."""

    def __init__(self) -> None:
        # By inode: a number may stand for another descriptor as soon as a group from before is freed.
        self._before = {inode for epoll in _epolls() for _, inode in _watched_by_pointer(epoll)}
        self._kept: dict[int, int] = {}
        """By inode: a copy of each stopped connection. It stays open until `close`, or until the process ends."""
        _used.add(self)

    def stop_reads(self) -> int:
        """End all reads, also those to come. Return the number of connections. Any thread may call it, and repeatedly."""
        for number, inode in self.descriptors():
            with suppress(OSError), _copy(number, inode) as connection:
                if inode not in self._kept and not _listens(connection):
                    connection.shutdown(socket.SHUT_RD)
                    self._kept[inode] = connection.detach()
        return len(self._kept)

    def close(self) -> None:
        """End the stopped connections, when no peer writes to them any more."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def in_use(self) -> set[int]:
        """The descriptors of all sockets, also of those that gloo no longer watches and has not closed yet."""
        inodes = {inode for _, inode in self.descriptors()} | set(self._kept)
        return {number for number, inode in _sockets() if inode in inodes}

    def descriptors(self) -> list[tuple[int, int]]:
        """Number and inode of each socket, the listening ones too."""
        found = []
        for epoll in _epolls():
            sockets = _watched_by_pointer(epoll)
            if self._before.isdisjoint(inode for _, inode in sockets) and any(_is_listener(*one) for one in sockets):
                found += sockets
        return found


def _epolls() -> Iterator[int]:
    with suppress(OSError):
        for file in list(_OPEN.iterdir()):
            with suppress(OSError):
                if file.readlink().name == "anon_inode:[eventpoll]":
                    yield int(file.name)


def _sockets() -> Iterator[tuple[int, int]]:
    """Number and inode of each socket of this process."""
    with suppress(OSError):
        for file in list(_OPEN.iterdir()):
            with suppress(OSError):
                if inode := _SOCKET.fullmatch(file.readlink().name):
                    yield int(file.name), int(inode[1])


def _watched_by_pointer(epoll: int) -> list[tuple[int, int]]:
    try:
        text = (_INFO / str(epoll)).read_text("ascii")
    except OSError:  # It was closed meanwhile.
        return []
    sockets = set(_sockets())
    watched = [(int(number), int(data, 16), int(inode, 16)) for number, data, inode in _WATCHED.findall(text)]
    return [(number, inode) for number, data, inode in watched if data != number and (number, inode) in sockets]


def _copy(number: int, inode: int) -> socket.socket:
    """Duplicate a descriptor that other code owns. Raises OSError if the number stands for another file by now."""
    copy = os.dup(number)
    try:
        if os.fstat(copy).st_ino == inode:
            return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    os.close(copy)
    raise OSError(f"descriptor {number} was closed meanwhile")


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_listener(number: int, inode: int) -> bool:
    with suppress(OSError), _copy(number, inode) as one:
        return _listens(one)
    return False


_used: weakref.WeakSet[GlooSockets] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A DataLoader's worker that keeps them open hides the death of its parent from the other members.
    replace_by_empty({number for sockets in _used for number in sockets.in_use()})
    _used.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
