"""What server and remote driver say to each other: a greeting in plain text, then length-prefixed msgpack frames.

Both sides begin with `RDZV <version>` and an empty line. It is text, and looks like the end of an HTTP request, so that
whoever else is at either end answers at once instead of waiting for more, and can then be named. The first frame of the
driver is `Hello`; the server answers `Welcome`, or says why not with `Rejected` and hangs up. A connection belongs to one
run on one engine instance from then on, so no later frame needs to say which. Requests carry a number, which the answer
repeats; what a watch has to tell carries the watch's number.

Where there is a shared secret, it is proven before the hello: the driver begins with `Challenge`, which the server answers with
its own; the driver sends `Proof` and, in the same breath, its hello; the server answers with its `Proof` and the welcome.

Everything is decoded strictly and into known types only. Whatever does not fit ends the connection with a sentence.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from abc import ABC, abstractmethod
from typing import Annotated, Any, cast

import msgspec

from ...errors import Incompatible, LimitExceeded
from ..port import Batch, Case, Compare, Operation, Outcome

VERSION = 1
MAGIC = b"RDZV "
PREAMBLE = b"%s%04d\r\n\r\n" % (MAGIC, VERSION)
FRAME_MAX = 16 * 1024 * 1024
HELLO_MAX = 64 * 1024
"""What a stranger may make us keep: enough for every honest greeting."""
KEY_MAX = 2048
CHALLENGE_MAX = 4 * 1024
"""The same, of one that has to prove itself first. An honest hello would fit too, and then gets its sentence."""
NONCE = 32
"""Bytes of a number that is never used again, and of a proof."""
CASES_MAX = 8
"""Of one transaction."""
LEASES_MAX = 64
"""Presences that one session can bring back; a member has one."""

_SIZE = struct.Struct(">I")
_BUFFER = 64 * 1024
"""What is read at once. Also how much one peer can have done before the others have their turn."""

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE, max_length=NONCE)]


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Anything that is sent."""


# ---- from both


class Challenge(Frame, frozen=True, tag=11):
    """Prove that you know the secret, for this number."""

    nonce: Nonce


class Proof(Frame, frozen=True, tag=12):
    """I do."""

    proof: Nonce


# ---- from the driver


class Hello(Frame, frozen=True, tag=1):
    """The first frame. `leases` are the presences of a session that comes back to `instance`; elsewhere they mean nothing.

    `attempt` counts the greetings of a session: what arrives late from a connection that was given up has a lower one.
    A `probe` only wants to know who is there.
    """

    run: Name
    session: Name
    attempt: Number
    instance: Name = ""
    leases: Annotated[tuple[Number, ...], msgspec.Meta(max_length=LEASES_MAX)] = ()
    linger_s: float = -1.0
    """How long this member's presences outlive its connection; negative: as the server thinks fit."""
    probe: bool = False


class LeaseGrant(Frame, frozen=True):
    """A lease that begins with a transaction, under an id that the driver drew at random."""

    lease: Number
    ttl_s: float
    presence: bool = True
    """It stands for the process at the other end of this connection."""


class Txn(Frame, frozen=True, tag=2):
    """A transaction; see the port."""

    number: Number
    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...]
    instead: Annotated[tuple[Case, ...], msgspec.Meta(max_length=CASES_MAX)] = ()
    grants: Annotated[tuple[LeaseGrant, ...], msgspec.Meta(max_length=LEASES_MAX)] = ()
    """Made before anything is judged, so that coming in is one exchange."""

    def branch(self, outcome: Outcome) -> tuple[Operation, ...] | None:
        """What was done; None: an outcome that it cannot have."""
        if not outcome.succeeded:
            return self.otherwise
        branches = (self.then, *(case.then for case in self.instead))
        return branches[outcome.case] if 0 <= outcome.case < len(branches) else None


class Renew(Frame, frozen=True, tag=4):
    """Start a lease's time anew."""

    number: Number
    lease: Number


class Revoke(Frame, frozen=True, tag=5):
    """End a lease."""

    number: Number
    lease: Number


class WatchStart(Frame, frozen=True, tag=6):
    """Tell the changes of these targets after a revision, under this number. There is no answer to wait for."""

    watch: Number
    targets: tuple[str, ...]
    since: Number


class WatchStop(Frame, frozen=True, tag=7):
    """No more of that."""

    watch: Number


class Ping(Frame, frozen=True, tag=8):
    """To find out whether anybody is there."""

    number: Number


class Bye(Frame, frozen=True, tag=9):
    """The session is over; its leases are not."""


