"""The client's end of one connection, without I/O.

It greets the server once, then turns requests into frames, and frames into answers and news, until the connection is lost.
Nothing is ever sent twice. A request that was sent and not answered when the connection is lost has an unknown outcome, and its
caller is told so. `ClientConnection` (`connection.py`) adds what asyncio has to do: futures, a timer and a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec

from ...errors import Incompatible, LimitExceeded, Unreachable
from ...printable import shown
from ...system.dial import DialFailed
from ...system.timers import Timer
from ..port import Batch, Gap, LeaseGone
from . import frames
from .features import FEATURES, WelcomeWithFeatures, welcome_decoder
from .frame_stream import FrameStream, Transport
from .frames import PREAMBLE, Challenge, Frame, Hello, Ping, Proof, RunsWanted, TxnDone, decode, encode
from .trust import DRIVER, ONLY_MEMBER_HAS_TLS, SERVER, SERVER_DID_NOT_PROVE, Handshake, Trust, new_nonce

PING_S = 10.0
"""After a silence of this length the server is asked whether it is still there."""
STRANGER = "another program has that port: correct the endpoint, or choose another port for all nodes"
STANDS_STILL = (
    "if it is the run's server, it stands still: let it go on, or kill it (SIGKILL), and another member there serves; "
    f"otherwise {STRANGER}"
)


class Waiter(Protocol):
    """The half of `asyncio.Future` by which a caller gets its answer."""

    def done(self) -> bool: ...
    def set_result(self, result: Any) -> None: ...
    def set_exception(self, exception: Exception) -> None: ...


class ClientProtocol(FrameStream):
    """One connection to a server. `on_news` gets what watches are told, `on_lost` why the connection is over."""

    def __init__(
        self, endpoint: str, read_timeout_s: float, trust: Trust, now: Callable[[], float], new_waiter: Callable[[], Waiter]
    ) -> None:
        super().__init__(frames.FRAME_MAX)
        self.is_open = True
        self.features: frozenset[str] = frozenset()
        """Additions to the protocol that the server knows, too."""
        self.violation = ""
        """How the other side broke the protocol, once it has."""
        self.on_lost: Callable[[str], None] = lambda _problem: None
        self.alarm: Timer | None = None
        """The timer of the next check, which whoever drives the connection sets."""
        self.on_news: Callable[[int, Batch | Gap], None] = lambda _watch, _news: None
        self._lock: AbstractContextManager[object] = nullcontext()
        """Guards the requests that wait, where other threads may ask, too (`thread_calls.py`)."""
        self._endpoint = endpoint
        self._timeout_s = read_timeout_s
        self._trust = trust
        self._now = now
        self._new_waiter = new_waiter
        self._hello: Hello | RunsWanted | None = None
        """The greeting, while it waits for the proof of the secret."""
        self._nonce = new_nonce()
        self._handshake: Handshake | None = None
        self._is_proven = trust.secret is None
        """The server has proven that it knows the secret, or there is none."""
        self._welcome = new_waiter()
        self._welcome_decoder: Any = welcome_decoder
        self._waiters: dict[int, tuple[float, Waiter, Frame]] = {}
        self._asked = 0
        self._heard_at = now()
        self._heard_anything = False

    # ---- greeting

    def say_hello(self, hello: Hello | RunsWanted) -> None:
        """Greet. The client proves the secret first, so that a stranger that calls a server gets no hash to try secrets on."""
        if isinstance(hello, RunsWanted):
            self._welcome_decoder = frames.runs_decoder
        if self._trust.secret is None:
            self.send(PREAMBLE + encode(hello))
        else:
            self._hello = hello
            self.send(PREAMBLE + encode(Challenge(self._nonce)))

    def not_greeted(self, timeout_s: float) -> None:
        """Give up waiting for the server's greeting."""
        problem = f"somebody accepts connections there but did not greet us within {timeout_s:g} s"
        self._fail_greeting(problem, remedy=STANDS_STILL, is_server=True)

    def _fail_greeting(self, problem: str, **how: Any) -> None:
        """Give up the greeting; `how`: as for DialFailed."""
        if not self._welcome.done():
            self._welcome.set_exception(DialFailed(problem, answered=True, **how))

    # ---- asking

    def ask(self, kind: Callable[..., Frame], *fields: object) -> tuple[int, Waiter]:
        """Send a request of that kind; return its number and the waiter for its answer. `forget` the number afterwards.

        The waiter raises LeaseGone, ValueError or LimitExceeded; Unreachable means that the outcome is unknown. Raise
        Unreachable at once, with nothing sent, if the connection is lost.
        """
        waiter = self._new_waiter()
        number, data = self._register(waiter, kind, *fields)
        self.send(data)
        return number, waiter

    def _register(self, waiter: Waiter, kind: Callable[..., Frame], *fields: object) -> tuple[int, bytes]:
        """Return the number and the bytes of a request that is sent next. Raise Unreachable if no answer can come any more."""
        if not self.is_open:
            raise Unreachable(self._endpoint, "the connection is lost", applied=False)
        number = self._asked + 1
        question = kind(number, *fields)
        data = encode(question)
        self._asked = number
        self._waiters[number] = (self._now(), waiter, question)
        return number, data

    def send(self, data: bytes) -> None:
        """Write encoded frames, whole."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def forget(self, number: int) -> None:
        """The caller no longer waits."""
        self._waiters.pop(number, None)

    def tell(self, frame: Frame) -> None:
        """Send a frame that has no answer."""
        if self.is_open:
            self.send(encode(frame))

    def close(self) -> None:
        """Say goodbye and hang up."""
        if self.is_open:
            self.tell(frames.Bye())
            self._end("the session is closed")
            self.transport.close()

    def lose(self, problem: str, waited_s: float = 0.0) -> None:
        """Give the connection up. Requests that were sent may still take effect."""
        if self.is_open:
            self.reset()
            self._end(problem, waited_s)

    def reset(self) -> None:
        """End the connection at once, and not in order: to the server, that would be the end of this process."""
        self.transport.abort()

    def _end(self, problem: str, waited_s: float = 0.0) -> None:
        with self._lock:
            self.is_open = False
            if self.alarm is not None:
                self.alarm.cancel()
            self._fail_greeting(problem)
            for _, waiter, question in self._waiters.values():
                if not waiter.done() and not isinstance(question, Ping):  # No caller waits for a ping.
                    waiter.set_exception(Unreachable(self._endpoint, problem, waited_s))
            self.on_lost(problem)

    def check(self) -> float:
        """Give the connection up if an answer is overdue, and ask after a silence. Return the seconds until the next check.

        One check serves all requests, instead of a timer for each: nearly all are answered in time.
        """
        with self._lock:
            now = self._now()
            if self._waiters:
                asked_at, *_ = next(iter(self._waiters.values()))
                if now - asked_at >= self._timeout_s:
                    self.lose("no answer", self._timeout_s)
                wait_s = self._timeout_s - (now - asked_at)
            elif now - self._heard_at >= PING_S:
                self.ask(Ping)
                wait_s = self._timeout_s
            else:
                wait_s = PING_S - (now - self._heard_at)
            # A request made in the meantime may be due sooner than what is known now.
            return max(min(wait_s, self._timeout_s), 0.001)

    # ---- what comes

    def heard(self) -> None:
        self._heard_anything = True
        self._heard_at = self._now()

    def closed(self, exc: Exception | None = None) -> None:
        """The connection was ended by the other side or by the network."""
        if not self._heard_anything:
            self._fail_greeting("somebody accepts connections there but closed ours without a greeting", remedy=STRANGER)
        self.lose(f"the connection is lost ({exc})" if exc else "the connection was closed by the other side")

    def violated(self, problem: str, start: bytes = b"") -> None:
        self.violation = problem
        if start:
            self._fail_greeting(problem, remedy=STRANGER)
        self.lose(problem)

    def in_the_clear(self, transport: Transport, start: bytes) -> None:
        self.transport = transport
        is_ours = frames.MAGIC.startswith(start[: len(frames.MAGIC)])
        problem, remedy = (ONLY_MEMBER_HAS_TLS, "") if is_ours else (frames.describe(start), STRANGER)
        self._fail_greeting(problem, untrusted=is_ours, remedy=remedy)

    def insecure(self, problem: str, untrusted: bool) -> None:
        self._fail_greeting(problem, untrusted=untrusted)
        self.lose(problem)

    def frame_received(self, payload: memoryview) -> None:
        if self._welcome.done():
            self._answered(decode(frames.answer_decoder, payload))
            return
        decoder: Any = self._welcome_decoder
        if not self._is_proven:
            decoder = frames.challenge_decoder if self._handshake is None else frames.proven_decoder
        answer: WelcomeWithFeatures | frames.RunsListed | Challenge | Proof | frames.Rejected = decode(decoder, payload)
        if isinstance(answer, frames.Rejected):
            how = {"passing": answer.passing, "untrusted": answer.untrusted, "other_run": answer.other_run}
            self._fail_greeting(_refusal(answer), is_server=True, **how)
        elif isinstance(answer, Challenge):
            self._challenged(answer)
        elif isinstance(answer, Proof):
            self._is_proven = self._handshake is not None and self._handshake.holds(SERVER, answer.proof)
            if not self._is_proven:
                self._fail_greeting(SERVER_DID_NOT_PROVE, untrusted=True)
        elif isinstance(answer, frames.RunsListed):
            self._welcome.set_result(answer)
        else:
            # A server is no more to be trusted with a terminal than a member is.
            names = ("server", "instance", "place", "only_run", "reached_at", "promised")
            texts = {name: shown(getattr(answer, name)) for name in names}
            self.features = FEATURES.intersection(answer.features or ())
            self._welcome.set_result(msgspec.structs.replace(answer, **texts))

    def _challenged(self, challenge: Challenge) -> None:
        """Send our proof and the hello together: waiting for the server's proof first would cost a second round trip.

        The price: a program that has taken the server's address hears the run's id before it is found out.
        """
        if self._trust.secret is None or self._hello is None:
            raise Incompatible("a challenge", "none was asked for yet")
        binding = self.transport.get_extra_info("binding", b"")
        self._handshake = Handshake(self._trust.secret, self._nonce, challenge.nonce, binding)
        self.send(encode(Proof(self._handshake.proof(DRIVER))) + encode(self._hello))

    def _answered(self, answer: frames.Answer) -> None:
        if isinstance(answer, frames.WatchNews):
            self.on_news(answer.watch, answer.batch)
        elif isinstance(answer, frames.WatchGap):
            self.on_news(answer.watch, Gap(shown(answer.text)))
        elif isinstance(answer, frames.Rejected):
            self.lose(_refusal(answer))
        else:
            self._replied(answer)

    def _replied(self, answer: frames.Reply) -> None:
        with self._lock:  # A thread may be reading while the loop ends the connection.
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


def _refusal(rejected: frames.Rejected) -> str:
    # The text may come from a stranger, and goes into logs.
    return " ".join(shown(rejected.text).split()) or "the server hung up without a reason"


def _fits(question: Frame, answer: frames.Reply) -> bool:
    """Whether the answer is one to that question. Callers rely on it, and a broken server must not break them."""
    if isinstance(answer, TxnDone):
        done = question.branch(answer.outcome) if isinstance(question, frames.Txn) else None
        return done is not None and len(answer.outcome.reads) == len(done)
    if isinstance(answer, frames.Acknowledged):
        return not isinstance(question, frames.Txn)
    return not isinstance(question, Ping)


def _settle(waiter: Waiter, answer: frames.Reply) -> None:
    if isinstance(answer, TxnDone):
        waiter.set_result(answer.outcome)
    elif isinstance(answer, frames.Acknowledged):
        waiter.set_result(None)
    elif isinstance(answer, frames.LeaseEnded):
        waiter.set_exception(LeaseGone(shown(answer.text)))
    elif isinstance(answer, frames.LimitReached):
        waiter.set_exception(LimitExceeded(answer.what, answer.size, answer.size_max))
    else:
        waiter.set_exception(ValueError(shown(answer.text)))
