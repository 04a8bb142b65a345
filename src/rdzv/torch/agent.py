"""A worker's view of the run under `rdzv run --stay`: the agent is the member, and hands out the rounds by a socket.

`AgentRendezvous` has the calls of `rdzv.Rendezvous` that `rounds.py` makes, so that a program is the same with and without an
agent.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from .. import worker
from ..blocking import Store
from ..config import arguments
from ..core import stay_messages as messages
from ..core.member_rules import Change, ChangeKind
from ..core.stay_messages import (
    CloseRun,
    FromAgent,
    GivenRank,
    RoundEnded,
    RunEnded,
    StoreAnswer,
    StoreCall,
    WorkerReady,
)
from ..errors import Closed, RoundOver, StoreTimeout, Unreachable

STORE_S = 300.0
ANSWER_S = 5.0
"""How long to wait for the answer to a call once the round is over. The agent ends all calls at that moment."""
LOOK_S = 1.0
"""How often a wait lets Python handle signals."""


class AgentWorld:
    """This worker's rank in a round."""

    def __init__(self, link: AgentRendezvous, given: GivenRank) -> None:
        self.run_id = given.run_id
        self.round = given.round
        self.rank = given.rank
        self.size = given.size
        self.fence = given.fence
        self.reason = given.reason
        self.bootstrap = given.bootstrap
        # The store's calls are the same; the link carries them to the agent.
        self.store = Store(cast("Any", link), cast("Any", _RemoteStore(given.round)))

    def __repr__(self) -> str:
        return f"<World {self.run_id!r} round {self.round}: rank {self.rank} of {self.size}, by the agent of this node>"


class _Request:
    """One call of a store, to be carried to the agent."""

    def __init__(self, round: int, name: str, *arguments: Any) -> None:
        self.round = round
        self.name = name
        self.arguments = list(arguments)


