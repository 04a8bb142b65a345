"""The driver's end of one connection to a server: it is greeted once, then asked until it is lost.

Nothing is ever sent twice. What was sent and not answered when the connection is lost has an unknown outcome, and its
caller is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...errors import Incompatible, LimitExceeded, Unreachable
from ...system.dial import DialFailed
from ...system.fork import let_go_in_children
from ..port import Batch, Gap, LeaseGone
from .frames import (
    FRAME_MAX,
    MAGIC,
    PREAMBLE,
    Acknowledged,
    Answer,
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
    Txn,
    TxnDone,
    WatchGap,
    WatchNews,
    Welcome,
    answer_decoder,
    challenge_decoder,
    decode,
    describe,
    encode,
    proven_decoder,
    welcome_decoder,
)
from .tls import TlsTransport
from .trust import DRIVER, ONLY_MEMBER_HAS_TLS, SERVER, SERVER_DID_NOT_PROVE, Handshake, Trust, new_nonce

PING_S = 10.0
"""A connection on which nothing is heard for so long is asked whether it is still there."""


STRANGER = "another program has that port: correct the endpoint, or choose another port for all nodes"


class ClientConnection(FramedProtocol):
    """See the module's docstring. `on_news` gets what watches are told, `on_lost` why it is over."""

    def __init__(self, endpoint: str, read_timeout_s: float, trust: Trust | None = None, host: str = "") -> None:
        """`host`: whom the server's certificate must be for."""
        super().__init__(FRAME_MAX)
        self._endpoint = endpoint
        self._trust = trust or Trust()
        self._host = host
        self._hello: Hello | None = None
        """What waits until we have proven ourselves."""
        self._nonce = new_nonce()
        self._handshake: Handshake | None = None
        self._is_proven = self._trust.secret is None
        """The server knows the secret, or there is none."""
        self._timeout_s = read_timeout_s
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        self.violation = ""
        """What the other side did that no rdzv server does, once it has."""
        self.on_lost: Callable[[str], None] = lambda _problem: None
        self.on_news: Callable[[int, Batch | Gap], None] = lambda _watch, _news: None
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._waiters: dict[int, tuple[float, asyncio.Future[Any], Frame]] = {}
        self._asked = 0
        self._heard_at = self._loop.time()
        self._heard_anything = False
        self._alarm: asyncio.TimerHandle | None = None

    # ---- greeting

    @property
    def is_encrypted(self) -> bool:
        """It speaks TLS."""
        return self._trust.certificates is not None

    def carrier(self) -> asyncio.BufferedProtocol:
        """What the stream is to be connected to."""
        certificates = self._trust.certificates
        return self if certificates is None else TlsTransport(self, certificates, self._host)

    async def greet(self, hello: Hello, timeout_s: float) -> Welcome:
        """Raises DialFailed; the connection is closed then."""
        if self._trust.secret is None:
            self.send(PREAMBLE + encode(hello))
        else:
            self._hello = hello
            self.send(PREAMBLE + encode(Challenge(self._nonce)))
        timer = self._loop.call_later(timeout_s, self._not_greeted, timeout_s)
        try:
            return await self._welcome
        except BaseException:
            self.lose("it was given up")
            raise
        finally:
            timer.cancel()

    def _not_greeted(self, timeout_s: float) -> None:
        self._fail_greeting(f"somebody accepts connections there but did not greet us within {timeout_s:g} s", remedy=STRANGER)

    def _fail_greeting(
        self, problem: str, *, passing: bool = False, untrusted: bool = False, remedy: str = ""
    ) -> None:
        if not self._welcome.done():
            failed = DialFailed(problem, answered=True, passing=passing, untrusted=untrusted, remedy=remedy)
            self._welcome.set_exception(failed)

    # ---- asking

    async def call(self, frame: Callable[[int], Frame]) -> Any:
        """Ask and wait. Raises LeaseGone, ValueError, LimitExceeded; Unreachable means that the outcome is unknown."""
        number = self._asked + 1
        question = frame(number)
        data = encode(question)
        self._asked = number
        waiter: asyncio.Future[Any] = self._loop.create_future()
        self._waiters[number] = (self._loop.time(), waiter, question)
        self.send(data)
        try:
            return await waiter
        finally:
            self._waiters.pop(number, None)

    def tell(self, frame: Frame) -> None:
        """Ask without waiting."""
        if self.is_open:
            self.send(encode(frame))

    def close(self) -> None:
        """Say goodbye."""
        self.tell(Bye())
        self.lose("the session is closed")

    def lose(self, problem: str, waited_s: float = 0.0) -> None:
        """It is over. What was asked may still take effect."""
        if not self.is_open:
            return
        self.is_open = False
        if self._alarm is not None:
            self._alarm.cancel()
        self._fail_greeting(problem)
        for _, waiter, _ in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(Unreachable(self._endpoint, problem, waited_s))
        self.transport.close()
        self.on_lost(problem)

    def _watch_out(self) -> None:
        """One alarm for everything, not set anew at every call: nearly all are answered in time."""
        now = self._loop.time()
        if self._waiters:
            asked_at, *_ = next(iter(self._waiters.values()))
            if now - asked_at >= self._timeout_s:
                self.lose("no answer", self._timeout_s)
                return
            wait_s = self._timeout_s - (now - asked_at)
        elif now - self._heard_at >= PING_S:
            self._asked += 1
            ping = Ping(self._asked)
            self._waiters[self._asked] = (now, self._loop.create_future(), ping)
            self.tell(ping)
            wait_s = self._timeout_s
        else:
            wait_s = PING_S - (now - self._heard_at)
        # A call made in the meantime may be due sooner than what we know of now.
        self._alarm = self._loop.call_later(max(min(wait_s, self._timeout_s), 0.001), self._watch_out)

    # ---- what comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """We are connected to somebody."""
        super().connection_made(transport)
        let_go_in_children(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """By the other side, or the network."""
        if not self._heard_anything:
            self._fail_greeting("somebody accepts connections there but closed ours without a greeting", remedy=STRANGER)
        self.lose(f"the connection is lost ({exc})" if exc else "the connection was closed by the other side")

    def buffer_updated(self, nbytes: int) -> None:
        """A sign of life."""
        self._heard_anything = True
        self._heard_at = self._loop.time()
        super().buffer_updated(nbytes)

    def violated(self, problem: str, start: bytes = b"") -> None:
        """It is no rdzv server, or one that went mad."""
        self.violation = problem
        if start:
            self._fail_greeting(problem, remedy=STRANGER)
        self.lose(problem)

    def in_the_clear(self, transport: asyncio.Transport, start: bytes) -> None:
        """A server of ours without TLS, or no server of ours."""
        self.transport = transport
        is_ours = MAGIC.startswith(start[: len(MAGIC)])
        problem, remedy = (ONLY_MEMBER_HAS_TLS, "") if is_ours else (describe(start), STRANGER)
        self._fail_greeting(problem, untrusted=is_ours, remedy=remedy)

    def insecure(self, problem: str, untrusted: bool) -> None:
        """TLS failed."""
        self._fail_greeting(problem, untrusted=untrusted)
        self.lose(problem)

    def frame_received(self, payload: memoryview) -> None:
        """First the welcome, then answers and news."""
        if self._welcome.done():
            self._answered(decode(answer_decoder, payload))
            return
        decoder = welcome_decoder if self._is_proven else challenge_decoder if self._handshake is None else proven_decoder
        answer: Welcome | Challenge | Proof | Rejected = decode(decoder, payload)
        if isinstance(answer, Rejected):
            self._fail_greeting(_refusal(answer), passing=answer.passing, untrusted=answer.untrusted)
        elif isinstance(answer, Challenge):
            self._challenged(answer)
        elif isinstance(answer, Proof):
            self._proven(answer)
        else:
            self._welcomed(answer)

    def _challenged(self, challenge: Challenge) -> None:
        """Prove ourselves, and greet in the same breath: what the hello tells, whoever listens could hear anyway."""
        if self._trust.secret is None or self._hello is None:
            raise Incompatible("a challenge", "none was asked for yet")
        binding = self.transport.get_extra_info("binding", b"")
        self._handshake = Handshake(self._trust.secret, self._nonce, challenge.nonce, binding)
        self.send(encode(Proof(self._handshake.proof(DRIVER))) + encode(self._hello))

    def _proven(self, proof: Proof) -> None:
        if self._handshake is not None and self._handshake.holds(SERVER, proof.proof):
            self._is_proven = True
        else:
            self._fail_greeting(SERVER_DID_NOT_PROVE, untrusted=True)

    def _welcomed(self, welcome: Welcome) -> None:
        self._welcome.set_result(welcome)
        self._alarm = self._loop.call_later(min(PING_S, self._timeout_s), self._watch_out)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, WatchNews):
            self.on_news(answer.watch, answer.batch)
        elif isinstance(answer, WatchGap):
            self.on_news(answer.watch, Gap(answer.text))
        elif isinstance(answer, Rejected):
            self.lose(_refusal(answer))
        else:
            asked = self._waiters.get(answer.number)
            if asked is None:
                if answer.number > self._asked:
                    raise Incompatible(f"answer {answer.number}", f"only {self._asked} were asked for")
                return
            _, waiter, question = asked
            if not _fits(question, answer):
                problem = f"a {type(question).__name__} was asked for, and what came does not answer that"
                raise Incompatible(f"answer {answer.number}, {type(answer).__name__},", problem)
            del self._waiters[answer.number]
            if not waiter.done():
                _settle(waiter, answer)