Request = Txn | Renew | Revoke | WatchStart | WatchStop | Ping | Bye


# ---- from the server


class Welcome(Frame, frozen=True, tag=1):
    """Who serves here, and what it allows."""

    server: Name
    """Random id of this server's life."""
    instance: Name
    """Random id of this life of the run's memory."""
    place: Name
    compares_max: Number
    writes_max: Number
    only_run: Name = ""
    """The run of the agent that hosts the server; empty: it stands by itself and serves all."""
    open: bool = True
    """It serves. One that is not certain yet that the endpoint means it only answers probes."""
    reached_at: Name = ""
    """The address at which a peer on another host reached it last; empty: none has."""


class Rejected(Frame, frozen=True, tag=2):
    """Why the server hangs up. A sentence for people."""

    text: Annotated[str, msgspec.Meta(max_length=8192)]
    passing: bool = False
    """It will soon be otherwise, so nobody need be troubled with it."""
    untrusted: bool = False
    """It will never be otherwise: one of the two sides has to be told something else."""


class TxnDone(Frame, frozen=True, tag=3):
    """Answer to Txn."""

    number: Number
    outcome: Outcome


class Acknowledged(Frame, frozen=True, tag=5):
    """Answer to Renew, Revoke and Ping."""

    number: Number


class LeaseEnded(Frame, frozen=True, tag=6):
    """Answer: the lease has ended, and nothing was changed."""

    number: Number
    text: str


class Refused(Frame, frozen=True, tag=7):
    """Answer: the request cannot be right, and nothing was changed."""

    number: Number
    text: str


class LimitReached(Frame, frozen=True, tag=8):
    """Answer: there is no room for that, and nothing was changed."""

    number: Number
    what: str
    size: Number
    size_max: Number


class WatchNews(Frame, frozen=True, tag=9):
    """A watch's next changes."""

    watch: Number
    batch: Batch


class WatchGap(Frame, frozen=True, tag=10):
    """A watch ends with a gap."""

    watch: Number
    text: str


Answer = TxnDone | Acknowledged | LeaseEnded | Refused | LimitReached | WatchNews | WatchGap | Rejected


# ---- bytes

_encoder = msgspec.msgpack.Encoder()
first_decoder = msgspec.msgpack.Decoder(Challenge | Hello)
proof_decoder = msgspec.msgpack.Decoder(Proof)
hello_decoder = msgspec.msgpack.Decoder(Hello)
request_decoder = msgspec.msgpack.Decoder(Request)
welcome_decoder = msgspec.msgpack.Decoder(Welcome | Rejected)
challenge_decoder = msgspec.msgpack.Decoder(Challenge | Rejected)
proven_decoder = msgspec.msgpack.Decoder(Proof | Rejected)
answer_decoder = msgspec.msgpack.Decoder(Answer)


def encode(frame: Frame, size_max: int = FRAME_MAX) -> bytes:
    """The frame with its length before it, or LimitExceeded."""
    payload = _encoder.encode(frame)
    if len(payload) > size_max:
        raise LimitExceeded(f"a frame {type(frame).__name__!r}", len(payload), size_max)
    return _SIZE.pack(len(payload)) + payload


def encode_batch(batch: Batch) -> bytes:
    """What `encode_news` takes, so that a commit is encoded once for all who watch it."""
    return _encoder.encode(batch)


def encode_news(watch: int, batch: bytes) -> bytes:
    """A frame News around an encoded batch."""
    start = b"\x93\x09" + _encoder.encode(watch)
    return _SIZE.pack(len(start) + len(batch)) + start + batch


def decode(decoder: msgspec.msgpack.Decoder[Any], payload: memoryview) -> Any:
    """What the decoder is for, or Incompatible with the reason."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Incompatible(f"a frame of {len(payload)} bytes", str(error)) from None


def describe(data: bytes) -> str:
    """What answers, or calls, with these first bytes instead of our greeting."""
    if data.startswith(MAGIC):
        version = data[len(MAGIC) : len(MAGIC) + 4]
        shown = str(int(version)) if version.isdigit() else repr(version.decode("latin-1"))
        return f"it speaks protocol version {shown} of rdzv, this is version {VERSION}: all need one version of rdzv"
    start = bytes(data[:16])
    if start.startswith((b"HTTP/", b"<")):
        return "a web server answers there, not an rdzv server"
    if start[:8].partition(b" ")[0] in {b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"DELETE", b"PRI"}:
        return "it speaks HTTP, not rdzv"
    if start.startswith(b"SSH-"):
        return "an SSH server answers there, not an rdzv server"
    if start[:1] in {b"\x15", b"\x16"} and start[1:2] == b"\x03":
        return "it speaks TLS, and this side does not: give both the same tls settings"
    return f"it does not speak rdzv: its first bytes are {start!r}"


class _Buffers(threading.local):
    """One for each thread: it is empty again before another connection of that thread reads."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_BUFFER))


