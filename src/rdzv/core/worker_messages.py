"""The messages between an agent and its workers: lines of JSON on a Unix socket, small and few.

A worker says hello once. Its hello names a *page*: a small file beside the socket that both have open. The worker writes its
step there, which costs no system call, and the agent reads it when it wants to. So a worker that makes 10,000 steps a second
sends nothing, and the last step of a worker that hangs or was stopped is known exactly. Its stacks are written behind the
step, by Python's `faulthandler` at a signal.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

SOCKET_ENV = "RDZV_WORKER"
"""The variable that names the socket to the workers."""
LINE_MAX = 4096
"""Bytes of one message."""
SAID_MAX = 64 * 1024
"""Bytes that a worker may send in its life: a hello, and an answer to each notice."""
PAGE_SIZE = 64
"""Bytes of the page before the stacks. The first 8 hold the step + 1, as a number of the machine; 0: no step yet."""
STEP_MAX = 2**62
PAGE_NAME = re.compile(r"[0-9a-f]{16}")


class WorkerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker introduces itself."""

    rank: int
    round: int
    page: str
    signal: int = 0
    """The signal at which the worker writes its stacks to the page; 0: it cannot."""


M = TypeVar("M", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode(kind: type[M], line: bytes) -> M | None:
    """Return the message in a line; None: it is no such message."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
