"""The server's end of one connection: reads requests, does them, and tells watches what happened.

It is small, because there are thousands: one object, no task, no buffer. Whoever does not read what it is sent is held
back: its next requests wait, and its watches are cut off with a gap instead of growing a backlog.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...config.secret import Secret
from ...errors import LimitExceeded
from ...system.addresses import plain
from ...system.node import http_date
from ..port import Batch, Gap, LeaseGone
from .frames import (
    CHALLENGE_MAX,
    HELLO_MAX,
    MAGIC,
    PREAMBLE,
    VERSION,
    Acknowledged,
    Bye,
    Challenge,
    Frame,
    FramedProtocol,
    Hello,
    LeaseEnded,
    LimitReached,
    Ping,
    Proof,
    Refused,
    Rejected,
    Renew,
    Revoke,
    Txn,
    TxnDone,
    WatchGap,
    WatchStart,
    WatchStop,
    decode,
    describe,
    encode,
    first_decoder,
    hello_decoder,
    proof_decoder,
    request_decoder,
)
from .limits import logger
from .run import Run, check_key
from .trust import (
    DIFFERENT_SECRETS,
    DRIVER,
    ONLY_MEMBER_HAS_ONE,
    ONLY_SERVER_HAS_ONE,
    ONLY_SERVER_HAS_TLS,
    SERVER,
    Handshake,
    new_nonce,
)

if TYPE_CHECKING:
    from .server import Server

LINGER_MAX_S = 3600.0
PREFIXES_MAX = 64
"""Of one watch: each is compared with each other."""

_HTTP = (
    "HTTP/1.1 400 Bad Request\r\nDate: {date}\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    f"This is an rdzv server (protocol {VERSION}), not a web server.\n"
)
DOCTOR = b"HEAD /doctor HTTP/1.0\r\n\r\n"
"""What the doctor says to be told the time like any stranger; whose visit is nothing to complain about."""


class ServerConnection(FramedProtocol):
    """Whoever is at the other end."""

    __slots__ = (
        "_backlog", "_cut", "_handshake", "_posted", "_server", "_targets", "_watches", "attempt", "heard_s", "is_proven",
        "leases", "linger_s", "run", "said_bye", "session", "slow_s",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self.is_proven = server.trust.secret is None
        """It knows the secret, or there is none."""
        super().__init__(HELLO_MAX if self.is_proven else CHALLENGE_MAX)
        self._server = server
        self._handshake: Handshake | None = None
        self.run: Run | None = None
        self.session = ""
        self.attempt = 0
        self.leases: set[int] = set()
        self.linger_s = 0.0
        self.said_bye = False
        self.heard_s = server.awake_s
        """When we heard of it last, by the server's own time."""
        self.slow_s = math.inf
        """Since when it does not read."""
        self._watches: dict[int, tuple[Callable[[], None], int]] = {}
        self._targets = 0
        self._cut: list[int] = []
        self._backlog = 0
        self._posted: list[bytes] = []
        """News that wait for the end of the turn: the leader is told of hundreds in one."""

    @property
    def host(self) -> str:
        """Its address."""
        name = self.transport.get_extra_info("peername")
        return plain(name[0]) if name else "unknown"

    @property
    def may_be_there(self) -> bool:
        """Not if all its leases have ended: its host went without hanging up, or it is cut off and would have to join anew."""
        return self.run is None or not self.leases or any(lease in self.run.engine.leases for lease in self.leases)

    # ---- its life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say nothing yet: what we answer to a stranger depends on what it says."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=self._server.limits.unanswered)
        self._server.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """However it ended."""
        watches, self._watches = self._watches, {}
        for stop, _ in watches.values():
            stop()
        self._server.gone(self)

    def replaced(self) -> None:
        """Nothing more will come, and nobody will read."""
        self.transport.abort()

    def reject(self, text: str, *, passing: bool = False, untrusted: bool = False) -> None:
        """Say why, and hang up. What it has not read of earlier answers, it may still read."""
        rejected = encode(Rejected(text[:8000], passing, untrusted))
        self.send(rejected if self._greeted else PREAMBLE + rejected)
        self.transport.close()

    def violated(self, problem: str, start: bytes = b"") -> None:
        """A stranger, or one who went mad."""
        if start != DOCTOR:
            self._server.complain(self.host, problem)
        if start:
            # To one of another version our own version says all that it needs to know.
            self.send(_HTTP.format(date=http_date()).encode() if "HTTP" in problem else PREAMBLE)
            self.transport.close()
        else:
            self.reject(problem)

    def in_the_clear(self, transport: asyncio.Transport, start: bytes) -> None:
        """One of ours without TLS, or a stranger. It is answered in the clear, since it would not understand else."""
        self.transport = transport
        if MAGIC.startswith(start[: len(MAGIC)]):
            self._distrust(ONLY_SERVER_HAS_TLS)
        else:
            self.violated(describe(start), start)

    def insecure(self, problem: str, untrusted: bool) -> None:  # noqa: ARG002
        """TLS has told it already."""
        self._server.complain(self.host, problem)
        self.transport.close()

    def _distrust(self, problem: str) -> None:
        self._server.complain(self.host, problem)
        self.reject(problem, untrusted=True)

    def greeted(self) -> None:
        """It speaks our language."""
        self.send(PREAMBLE)

    # ---- backlog

    def pause_writing(self) -> None:
        """It does not read. Nothing more is done for it until it does."""
        self._backlog = 0
        self.slow_s = self._server.awake_s
        self.hold()
        self._server.is_slow(self)

    def resume_writing(self) -> None:
        """It reads again."""
        self.slow_s = math.inf
        self._server.is_quick(self)
        cut, self._cut = self._cut, []
        for number in cut:
            self.send(encode(WatchGap(number, "the watch was cut off, because what it was told was not read in time")))
        self.go_on()

    def buffer_updated(self, nbytes: int) -> None:
        """See to what comes by halves: all together may not fill our memory with it."""
        super().buffer_updated(nbytes)
        if self.kept:
            self._server.keeps(self)

    # ---- frames

    def frame_received(self, payload: memoryview) -> None:
        """Requests are done at once, one after the other."""
        server = self._server
        run = self.run
        if run is None:
            self._introduced(payload)
            return
        self.heard_s = server.awake_s
        request = decode(request_decoder, payload)
        run.hear(server.now())
        handler: Callable[[ServerConnection, Run, Any], Frame | None] = _HANDLERS[type(request)]
        try:
            answer = handler(self, run, request)
        except LeaseGone as error:
            answer = LeaseEnded(request.number, str(error))
        except LimitExceeded as error:
            answer = LimitReached(request.number, error.what, error.size, error.size_max)
        except ValueError as error:
            answer = Refused(request.number, str(error))
        except Exception:  # noqa: BLE001  One request must not take the server from all others.
            logger.exception("a defect in the server, at a request of %s in run %r", self.host, run.name)
            self.reject("the server failed at this request, which is a defect of it; its log says more")
            return
        if answer is not None:
            self._answer(answer)

    def _introduced(self, payload: memoryview) -> None:
        """Before it is in: the secret if there is one, then the hello. A stranger's time is not prolonged by its words."""
        secret, handshake = self._server.trust.secret, self._handshake
        if secret is None or self.is_proven:
            first: Challenge | Hello = decode(first_decoder if secret is None else hello_decoder, payload)
            if isinstance(first, Hello):
                self._server.hello(self, first)
            else:
                self._distrust(ONLY_MEMBER_HAS_ONE)
        elif handshake is None:
            self._challenged(secret, decode(first_decoder, payload))
        elif handshake.holds(DRIVER, decode(proof_decoder, payload).proof):
            self.is_proven = True
            self._handshake = None
            self.frame_max = HELLO_MAX
            self.send(encode(Proof(handshake.proof(SERVER))))
        else:
            self._distrust(DIFFERENT_SECRETS)

    def _challenged(self, secret: Secret, first: Challenge | Hello) -> None:
        if isinstance(first, Hello):
            self._distrust(ONLY_SERVER_HAS_ONE)
            return
        own = new_nonce()
        self._handshake = Handshake(secret, first.nonce, own, self.transport.get_extra_info("binding", b""))
        self.send(encode(Challenge(own)))

    def _answer(self, answer: Frame) -> None:
        try:
            self.send(encode(answer, self._server.limits.frame))
        except LimitExceeded as error:
            assert isinstance(answer, TxnDone), "no other answer can be long"
            did = "it has taken effect, but " if answer.outcome.succeeded else ""
            text = f"{did}the answer would have {error.size} bytes, at most {error.size_max} are allowed: read less at once"
            self.send(encode(Refused(answer.number, text)))

    def _txn(self, run: Run, request: Txn) -> Frame:
        for granting in request.grants:
            run.grant(granting.ttl_s, self if granting.presence else None, granting.lease)
        return TxnDone(request.number, run.txn(request.compares, request.then, request.otherwise, request.instead))

    def _renew(self, run: Run, request: Renew) -> Frame:
        run.renew(request.lease, self)
        return Acknowledged(request.number)

    def _revoke(self, run: Run, request: Revoke) -> Frame:
        run.revoke(request.lease)
        self.leases.discard(request.lease)
        return Acknowledged(request.number)

    def _ping(self, _run: Run, request: Ping) -> Frame:
        return Acknowledged(request.number)

    def _bye(self, run: Run, _request: Bye) -> None:
        self.said_bye = True
        run.let_go(self)
        self.transport.close()

    # ---- watches

    def _watch(self, run: Run, request: WatchStart) -> Frame | None:
        number, targets = request.watch, request.targets
        problem = self._why_not_watch(number, targets)
        if problem:
            self._server.complain(self.host, problem)
            self.reject(problem)
            return None
        self._watches[number] = (_nothing, len(targets))
        self._targets += len(targets)
        try:
            stop = run.engine.subscribe(targets, request.since, partial(self._tell, number))
        except Gap as gap:
            self._end_watch(number)
            return WatchGap(number, str(gap))
        if number in self._watches:
            self._watches[number] = (stop, len(targets))
        else:
            stop()  # What it had missed was too much already.
        return None

    def _why_not_watch(self, number: int, targets: tuple[str, ...]) -> str:
        limits = self._server.limits
        if number in self._watches:
            return f"watch {number} is there already"
        if len(self._watches) >= limits.watches or self._targets + len(targets) > limits.targets:
            return (
                f"{len(self._watches) + 1} watches of {self._targets + len(targets)} keys or prefixes: "
                f"at most {limits.watches} of {limits.targets} are allowed for one connection"
            )
        if sum(target.endswith("/") for target in targets) > PREFIXES_MAX:
            return f"a watch of more than {PREFIXES_MAX} prefixes"
        try:
            for target in targets:
                check_key(target)
        except ValueError as error:
            return str(error)
        return ""

    def _unwatch(self, _run: Run, request: WatchStop) -> None:
        self._end_watch(request.watch)

    def _end_watch(self, number: int) -> None:
        stop, targets = self._watches.pop(number, (None, 0))
        if stop is not None:
            stop()
            self._targets -= targets

    def _tell(self, number: int, batch: Batch) -> None:
        frame = self._server.news(number, batch)
        if len(frame) > self._server.limits.frame:
            self._end_watch(number)
            self.send(encode(WatchGap(number, f"what happened has {len(frame)} bytes, too many for one frame")))
            return
        if self.slow_s < math.inf:
            self._backlog += len(frame)
            if self._backlog > self._server.limits.backlog:
                self._end_watch(number)
                self._cut.append(number)
                return
        if not self._posted:
            self._server.has_posted(self)
        self._posted.append(frame)

    # ---- what is written

    def send(self, data: bytes) -> None:
        """What was posted goes before, in the same write."""
        if self._posted:
            posted, self._posted = self._posted, []
            data = b"".join((*posted, data)) if data or len(posted) > 1 else posted[0]
        super().send(data)

    def deliver(self) -> None:
        """What was posted and has not gone with an answer."""
        if self._posted:
            self.send(b"")


def _nothing() -> None:
    pass


_HANDLERS: dict[type[Frame], Callable[[ServerConnection, Run, Any], Frame | None]] = {
    Txn: ServerConnection._txn,  # noqa: SLF001  Its own.
    Renew: ServerConnection._renew,  # noqa: SLF001
    Revoke: ServerConnection._revoke,  # noqa: SLF001
    WatchStart: ServerConnection._watch,  # noqa: SLF001
    WatchStop: ServerConnection._unwatch,  # noqa: SLF001
    Ping: ServerConnection._ping,  # noqa: SLF001
    Bye: ServerConnection._bye,  # noqa: SLF001
}
