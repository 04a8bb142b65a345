"""Ports for the servers that tests start.

Binding to port 0 would give a port of the range from which the kernel takes those of outgoing connections. One of these may
have it before the server does, or while a server that the test has killed is away. These ports are below that range.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

FIRST, EACH = 20_000, 1_000
"""Each of up to eight processes of pytest has a thousand ports of its own."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_tried = itertools.count(random.SystemRandom().randrange(EACH))  # Another pytest may run at the same time.


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine that nobody listens at."""
    found: list[int] = []
    for number in itertools.islice(_tried, EACH):
        port = FIRST + _worker * EACH + number % EACH
        if _is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports from {FIRST + _worker * EACH} on, for {EACH} ports")


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