def _refusal(rejected: Rejected) -> str:
    # On one line: it may be a stranger's, and goes into logs.
    return " ".join(rejected.text.split()) or "the server hung up without a reason"


def _fits(question: Frame, answer: TxnDone | Acknowledged | LeaseEnded | Refused | LimitReached) -> bool:
    """It answers what was asked. Callers rely on that, and must not fall over a server that went mad."""
    if isinstance(answer, (LeaseEnded, Refused, LimitReached)):
        return not isinstance(question, Ping)
    if isinstance(question, Txn):
        done = question.branch(answer.outcome) if isinstance(answer, TxnDone) else None
        return done is not None and isinstance(answer, TxnDone) and len(answer.outcome.reads) == len(done)
    return isinstance(answer, Acknowledged)


def _settle(waiter: asyncio.Future[Any], answer: TxnDone | Acknowledged | LeaseEnded | Refused | LimitReached) -> None:
    if isinstance(answer, TxnDone):
        waiter.set_result(answer.outcome)
    elif isinstance(answer, Acknowledged):
        waiter.set_result(None)
    elif isinstance(answer, LeaseEnded):
        waiter.set_exception(LeaseGone(answer.text))
    elif isinstance(answer, LimitReached):
        waiter.set_exception(LimitExceeded(answer.what, answer.size, answer.size_max))
    else:
        waiter.set_exception(ValueError(answer.text))