class _RemoteStore:
    """Makes requests of the calls of a round's store."""

    def __init__(self, round: int) -> None:
        self.round = round
        self.timeout_s = STORE_S
        self.calls = self

    def finish(self, request: _Request) -> _Request:
        """Leave the request as it is: the link carries it out."""
        return request

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def set(self, key: str, value: bytes | str) -> _Request:
        return _Request(self.round, "set", key, value)

    def multi_set(self, values: Mapping[str, bytes | str]) -> _Request:
        return _Request(self.round, "multi_set", arguments.pairs("multi_set", values))

    def get(self, key: str, timeout_s: float | None = None) -> _Request:
        return _Request(self.round, "get", key, self._limit(timeout_s))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> _Request:
        return _Request(self.round, "multi_get", arguments.keys("multi_get", keys), self._limit(timeout_s))

    def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> _Request:
        return _Request(self.round, "wait", arguments.keys("wait", keys), self._limit(timeout_s))

    def check(self, keys: Iterable[str]) -> _Request:
        return _Request(self.round, "check", arguments.keys("check", keys))

    def add(self, key: str, amount: int) -> _Request:
        return _Request(self.round, "add", key, amount)

    def append(self, key: str, value: bytes | str) -> _Request:
        return _Request(self.round, "append", key, value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> _Request:
        return _Request(self.round, "compare_set", key, expected, desired)

    def delete(self, key: str) -> _Request:
        return _Request(self.round, "delete", key)

    def num_keys(self) -> _Request:
        return _Request(self.round, "num_keys")

    def list_keys(self) -> _Request:
        return _Request(self.round, "list_keys")


class AgentRendezvous:
    """The link to the agent. One thread reads what it says; any thread may call."""

    asks_directly = False
    """The calls of a store pass through the agent, which is the member."""

    def __init__(self, path: str, local_rank: int) -> None:
        self._path = path
        self._local_rank = local_rank
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._came = threading.Condition()
        self._given: GivenRank | None = None
        self._round = 0
        self._change: Change | None = None
        self._ended: Closed | Unreachable | None = None
        self._left = False
        self._calls = 0
        self._answers: dict[int, StoreAnswer | None] = {}
        """Calls under way; None: there is no answer yet."""

    def __enter__(self) -> AgentRendezvous:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()

    def prepare(self) -> None:
        """Connect to the agent."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(self._path)
        except OSError as error:
            link.close()
            raise Unreachable("of this node's agent", f"{error.strerror or error} ({self._path})") from None
        self._socket = link
        threading.Thread(target=self._read, name="rdzv agent", daemon=True).start()

    # ---- the calls of a member

    def join(self) -> AgentWorld:
        """Say that nothing of the last round runs here, and wait for the next. Raises Closed."""
        with self._came:
            self._given = self._change = None
        self._send(WorkerReady(self._local_rank, self._round))
        with self._came:
            while self._given is None and self._ended is None:
                self._came.wait(LOOK_S)
            given = self._given
            if given is None:
                assert self._ended is not None, "one of the two ended the wait"
                raise self._ended
            self._round = given.round
        os.environ.update(given.environ)
        worker.introduce_again()
        return AgentWorld(self, given)

    @property
    def changed(self) -> Change | None:
        """Why the round is over; None: it stands."""
        return self._change

    def wait_changed(self, timeout_s: float | None = None) -> Change | None:
        """Wait for the end of the round, and return why it is over; None: the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._came:
            while self._change is None:
                if self._left:
                    raise Unreachable("of this node's agent", "this worker has left")
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                self._came.wait(LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic())))
            return self._change

    def close_run(self, reason: str = "finished") -> None:
        """Ask the agent to close the run."""
        self._send(CloseRun(reason))

    def done(self) -> None:
        """Do nothing: the agent says that the node is done when its workers have ended well."""

    def drain(self, reason: str = "", timeout_s: float = 0.0) -> None:
        """Do nothing: the signal that ends this worker comes from the agent, which has told the others."""

    def wait_drained(self) -> None:
        """Do nothing: the agent keeps this worker until all have saved, and then sends the signal."""

    def leave(self, *, failed: bool = False, reason: str = "") -> bool:  # noqa: ARG002
        """Let the agent go. It learns by the end of this process why."""
        with self._came:
            self._left = True
            self._came.notify_all()
        link, self._socket = self._socket, None
        if link is not None:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # The thread that reads still has it open.
            link.close()
        return True

    def run(self, request: _Request, call: str = "") -> Any:  # noqa: ARG002  The request has its name.
        """Make a call of a store. The agent bounds its time while the round stands."""
        with self._came:
            self._calls += 1
            number = self._calls
            self._answers[number] = None
        self._send(StoreCall(number, request.round, request.name, request.arguments))
        with self._came:
            over_at = math.inf
            while self._answers[number] is None and self._ended is None and not self._left:
                if self._change is not None or self._round != request.round:
                    over_at = min(over_at, time.monotonic())
                    if time.monotonic() - over_at >= ANSWER_S:
                        break
                self._came.wait(LOOK_S)
            answer = self._answers.pop(number)
        if answer is None:
            raise self._ended or RoundOver(request.round, "this worker has left" if self._left else "the agent did not answer")
        if not answer.error:
            return answer.value
        raise _error(answer)

    # ---- the link

    def _send(self, message: Any) -> None:
        link = self._socket
        if link is None:
            raise Unreachable("of this node's agent", "this worker has left")
        try:
            with self._sending:
                link.sendall(messages.encode(message))
        except OSError as error:
            raise Unreachable("of this node's agent", f"{error.strerror or error}") from None

    def _read(self) -> None:
        link = self._socket
        assert link is not None, "prepare has connected"
        try:
            with link.makefile("rb") as stream:
                while header := stream.read(messages.SIZE_BYTES):
                    data = stream.read(messages.size_of(header))
                    self._hear(messages.decode(FromAgent, data))  # type: ignore[arg-type]
            problem = "it has ended"
        except (OSError, ValueError) as error:
            problem = str(error)
        with self._came:
            self._ended = self._ended or Unreachable("of this node's agent", problem)
            self._change = self._change or Change(ChangeKind.OUTAGE, f"the agent of this node is gone: {problem}")
            self._came.notify_all()

    def _hear(self, said: GivenRank | RoundEnded | RunEnded | StoreAnswer) -> None:
        with self._came:
            if isinstance(said, GivenRank):
                # The end of the former round may have been told after this worker had left it.
                self._given, self._change = said, None
            elif isinstance(said, RunEnded):
                self._ended = Closed(said.run_id, said.reason, said.success)
                self._change = self._change or Change(ChangeKind.CLOSED, said.reason)
            elif isinstance(said, RoundEnded):
                if said.round == (self._round if self._given is None else self._given.round):
                    self._change = Change(ChangeKind.ROUND, said.reason, said.newcomers)
            elif said.id in self._answers:
                self._answers[said.id] = said
            self._came.notify_all()


def _error(answer: StoreAnswer) -> Exception:
    if answer.error == "over":
        return RoundOver(*answer.details)
    if answer.error == "timeout":
        return StoreTimeout(*answer.details)
    if answer.error == "away":
        return Unreachable(*answer.details)
    return ValueError(*answer.details)
