"""The messages between an agent and its workers: lines of JSON on a Unix socket, small and few.

A worker says hello once, and that it listens when it first asks for a notice. Its hello names a *page*: a small file beside the
socket that both have open. The worker writes its step there, which costs no system call, and the agent reads it when it wants
to. So a worker that makes 10,000 steps a second sends nothing, and the last step of a worker that hangs or was stopped is known
exactly. Its stacks are written behind the step, by Python's `faulthandler` at a signal. The agent sends notices as lines, and
counts them on the page, so that a worker that asks in every step makes no system call either.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

SOCKET_ENV = "RDZV_WORKER"
"""The variable that names the socket to the workers."""
LINE_MAX = 4096
"""Bytes of one message."""
SAID_MAX = 64 * 1024
"""Bytes that a worker may send in its life: a hello, and an answer to each notice."""
PAGE_SIZE = 64
"""Bytes of the page before the stacks. The first 8 hold the step + 1, as a number of the machine; 0: no step yet. The agent
writes the next 8: how many notices it has sent."""
STEP_MAX = 2**62
PAGE_NAME = re.compile(r"[0-9a-f]{16}")


class WorkerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker introduces itself."""

    rank: int
    round: int
    page: str
    signal: int = 0
    """The signal at which the worker writes its stacks to the page; 0: it cannot."""


class WorkerListens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="listens"):
    """A worker says that it asks for notices. An agent that does not know this message passes over it."""


class WorkerSaved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="saved"):
    """A worker has saved, as a notice asked for."""

    notice: int


class NoticeSent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="notice"):
    """The agent tells its workers that their round will end; sent again if that changes. With id 0: it will not."""

    id: int
    reason: str = ""
    until: float = 0.0
    """The end of the time, on the monotonic clock that all processes of the machine share."""


class EndNotice(msgspec.Struct, frozen=True):
    """A notice as a worker gets it: its round will end."""

    reason: str
    seconds: float
    """How many seconds are left to save."""
    id: int = 0


FromWorker = WorkerListens | WorkerSaved
M = TypeVar("M", bound=msgspec.Struct)
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (WorkerHello, NoticeSent)
}


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode(kind: type[M], line: bytes) -> M | None:
    """Return the message in a line; None: it is no such message."""
    try:
        message: M = _decoders[kind].decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return message
