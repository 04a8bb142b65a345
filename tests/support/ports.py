"""Ports for the servers that tests start.

Binding to port 0 would give a port of the range from which the kernel takes those of outgoing connections. One of these may
have it before the server does, or while a server that the test has killed is away. These ports are below that range.

Each process that starts servers has ports of its own, and other processes of pytest, also of another one that runs at the same
time, have others: nobody else may take the port of a server that a test has killed and is about to start again.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path

FIRST, EACH, SHARES = 20_000, 500, 18
"""Ports, how many each process has, and how many processes there can be. Some tests use ports from 29,000 on."""

_tried = itertools.count(random.SystemRandom().randrange(EACH))  # A server of a former process may still be there.


@cache
def _share(_process: int) -> int:
    """Claim a share of the ports for as long as this process lives, and return its number."""
    for number in range(SHARES):
        path = Path(tempfile.gettempdir(), f"rdzv-test-ports-{os.getuid()}-{number}")
        lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)  # It stays open.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return number
    raise OSError(f"{SHARES} processes have claimed all ports for servers of tests")


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine that nobody listens at."""
    first = FIRST + EACH * _share(os.getpid())
    found: list[int] = []
    for number in itertools.islice(_tried, EACH):
        port = first + number % EACH
        if _is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports from {first} on, for {EACH} ports")


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
        return True


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
