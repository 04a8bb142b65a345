"""The protocol between client and embedded server: a preamble in plain text, then length-prefixed msgpack frames.

Both sides begin with `RDZV <version>` and an empty line. That is text and looks like the end of an HTTP request, so that any
other program at either end answers at once instead of waiting for more, and can then be named. The client's first frame is
`Hello`. The server answers `Welcome`, or gives a reason with `Rejected` and hangs up. From then on a connection belongs to one
run on one engine instance, so no later frame needs to say which. Requests carry a number, which the answer repeats. News carry
the number of their watch.

Where there is a shared secret, it is proven before the hello. The client begins with `Challenge`, which the server answers with
its own. The client sends `Proof` together with its hello. The server answers with its `Proof` and the welcome.

Both sides name in their greeting which later additions to this protocol they know (`features.py`).

A client that wants to know which runs a server has sends `RunsWanted` in place of the hello. The server answers with one page
and hangs up. A server that does not know this frame refuses it like any other that it cannot read.

Everything is decoded strictly and into known types only. Any misfit ends the connection with a sentence.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from ...errors import Incompatible, LimitExceeded
from ..port import Batch, Case, Compare, Operation, Outcome

VERSION = 2
MAGIC = b"RDZV "
PREAMBLE = b"%s%04d\r\n\r\n" % (MAGIC, VERSION)
FRAME_MAX = 16 * 1024 * 1024
HELLO_MAX = 64 * 1024
"""Bytes that a stranger may make us keep: enough for every honest greeting."""
READ_MAX = 64 * 1024
"""Bytes read at once. Also bounds how much one connection gets done before the others have their turn."""
KEY_MAX = 2048
CHALLENGE_MAX = 4 * 1024
"""The same before the secret is proven. An honest hello without a proof fits too, and gets its sentence."""
NONCE = 32
"""Bytes of a nonce, and of a proof."""
CASES_MAX = 8
"""Cases of one transaction."""
LEASES_MAX = 64
"""Presences that one session can bring back. A member has one."""
PAGE_RUNS = 250
"""Runs on one page of a list. Together with `PAGE_BYTES` it bounds what a client that never says hello makes us send."""
PAGE_BYTES = 32 * 1024
PAGE_LOOKS = 2_000
"""Runs that are looked at for one page. Those without keys are not listed."""

SIZE = struct.Struct(">I")
SIZE_BYTES = SIZE.size

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE, max_length=NONCE)]


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Anything that is sent.

    `gc=False`: frames cannot be part of a cycle, and a thousand members spent a third of their time on collecting garbage.
    """


# ---- from both


class Challenge(Frame, frozen=True, tag=11):
    """A demand to prove the secret for this nonce."""

    nonce: Nonce


class Proof(Frame, frozen=True, tag=12):
    proof: Nonce


# ---- from the driver


class Hello(Frame, frozen=True, tag=1):
    """The first frame. `leases`: the presences of a session that comes back to `instance`; elsewhere they mean nothing.

    `attempt` counts the greetings of a session: frames of a connection that was given up arrive late under a lower number.
    A `probe` only asks which server is there.
    """

    run: Name
    session: Name
    """Random id of the session, and after it the features of the client."""
    attempt: Number
    instance: Name = ""
    leases: Annotated[tuple[Number, ...], msgspec.Meta(max_length=LEASES_MAX)] = ()
    linger_s: float = -1.0
    """How long this member's presences outlive its connection; negative: the server decides."""
    probe: bool = False
    follows: Name = ""
    """Id of the server at the declared place that this client followed last; empty: none."""
    follows_age_s: float = 0.0
    """Time since that server was started, by the client's clock."""


class RunsWanted(Frame, frozen=True, tag=13):
    """The first and only frame of a client that asks for a page of the server's runs: those with names after `after`."""

    after: Name = ""


class LeaseGrant(Frame, frozen=True):
    """A lease that begins with a transaction, under an id that the client drew at random."""

    lease: Number
    ttl_s: float
    presence: bool = True
    """Whether it stands for the client's process."""


class Txn(Frame, frozen=True, tag=2):
    """A transaction of the port."""

    number: Number
    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...]
    instead: Annotated[tuple[Case, ...], msgspec.Meta(max_length=CASES_MAX)] = ()
    grants: Annotated[tuple[LeaseGrant, ...], msgspec.Meta(max_length=LEASES_MAX)] = ()
    """Leases made before anything is compared, so that a member comes in with one exchange."""

    def branch(self, outcome: Outcome) -> tuple[Operation, ...] | None:
        """Return the operations that were done; None: an outcome that this transaction cannot have."""
        if not outcome.succeeded:
            return self.otherwise
        branches = (self.then, *(case.then for case in self.instead))
        return branches[outcome.case] if 0 <= outcome.case < len(branches) else None


class Renew(Frame, frozen=True, tag=4):
    number: Number
    lease: Number


class Revoke(Frame, frozen=True, tag=5):
    number: Number
    lease: Number


class WatchStart(Frame, frozen=True, tag=6):
    """Watch these targets for changes after a revision. There is no answer to wait for."""

    watch: Number
    targets: tuple[str, ...]
    since: Number


class WatchStop(Frame, frozen=True, tag=7):
    watch: Number


class Ping(Frame, frozen=True, tag=8):
    """Ask for a sign of life."""

    number: Number


class Bye(Frame, frozen=True, tag=9):
    """End the session, but not its leases."""


