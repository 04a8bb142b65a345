"""The server's end of one connection, without I/O: requests come in as bytes, and answers and news go out as bytes.

A `ServerSession` serves the requests of one client from its run, and tells the client's watches what changed. It knows no
socket, no event loop and no clock: a transport is given to it, and its `ServerCore` tells the time. `server.py` drives it over
TCP, `rdzv.testing.server` drives it in the simulation.

A session is small, because there are thousands: one object, no task, no buffer. A client that does not read is held back: its
next requests wait, and its watches are cut off with a gap instead of growing a backlog.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ...errors import LimitExceeded
from ...system.addresses import plain
from ...system.node import http_date
from ..port import Batch, Gap, Get, LeaseGone, List, WatchPlan
from . import features, frames, trust
from .features import EndsWatchStart, TxnThenWatch
from .frame_stream import FrameStream, Transport
from .frames import PREAMBLE, Acknowledged, Challenge, Frame, Hello, TxnDone, WatchGap, decode, encode
from .limits import logger
from .run import Run, long_key
from .trust import Handshake, new_nonce
from .turns import Waiting

if TYPE_CHECKING:
    from .server_core import ServerCore

LINGER_MAX_S = 3600.0
POSTED_MAX = 64 * 1024
"""Bytes of news kept for the end of a turn. More are written at once, so that a client that does not read is held back."""
REQUEST_STEPS = 25
"""Steps that any request counts as (`turns.py`)."""
BYTES_PER_STEP = 32
"""Bytes of a request that are decoded in the time of a step."""
SENT_PER_STEP = 256
"""Bytes that are encoded and written in the time of a step."""
PREFIXES_MAX = 64
"""Prefixes of one watch. Each is compared with each other, so their number is bounded."""

_HTTP = (
    "HTTP/1.1 400 Bad Request\r\nDate: {date}\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    f"This is an rdzv server (protocol {frames.VERSION}), not a web server.\n"
)
DOCTOR = b"HEAD /doctor HTTP/1.0\r\n\r\n"
"""The request by which `rdzv doctor` asks for the time. It is answered like any stranger's, but not logged."""