_buffers = _Buffers()


class FramedProtocol(asyncio.BufferedProtocol, ABC):
    """One end of a connection. Keeps no buffer of its own but the beginning of a frame that has not come as a whole."""

    __slots__ = ("__weakref__", "_greeted", "_held", "_need", "_rest", "frame_max", "transport")

    transport: asyncio.Transport

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self._greeted = False
        self._held = False
        self._need = 0
        self._rest: bytearray | None = None

    # ---- for the two ends to fill in

    def greeted(self) -> None:
        """The other side's greeting has come and is right."""

    @abstractmethod
    def frame_received(self, payload: memoryview) -> None:
        """A frame, valid only during the call. Incompatible ends the connection."""

    @abstractmethod
    def violated(self, problem: str, start: bytes = b"") -> None:
        """What came is not ours; `start` are the first bytes, if not even the greeting was. Must end the connection."""

    @abstractmethod
    def in_the_clear(self, transport: asyncio.Transport, start: bytes) -> None:
        """It does not speak TLS as it should; `start` are its first bytes. Must end the connection."""

    @abstractmethod
    def insecure(self, problem: str, untrusted: bool) -> None:
        """TLS failed; `untrusted`: because one side does not trust the other. Must end the connection."""

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Only ever called with a stream."""
        self.transport = cast("asyncio.Transport", transport)

    def fileno(self) -> int:
        """For letting go of it in a forked child; -1 once it is closed."""
        sock = self.transport.get_extra_info("socket")
        return -1 if sock is None else sock.fileno()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """The same for all: what is read is looked at before anybody else reads."""
        return _buffers.view

    def buffer_updated(self, nbytes: int) -> None:
        """So much has come."""
        data = _buffers.view[:nbytes]
        rest = self._rest
        if rest is None:
            self._read(data)
            return
        rest += data
        if len(rest) >= self._need:
            self._rest = None
            self._read(memoryview(rest))

    # ----

    def send(self, data: bytes) -> None:
        """Encoded frames, whole."""
        if not self.transport.is_closing():
            self.transport.write(data)

    @property
    def kept(self) -> int:
        """Bytes of what has not come as a whole."""
        return 0 if self._rest is None else len(self._rest)

    def hold(self) -> None:
        """Read no further for now; what has come already waits."""
        self._held = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def go_on(self) -> None:
        """After `hold`."""
        self._held = False
        rest, self._rest = self._rest, None
        if rest is not None:
            self._read(memoryview(rest))
        if not self._held and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: memoryview) -> None:
        at = 0
        if not self._greeted:
            at = self._read_greeting(data)
            if not at:
                return
        end = len(data)
        need = 0
        while not self._held and not self.transport.is_closing():
            if end - at < _SIZE.size:
                need = _SIZE.size
                break
            (size,) = _SIZE.unpack_from(data, at)
            if size > self.frame_max:
                self.violated(f"it sent a frame of {size} bytes, at most {self.frame_max} are allowed")
                return
            if end - at - _SIZE.size < size:
                need = _SIZE.size + size
                break
            at += _SIZE.size
            try:
                self.frame_received(data[at : at + size])
            except Incompatible as error:
                self.violated(f"it sent what cannot be read: {error.sentence}")
                return
            at += size
        self._keep(data[at:], need)

    def _read_greeting(self, data: memoryview) -> int:
        """How many bytes it took; 0 if it is not complete, or not ours."""
        start = bytes(data[: len(PREAMBLE)])
        if start == PREAMBLE:
            self._greeted = True
            self.greeted()
            return len(start)
        # A version is only known once its digits are there.
        if PREAMBLE.startswith(start) or (start.startswith(MAGIC) and len(start) < len(PREAMBLE)):
            self._keep(data, len(data) + 1)  # A stranger may say no more than it has said, and wait.
        else:
            self.violated(describe(bytes(data[:64])), bytes(data[:64]))
        return 0

    def _keep(self, data: memoryview, need: int) -> None:
        if data and not self.transport.is_closing():
            self._rest = bytearray(data)
            self._need = need