Request = Txn | Renew | Revoke | WatchStart | WatchStop | Ping | Bye


# ---- from the server


class Welcome(Frame, frozen=True, tag=1):
    """The server's answer to a hello."""

    server: Name
    """Random id of this server's life."""
    instance: Name
    """Random id of this life of the run's memory."""
    place: Name
    compares_max: Number
    writes_max: Number
    only_run: Name = ""
    """The run of the agent that hosts the server; empty: a standalone server for all runs."""
    open: bool = True
    """Whether it serves. A server that does not know yet whether the endpoint means it only answers probes."""
    reached_at: Name = ""
    """The address at which a client on another host reached it last; empty: none has."""
    fence_floor: Number = 0
    """Fences count from above this. It is higher for each later greeting at this place; 0: a server without fences."""
    sees_ends: bool = False
    """Whether it judges `Away`."""
    promised: Name = ""
    """The name that the platform gave the server, if it serves under that name (T16.4); empty: under none."""
    age_s: float = 0.0
    """Time since a server that has such a name was started."""


class RunListed(Frame, frozen=True):
    """A run of the server, which reads none of the run's records for it."""

    name: Name
    age_s: float
    """Time since the server first heard of the run, or since it was started anew."""
    silent_s: float
    """Time since the last request of any client of the run."""
    connections: Number


class RunsListed(Frame, frozen=True, tag=13):
    """A page of the server's runs, in the order of their names."""

    runs: Annotated[tuple[RunListed, ...], msgspec.Meta(max_length=PAGE_RUNS)]
    after: Name = ""
    """Where the next page begins; empty: this was the last one."""


class Rejected(Frame, frozen=True, tag=2):
    """The reason why the server hangs up: a sentence for people."""

    text: Annotated[str, msgspec.Meta(max_length=8192)]
    passing: bool = False
    """The reason will soon be gone, so it is not logged."""
    untrusted: bool = False
    """The reason will never be gone: one of the two sides must be configured otherwise."""
    other_run: bool = False
    """The server keeps another run than the client's, and no further one."""


class TxnDone(Frame, frozen=True, tag=3):
    number: Number
    outcome: Outcome


class Acknowledged(Frame, frozen=True, tag=5):
    """Answer to Renew, Revoke and Ping."""

    number: Number


class LeaseEnded(Frame, frozen=True, tag=6):
    """Answer: the lease has ended. Nothing was changed."""

    number: Number
    text: str


class Refused(Frame, frozen=True, tag=7):
    """Answer: the request is invalid. Nothing was changed."""

    number: Number
    text: str


class LimitReached(Frame, frozen=True, tag=8):
    """Answer: there is no room for that. Nothing was changed."""

    number: Number
    what: str
    size: Number
    size_max: Number


class WatchNews(Frame, frozen=True, tag=9):
    watch: Number
    batch: Batch


class WatchGap(Frame, frozen=True, tag=10):
    """A watch ends with a gap."""

    watch: Number
    text: str


Reply = TxnDone | Acknowledged | LeaseEnded | Refused | LimitReached
Answer = Reply | WatchNews | WatchGap | Rejected


# ---- bytes

encoder = msgspec.msgpack.Encoder()
first_decoder = msgspec.msgpack.Decoder(Challenge | Hello | RunsWanted)
proof_decoder = msgspec.msgpack.Decoder(Proof)
hello_decoder = msgspec.msgpack.Decoder(Hello | RunsWanted)
request_decoder = msgspec.msgpack.Decoder(Request)
runs_decoder = msgspec.msgpack.Decoder(RunsListed | Rejected)
challenge_decoder = msgspec.msgpack.Decoder(Challenge | Rejected)
proven_decoder = msgspec.msgpack.Decoder(Proof | Rejected)
answer_decoder = msgspec.msgpack.Decoder(Answer)


def encode(frame: Frame, size_max: int = FRAME_MAX) -> bytes:
    """Return the frame with its length before it. Raise LimitExceeded."""
    payload = encoder.encode(frame)
    if len(payload) > size_max:
        raise LimitExceeded(f"a frame {type(frame).__name__!r}", len(payload), size_max)
    return SIZE.pack(len(payload)) + payload


def encode_large(frame: Frame) -> memoryview:
    """Return the frame with its length before it, however large. A view, so that no part of it is copied to be written."""
    data = bytearray(SIZE_BYTES)
    encoder.encode_into(frame, data, SIZE_BYTES)
    SIZE.pack_into(data, 0, len(data) - SIZE_BYTES)
    return memoryview(data)


def encode_news(watch: int, batch: bytes) -> bytes:
    """Return the frame `WatchNews` around a batch that `encoder` encoded once for all its watches."""
    start = b"\x93\x09" + encoder.encode(watch)
    return SIZE.pack(len(start) + len(batch)) + start + batch


def encode_news_start(watch: int, size: int) -> bytes:
    """Return what comes before an encoded batch of that size."""
    start = b"\x93\x09" + encoder.encode(watch)
    return SIZE.pack(len(start) + size) + start


def decode(decoder: msgspec.msgpack.Decoder[Any], payload: memoryview) -> Any:
    """Decode a payload. Raise Incompatible with the reason."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Incompatible(f"a frame of {len(payload)} bytes", str(error)) from None


def describe(data: bytes) -> str:
    """Name the program that answers, or calls, with these first bytes instead of our preamble."""
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