class ServerSession(FrameStream, Waiting):
    """One connection of a client's session. If the session comes back, its next connection is another object of this class."""

    __slots__ = (
        "_backlog", "_core", "_cut", "_handshake", "_posted", "_posted_size", "_targets", "_waits", "_watches", "attempt",
        "counted_as", "features", "given_up", "heard_s", "host", "is_proven", "leases", "linger_s", "process_ended", "run",
        "said_bye", "session", "slow_s",
    )  # fmt: skip

    def __init__(self, core: ServerCore) -> None:
        self.is_proven = core.trust.secret is None
        """The client has proven that it knows the secret, or there is none."""
        super().__init__(frames.HELLO_MAX if self.is_proven else frames.CHALLENGE_MAX)
        self._core = core
        self._handshake: Handshake | None = None
        self.host = "unknown"
        """Address of the client, without the port."""
        self.run: Run | None = None
        self.counted_as = ""
        """The host among whose connections the server counts this one."""
        self.session = ""
        """Id of the client's session, which outlives its connections."""
        self.features: frozenset[str] | None = None
        """Additions to the protocol that the client knows, too; None: it is of a release without additions."""
        self.attempt = 0
        """Number of this connection among those of the session."""
        self.leases: set[int] = set()
        self.linger_s = 0.0
        self.said_bye = False
        self.process_ended = False
        """The connection ended by end-of-file: a live client says goodbye first, or resets it."""
        self.given_up = False
        """The server dropped the connection for want of a sign of life."""
        self.heard_s = core.awake_s
        """When the client was last heard, by the server's own time."""
        self.slow_s = math.inf
        """Since when the client does not read."""
        self._watches: dict[int, tuple[Callable[[], None], int, int]] = {}
        """How to end each watch, how many targets it has, and how many of these are prefixes."""
        self._targets = 0
        self._waits = False
        """Its requests wait for the run's turn."""
        self._cut: list[int] = []
        self._backlog = 0
        self._posted_size = 0
        self._posted: list[bytes] = []
        """News for watches, kept until the end of the server's turn or the next answer: hundreds of joins are one write."""

    @property
    def may_be_there(self) -> bool:
        """Whether the client may still be alive. If all its leases have ended, it would have to join anew anyway."""
        return self.run is None or not self.leases or any(lease in self.run.engine.leases for lease in self.leases)

    # ---- its life

    def opened(self, transport: Transport) -> None:
        """Begin. Nothing is sent yet: the answer to a stranger depends on what it says."""
        self._use(transport)
        self._core.arrived(self)

    def _use(self, transport: Transport) -> None:
        self.transport = transport
        name = transport.get_extra_info("peername")
        self.host = plain(name[0]) if name else "unknown"

    def end_of_file(self) -> None:
        """The client will send nothing more."""
        self.process_ended = not (self.said_bye or self.transport.is_closing())

    def closed(self) -> None:
        """The connection is over, however it ended."""
        for number in tuple(self._watches):
            self._end_watch(number)
        self._core.gone(self)

    def replaced(self) -> None:
        """Drop the connection: the client's session has come back by another one."""
        self.transport.abort()

    def reject(self, text: str, *, passing: bool = False, untrusted: bool = False, other_run: bool = False) -> None:
        """Send the reason and hang up. The client may still read earlier answers."""
        rejected = encode(frames.Rejected(text[:8000], passing, untrusted, other_run))
        self.send(rejected if self._greeted else PREAMBLE + rejected)
        self.transport.close()

    def violated(self, problem: str, start: bytes = b"") -> None:
        if start != DOCTOR:
            self._core.complain(self.host, problem)
        if start:
            # To a client of another version, our version says all that it needs to know.
            self.send(_HTTP.format(date=http_date()).encode() if "HTTP" in problem else PREAMBLE)
            self.transport.close()
        else:
            self.reject(problem)

    def in_the_clear(self, transport: Transport, start: bytes) -> None:
        """Refuse a client without TLS, or a stranger, in the clear: it would not understand TLS."""
        self._use(transport)
        if frames.MAGIC.startswith(start[: len(frames.MAGIC)]):
            self._distrust(trust.ONLY_SERVER_HAS_TLS)
        else:
            self.violated(frames.describe(start), start)

    def insecure(self, problem: str, untrusted: bool) -> None:  # noqa: ARG002
        # TLS itself has told the other side already.
        self._core.complain(self.host, problem)
        self.transport.close()

    def _distrust(self, problem: str) -> None:
        self._core.complain(self.host, problem)
        self.reject(problem, untrusted=True)

    def greeted(self) -> None:
        self.send(PREAMBLE)

    # ---- backlog

    def pause_writing(self) -> None:
        """Hold the client back: it does not read."""
        self._backlog = 0
        self.slow_s = self._core.awake_s
        self.hold()
        self._core.is_slow(self)

    def resume_writing(self) -> None:
        """Go on in the next turn: the client reads again.

        The transport is in the middle of a write. If it fails in another one, asyncio loses the connection twice.
        """
        self.slow_s = math.inf
        self._core.is_quick(self)
        self._core.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        if self.slow_s < math.inf:
            return
        cut, self._cut = self._cut, []
        for number in cut:
            self.send(encode(WatchGap(number, "the watch was cut off, because what it was told was not read in time")))
        # News that waited went with the first of these, and may have filled the buffer again.
        if self.slow_s == math.inf and not self._waits:
            self.go_on()

    def heard(self) -> None:
        if self.run is not None and self.run.share.is_waiting:
            self._wait(self.run)

    def _wait(self, run: Run) -> None:
        """Hold the client back: its run has used its share of the server's time."""
        if not self._waits:
            self._waits = True
            self.hold()
            run.share.clients.append(self)

    def take_turn(self) -> None:
        self._waits = False
        if self.slow_s == math.inf:
            self.go_on()

    def keeps_some(self) -> None:
        self._core.keeps(self, min(self.kept, frames.READ_MAX))

    # ---- frames

    def frame_received(self, payload: memoryview) -> None:
        core, run = self._core, self.run
        if run is None:
            self._introduced(payload)
            return
        self.heard_s = core.awake_s
        request = decode(features.request_decoder, payload)
        run.hear(core.now())
        answer = self.serve(run, request)
        if type(answer) is TxnDone:
            self._answer(run, cast("frames.Txn", request), answer)
        elif answer is not None:
            self.send(encode(answer))
        share = run.share
        share.steps += REQUEST_STEPS + len(payload) // BYTES_PER_STEP
        if share.steps > share.end:
            core.turns.settle(share)
            if share.is_waiting:
                self._wait(run)

    def serve(self, run: Run, request: features.Request) -> Frame | None:
        """Do what is asked and return the answer, if there is one."""
        handler: Callable[[ServerSession, Run, Any], Frame | None] = _HANDLERS[type(request)]
        try:
            return handler(self, run, request)
        except LeaseGone as error:
            return frames.LeaseEnded(request.number, str(error))  # type: ignore[union-attr]
        except LimitExceeded as error:
            return frames.LimitReached(request.number, error.what, error.size, error.size_max)  # type: ignore[union-attr]
        except ValueError as error:
            return frames.Refused(request.number, str(error))  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001  One request must not take the server from all others.
            logger.exception("a defect in the server, at a request of %s in run %r", self.host, run.name)
            self.reject("the server failed at this request, which is a defect of it; its log says more")
            return None

    def _introduced(self, payload: memoryview) -> None:
        """Read what comes before the session is in: proof of the secret if there is one, then the hello.

        The client must prove itself first. If the server did, every stranger that calls would get a hash to try secrets on.
        None of these frames sets `heard_s`, so that a stranger cannot prolong the time it is given.
        """
        secret, handshake = self._core.trust.secret, self._handshake
        first: Challenge | Hello | frames.RunsWanted
        if secret is None or self.is_proven:
            first = decode(frames.first_decoder if secret is None else frames.hello_decoder, payload)
            if isinstance(first, Hello):
                self._welcome(self._core.hello(self, first), is_last=first.probe)
            elif isinstance(first, frames.RunsWanted):
                self._welcome(self._core.tell_runs(first), is_last=True)
            else:
                self._distrust(trust.ONLY_MEMBER_HAS_ONE)
        elif handshake is None:
            if not isinstance(first := decode(frames.first_decoder, payload), Challenge):
                self._distrust(trust.ONLY_SERVER_HAS_ONE)
                return
            own = new_nonce()
            self._handshake = Handshake(secret, first.nonce, own, self.transport.get_extra_info("binding", b""))
            self.send(encode(Challenge(own)))
        elif handshake.holds(trust.DRIVER, decode(frames.proof_decoder, payload).proof):
            self.is_proven = True
            self._handshake = None
            self.frame_max = frames.HELLO_MAX
            self.send(encode(frames.Proof(handshake.proof(trust.SERVER))))
        else:
            self._distrust(trust.DIFFERENT_SECRETS)

    def _welcome(self, answer: frames.Welcome | frames.RunsListed | frames.Rejected, *, is_last: bool) -> None:
        """Answer a greeting, and hang up if it is refused or asked for nothing else."""
        if isinstance(answer, frames.Rejected):
            self.reject(answer.text, passing=answer.passing, untrusted=answer.untrusted, other_run=answer.other_run)
        else:
            self.send(encode(answer))
            if is_last:
                self.transport.close()

    def _answer(self, run: Run, request: frames.Txn, answer: TxnDone) -> None:
        """Send an answer, or a sentence if it is too long. It is measured before it is encoded: it might fill the memory."""
        size, size_max = 0, self._core.limits.frame
        for items in answer.outcome.reads:
            for item in items:
                size += len(item.key) + len(item.value) + 8
        if size <= size_max:
            data = encode(answer, sys.maxsize) if size <= POSTED_MAX else frames.encode_large(answer)
            size = len(data) - frames.SIZE_BYTES
            run.share.steps += size // SENT_PER_STEP
        if size <= size_max:
            self.send(data)
            return
        written = any(type(one) is not Get and type(one) is not List for one in request.branch(answer.outcome) or ())
        did = "it has taken effect, but " if written else ""
        text = f"{did}the answer would have {size} bytes, at most {size_max} are allowed: read less at once"
        self.send(encode(frames.Refused(answer.number, text)))

    def _txn(self, run: Run, request: frames.Txn) -> TxnDone:
        for granting in request.grants:
            run.grant(granting.ttl_s, self if granting.presence else None, granting.lease)
        return TxnDone(request.number, run.txn(request.compares, request.then, request.otherwise, request.instead))

    def _txn_then_watch(self, run: Run, request: TxnThenWatch) -> Frame | None:
        plan = WatchPlan(request.targets, request.ends, request.first_of)
        prefixes = self._prefixes(run, request.watch, plan.targets, (*plan.ends, ""))
        if prefixes is None:
            return None
        done = self._txn(run, request)
        if done.outcome.succeeded:
            found, since = plan.found(done.outcome), done.outcome.revision
            self._begin_watch(run, request.watch, plan.targets, plan.ends + found, prefixes, since)
        return done

    def _renew(self, run: Run, request: frames.Renew) -> Frame:
        run.renew(request.lease, self)
        return Acknowledged(request.number)

    def _revoke(self, run: Run, request: frames.Revoke) -> Frame:
        run.revoke(request.lease)
        self.leases.discard(request.lease)
        return Acknowledged(request.number)

    def _bye(self, run: Run, _request: frames.Bye) -> None:
        self.said_bye = True
        run.let_go(self)
        self.transport.close()

    # ---- watches

    def _watch(self, run: Run, request: frames.WatchStart | EndsWatchStart) -> Frame | None:
        ends = request.ends if type(request) is EndsWatchStart else ()
        if not ends and (full := run.why_not_wait(request.targets)):
            return WatchGap(request.watch, full)
        prefixes = self._prefixes(run, request.watch, request.targets, ends)
        if prefixes is None:
            return None
        return self._begin_watch(run, request.watch, request.targets, ends, prefixes, request.since)

    def _begin_watch(
        self, run: Run, number: int, targets: tuple[str, ...], ends: tuple[str, ...], prefixes: int, since: int
    ) -> WatchGap | None:
        count = len(targets) + len(ends)
        run.watch(count, prefixes)
        self._watches[number] = (_not_begun, count, prefixes)
        self._targets += count
        try:
            stop = run.engine.subscribe(targets, since, _Told(self, number), ends)
        except Gap as gap:
            self._end_watch(number)
            return WatchGap(number, str(gap))
        if number in self._watches:
            self._watches[number] = (stop, count, prefixes)
        else:
            stop()  # The changes since then were too many already, and the watch was cut off.
        return None

    def _prefixes(self, run: Run, number: int, targets: tuple[str, ...], ends: tuple[str, ...]) -> int | None:
        """Return how many of the targets are prefixes; None: the client would watch more than it may, and is rejected."""
        names = targets + ends
        prefixes = sum([target[-1:] == "/" for target in targets])
        problem = self._why_not_watch(number, names, prefixes) or run.why_not_watch(len(names), prefixes)
        if not problem:
            return prefixes
        self._core.complain(self.host, problem)
        self.reject(problem)
        return None

    def _why_not_watch(self, number: int, names: tuple[str, ...], prefixes: int) -> str:
        limits, targets = self._core.limits, self._targets + len(names)
        if number in self._watches:
            return f"watch {number} is there already"
        if len(self._watches) >= limits.watches or targets > limits.targets:
            return (
                f"{len(self._watches) + 1} watches of {targets} keys or prefixes: "
                f"at most {limits.watches} of {limits.targets} are allowed for one connection"
            )
        if prefixes > PREFIXES_MAX:
            return f"a watch of more than {PREFIXES_MAX} prefixes"
        for name in names:
            if len(name) > frames.KEY_MAX:
                return long_key(name)
        return ""

    def _end_watch(self, number: int) -> None:
        stop, targets, prefixes = self._watches.pop(number, (None, 0, 0))
        if stop is not None:
            stop()
            self._targets -= targets
            if self.run is not None:
                self.run.unwatch(targets, prefixes)

    def tell(self, number: int, batch: Batch) -> None:
        """Tell the client what changed for a watch."""
        frame = self._core.news(number, batch)
        if frame is None:
            self._tell_much(number)
        elif self._may_wait(number, len(frame)):
            self._posted.append(frame)
            if self._posted_size > POSTED_MAX:
                self.deliver()

    def _tell_much(self, number: int) -> None:
        """Tell large news, which are not copied for each watch."""
        try:
            start, body = self._core.large_news(number)
        except LimitExceeded as error:
            self._end_watch(number)
            self.send(encode(WatchGap(number, f"what happened has {error.size} bytes, too many for one frame")))
            return
        if self._may_wait(number, len(start) + len(body)):
            self._posted += (start, body)
            if self.run is not None:
                self.run.share.steps += len(body) // SENT_PER_STEP
            if self._posted_size > POSTED_MAX:
                self.deliver()

    def _may_wait(self, number: int, size: int) -> bool:
        """Count news that will wait for the client, or cut the watch off."""
        if self.slow_s < math.inf:
            self._backlog += size
            if self._backlog > self._core.limits.backlog:
                self._end_watch(number)
                self._cut.append(number)
                return False
        if not self._posted:
            self._core.has_posted(self)
        self._posted_size += size
        return True

    # ---- what is written

    def send(self, data: bytes | memoryview) -> None:
        """Write, with the news that are kept before it, so that the order on a connection is the order of events."""
        transport, size = self.transport, len(data)
        if transport.is_closing():
            self._posted.clear()
            self._posted_size = 0
            return
        if self._posted:
            posted, self._posted = self._posted, []
            size += self._posted_size
            self._posted_size = 0
            if size > POSTED_MAX:
                for part in posted:
                    transport.write(memoryview(part))
            else:
                data = b"".join((*posted, data)) if data or len(posted) > 1 else posted[0]
        if data:
            transport.write(data)
        if transport.get_write_buffer_size():
            self._core.keeps(self, size)

    def deliver(self) -> None:
        """Write the news that have not gone with an answer."""
        if self._posted:
            self.send(b"")


class _Told:
    """The function that takes changes to one watch of a session. A third of a `partial` of a method in size."""

    __slots__ = ("_number", "_session")

    def __init__(self, session: ServerSession, number: int) -> None:
        self._session = session
        self._number = number

    def __call__(self, batch: Batch) -> None:
        self._session.tell(self._number, batch)


def _not_begun() -> None:
    """Stop a watch that has not begun: nothing is to be done."""


_HANDLERS: dict[type[Frame], Callable[[ServerSession, Run, Any], Frame | None]] = {
    frames.Txn: ServerSession._txn,  # noqa: SLF001  Its own.
    frames.Renew: ServerSession._renew,  # noqa: SLF001
    frames.Revoke: ServerSession._revoke,  # noqa: SLF001
    frames.WatchStart: ServerSession._watch,  # noqa: SLF001
    EndsWatchStart: ServerSession._watch,  # noqa: SLF001
    TxnThenWatch: ServerSession._txn_then_watch,  # noqa: SLF001
    frames.WatchStop: lambda self, _run, request: self._end_watch(request.watch),
    frames.Ping: lambda _self, _run, request: Acknowledged(request.number),
    frames.Bye: ServerSession._bye,  # noqa: SLF001
}
