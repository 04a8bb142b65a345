"""The messages between `rdzv run --stay` and the worker processes that it keeps: frames of MessagePack on a Unix socket.

The agent is the member. A worker says when it runs nothing of a round any more, is given its rank in the next one, and makes
its calls of the round's store through the agent.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

STAY_ENV = "RDZV_STAY"
"""The variable that names the socket to the workers."""
SIZE_BYTES = 4
FRAME_MAX = 8 * 1024 * 1024
"""Bytes of one message: a store's value may have 1 MiB."""


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """The worker runs nothing of that round or an earlier one, and waits for the next. Also its first message."""

    local_rank: int
    left: int
    """0: it has not been in a round yet."""


class StoreCall(msgspec.Struct, frozen=True, tag="call", forbid_unknown_fields=True):
    """A call of the store of a round."""

    id: int
    round: int
    name: str
    arguments: list[Any]


class CloseRun(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """The worker wants the run to be closed: it would fail again."""

    reason: str


class GivenRank(msgspec.Struct, frozen=True, tag="given", forbid_unknown_fields=True):
    """The worker's place in a round."""

    run_id: str
    round: int
    rank: int
    size: int
    fence: int
    reason: str
    bootstrap: str
    environ: dict[str, str]
    """The variables that a worker of this round has."""


class RoundEnded(msgspec.Struct, frozen=True, tag="over", forbid_unknown_fields=True):
    """The round is over: leave it, and say so."""

    round: int
    reason: str
    newcomers: int = 0


class RunEnded(msgspec.Struct, frozen=True, tag="ended", forbid_unknown_fields=True):
    """There is no next round."""

    run_id: str
    reason: str
    success: bool


class StoreAnswer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """The result of a call, or the kind of its error and what the error says."""

    id: int
    value: Any = None
    error: str = ""
    details: list[Any] = []


FromWorker = WorkerReady | StoreCall | CloseRun
FromAgent = GivenRank | RoundEnded | RunEnded | StoreAnswer
M = TypeVar("M")
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in (FromWorker, FromAgent)}


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as a frame. Raises ValueError if it is too large."""
    data = msgspec.msgpack.encode(message)
    if len(data) > FRAME_MAX:
        raise ValueError(f"a message of {len(data)} bytes to or from a worker: at most {FRAME_MAX} are allowed")
    return len(data).to_bytes(SIZE_BYTES, "big") + data


def size_of(header: bytes) -> int:
    """Return the size of the message behind a header. Raises ValueError if it is too large."""
    size = int.from_bytes(header, "big")
    if size > FRAME_MAX:
        raise ValueError(f"a message of {size} bytes to or from a worker: at most {FRAME_MAX} are allowed")
    return size


def decode(kind: type[M], data: bytes) -> M:
    """Return the message. Raises ValueError if it is none."""
    try:
        message: M = _decoders[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no message of a worker or its agent: {error}") from None
    return message
