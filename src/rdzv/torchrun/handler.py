"""The rendezvous handler: the object that torch's agent calls, on top of one member.

One agent has one handler for its life. In each round the handler takes the member's world, opens a TCPStore for the workers if
it has rank 0, and gives the agent an `AgentStore`. The agent polls `num_nodes_waiting`, which is a local read: the engine
pushes all changes to the member.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, SimpleNamespace
from typing import NoReturn

import msgspec
from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous as torch_api
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.events import NodeState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from .. import errors
from ..blocking import World
from ..core.member_rules import ChangeKind
from ..engines.port import Driver
from ..errors import Closed, Drained, Evicted, RdzvError
from ..member import log
from ..member.member import CALL_S, TELL_S
from ..member.notices import Notice
from ..system.fork import never_free_in_children
from .agent_store import AgentStore
from .conf import Conf
from .events import Recorder, logger, warn_without_restarts
from .info_store import InfoStore
from .log_folder import journal_folder
from .signals import SignalHold, SignalListener, ended_by_sigterm

NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable: if it is 1, rank 0's worker serves the bootstrap, not its agent."""
STORES_MAX = 8
"""Stores of past rounds that are kept alive for C++ code that may still hold them."""
_NO_MESSAGE = "To enable traceback"  # The beginning of torch's text for a worker that left no message.

# Our errors for each of torch's; the first match counts.
_ERRORS: dict[type[Exception], tuple[type[RdzvError], ...]] = {
    torch_api.RendezvousClosedError: (Closed, errors.Banned, errors.LeftAlready),
    torch_api.RendezvousTimeoutError: (errors.JoinTimeout, errors.StoreTimeout),
    torch_api.RendezvousConnectionError: (errors.Unreachable, errors.EngineMoved),
    torch_api.RendezvousStateError: (errors.Incompatible,),
    torch_api.RendezvousError: (RdzvError,),
}


def torch_error(error: RdzvError) -> Exception:
    """Return torch's error for ours, with the same message and code."""
    return next(kind for kind, ours in _ERRORS.items() if isinstance(error, ours))(str(error))


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise torch's error for each of ours."""
    try:
        yield
    except RdzvError as error:
        raise torch_error(error) from None


class Handler(RendezvousHandler):
    """A rendezvous handler with torch's interface. `AgentStore` calls the last four of its public methods."""

    def __init__(self, backend: str, conf: Conf, driver: Driver | None = None) -> None:
        """`driver` is for an engine that no endpoint names."""
        log.set_up()
        if "journal_dir" not in conf.settings:
            journal = {"journal_dir": journal_folder(sys._getframe(1))}  # noqa: SLF001
            conf = msgspec.structs.replace(conf, settings={**conf.settings, **journal})
        self._backend = backend
        self._conf = conf
        self._recorder = Recorder(backend, conf.run_id)
        self._present, self._over = threading.Event(), threading.Event()
        # The observer holds no reference to this handler, so that the member does not keep it alive.
        self._rendezvous = conf.member(partial(_observe, self._recorder, self._present, self._over), driver)
        # A weak reference: a program that catches the signal may drop this handler, and then the member must leave.
        self._signals = SignalListener(weakref.WeakMethod(self._on_signal))
        weakref.finalize(self, self._signals.close)
        self._hold = SignalHold()
        """Keeps the workers while they save, if the run has a `drain_notice`."""
        self._told: bool | None = None
        """Whether the others know of a signal to this agent; None: there was none, or they are still being told."""
        self._world: World | None = None
        self._bootstrap: TCPStore | None = None
        self._stores: deque[InfoStore] = deque(maxlen=STORES_MAX)
        self._restart_reason = ""
        self._role, self._workers = "", 0
        """Role and number of the workers that this agent starts in each round, once they are known."""
        self._finished = False
        self._not_needed = False
        self._departure = "its work here is over"
        # The handler may be made in an `except` block, by a program that tries again. In `shutdown` that exception is still
        # being handled, but it says nothing about the work of this agent.
        self._outer_error = sys.exc_info()[1]
        warn_without_restarts(conf.min_nodes, conf.max_nodes)
        # While the agent gets ready, as torch's handlers do: then a round that is sealed is given at once.
        self._rendezvous.prepare()
        self._rendezvous.serve_workers()

    def get_backend(self) -> str:
        """Return the name of the entry point, which torch compares."""
        return self._backend

    def get_run_id(self) -> str:
        return self._conf.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to the TCPStore of rank 0's agent."""
        return os.environ.get(NOT_SHARED, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. torch calls this only when no worker of this agent runs."""
        self._hold.release()
        reason = self._join_reason()
        self._role, self._workers = workers_of_caller(sys._getframe(1)) or (self._role, self._workers)  # noqa: SLF001
        # A fixed bootstrap_port must be free before the next round's socket is bound.
        self._bootstrap = None
        self._signals.listen()
        self._recorder.record(f"joins run {self._conf.run_id}: {reason}")
        try:
            with ended_by_sigterm():
                world: World | None = None
                while world is None:
                    # The workers of an evicted member have stopped, so it can join again, as a new member, at once.
                    with suppress(Evicted):
                        world = self._rendezvous.join(workers=self._workers, role=self._role)
            # The cause may have been found while this agent waited. A newcomer was in no earlier round.
            return self._start_round(world, reason if self._world is None else world.reason or reason)
        except RdzvError as error:
            self._raise(error)

    def num_nodes_waiting(self) -> int:
        """Return a number above 0 to make the agent stop its workers and call `next_rendezvous`. Local.

        It is the number of nodes that came to join, at most 8, and 1 if the round is over for another reason. All that it
        raises is torch's SignalException, for a signal that was held back until the workers had saved.
        """
        if float(self._conf.settings.get("drain_notice", 0)) > 0:
            # Workers hear of the notice by the engine: if that is away, keeping them does not help them to save.
            self._hold.poll(self._told is False or (self._told is True and not self._rendezvous.drain_left_s))
        change = self._rendezvous.changed
        return int(self.is_over()) if change is None else max(1, change.newcomers)

    def set_closed(self) -> None:
        """End the run for all members. Raises RendezvousConnectionError if the engine is away for `close_timeout`."""
        try:
            self._rendezvous.close_run("closed by its program", self._conf.close_timeout_s)
        except RdzvError as error:
            self._raise(error)

    def shutdown(self) -> bool:
        """Leave the run, without ending it for others, and return whether the others could be told.

        Never raises: torch would show that instead of the workers' failure.
        """
        # A member that reached the last barrier has succeeded, whatever exception is being handled.
        failed = failure_reason(None if self._finished or self._not_needed else sys.exc_info()[1], self._outer_error)
        try:
            self._hold.close()
            self._signals.close()
            self._bootstrap = None
            self._stores.clear()
            self._recorder.record(failed or "leaves", NodeState.FAILED if failed else NodeState.SUCCEEDED)
            # If this process serves the run, the call returns only when the other members have left.
            told = self._rendezvous.leave(failed=bool(failed), reason=failed or self._departure)
        except (SignalException, KeyboardInterrupt) as error:
            logger.warning("interrupted while leaving (%s): ends at once", error)
        except Exception:  # noqa: BLE001
            logger.exception("could not leave run %r properly", self._conf.run_id)
            return False
        else:
            if not told:
                logger.warning("left run %r while its engine is away: its lease's end will tell the others", self._conf.run_id)
            return told
        return True

    def is_closed(self) -> bool:
        """Whether the run is over, as torch asks. A subclass may ask its backend."""
        return self.is_known_closed()

    def is_known_closed(self) -> bool:
        """Whether the run is known to be over. Local."""
        change = self._rendezvous.changed
        return self._over.is_set() or (change is not None and change.kind is ChangeKind.CLOSED)

    def is_over(self) -> bool:
        """Whether the agent must start the next round."""
        return self._rendezvous.changed is not None

    def learn_workers(self, role: str, workers: int) -> bool:
        """Note what the agent says of its workers. Return whether that was known before the round was sealed."""
        known = (self._role, self._workers) == (role, workers)
        self._role, self._workers = role, workers
        return known

    def finish(self, timeout_s: float) -> None:
        """Report that the workers of this agent have succeeded. If the engine is away, try until the time is over."""
        self._finished = True
        self._hold.give_back()  # Nothing is left to save, so a signal may end the attempts at once.
        try:
            self._rendezvous.done(min(timeout_s, TELL_S) if self._hold.is_holding else timeout_s)
        except RdzvError as error:
            logger.warning("the others could not be told that this agent is done: %s", error)
        self._hold.release()

    def _join_reason(self) -> str:
        """Why there is a next round, as this agent knows it."""
        change = self._rendezvous.changed
        if change is not None:
            return change.reason
        return "this node came to join" if self._world is None else "workers of this node have failed"

    def _start_round(self, world: World, reason: str) -> RendezvousInfo:
        self._world = world
        if world.rank == 0:
            if self.use_agent_store:
                self._bootstrap = _serve(world.take_bootstrap_socket())
            else:
                world.bootstrap.release()
        os.environ.update(
            RDZV_RUN_ID=world.run_id, RDZV_ROUND=str(world.round), RDZV_FENCE=str(world.fence), RDZV_REASON=reason,
            RDZV_WORKER=self._rendezvous.serve_workers(),
        )
        text = f"round {world.round}: rank {world.rank} of {world.size}"
        self._recorder.record(text, rank=world.rank, bootstrap=str(world.bootstrap))
        info = torch_api.RendezvousStoreInfo(world.bootstrap.host, world.bootstrap.port)
        store = InfoStore(AgentStore(world, self), world.store)
        self._stores.append(store)
        return RendezvousInfo(store, world.rank, world.size, info)

    def _raise(self, error: RdzvError) -> NoReturn:
        """Raise torch's error for ours. End cleanly instead if this agent was a spare or was drained."""
        if self._is_spare(error) or isinstance(error, Drained):
            self._not_needed = True
            self._departure = "it is not needed any more"
            self._recorder.record(str(error), NodeState.SUCCEEDED)
            logger.warning("this agent is not needed any more: %s", error)
            way = self._conf.spare_exit
            if way == "error" or (way == "auto" and torch_handles_graceful_exit()):
                raise torch_api.RendezvousGracefulExitError(str(error)) from None
            raise SystemExit(0)
        self._departure = "it was given no round"
        self._recorder.record(str(error), NodeState.FAILED)
        raise torch_error(error) from None

    def _is_spare(self, error: RdzvError) -> bool:
        """Whether this agent was not needed: the run ended well without it, or was full without it when it was closed.

        An agent that came after the end was never a spare of the run.
        """
        if not isinstance(error, Closed) or not self._present.is_set():
            return False
        if error.success:
            return True
        with suppress(RdzvError):
            return self._world is None and self._rendezvous.status().size >= self._conf.max_nodes
        return False

    def _on_signal(self, name: str) -> None:
        """Drain this member, so that the others re-form without waiting for its workers to stop. In the listener's thread."""
        # A signal is held back for the first attempt only. Then torch takes up to 30 s to stop the workers, and the engine may
        # come back meanwhile.
        told = False
        for limit_s in (TELL_S, CALL_S):
            if self._finished or told:
                return
            try:
                self._rendezvous.drain(f"{name} received", limit_s)
                told = True
            except RdzvError as error:
                logger.info("could not tell the others that this agent leaves: %s", error)
            finally:
                self._told = told


def _observe(recorder: Recorder, present: threading.Event, over: threading.Event, notice: Notice) -> None:
    """Forward a notice to torch's event handlers. Called in the member's thread."""
    recorder.record(f"round {notice.round}, {notice.member}: {notice.kind}: {notice.reason}")
    if notice.kind == "present":  # This agent has been a member of the run.
        present.set()
    elif notice.kind in ("closed", "ended"):  # The run is closed, or refuses this agent for good.
        over.set()


def workers_of_caller(frame: FrameType | None) -> tuple[str, int] | None:
    """Return role and number of the workers that the calling agent starts; None: it cannot be seen.

    torch tells a handler neither, but the function of its agent that calls `next_rendezvous` has them in its `spec`.
    """
    while frame is not None:
        # Reading a frame's variables keeps all of them alive for as long as it runs: only where there is one of that name.
        spec = frame.f_locals.get("spec") if "spec" in frame.f_code.co_varnames else None
        role, workers = getattr(spec, "role", None), getattr(spec, "local_world_size", None)
        if isinstance(role, str) and isinstance(workers, int) and workers > 0:
            return role, workers
        frame = frame.f_back
    return None


def _serve(listener: socket.socket) -> TCPStore:
    """Serve a TCPStore on a bound socket. The store also connects to itself, by loopback, which works everywhere.

    A socket of both families is reached by IPv4: in a container without IPv6 it can be bound, but there is no `::1`.
    """
    address, port = listener.getsockname()[:2]
    host = "::1" if address == "::1" else "127.0.0.1"
    bound = listener.detach()
    try:
        store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=bound)
    except NotImplementedError:  # An older torch: its server on libuv takes no socket.
        store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=bound, use_libuv=False)
    never_free_in_children(store)
    return store


def failure_reason(error: BaseException | None, outer: BaseException | None) -> str:
    """Return one line about the first worker that failed, or "" if this agent has not failed.

    `error` is the exception that the interpreter handles while the agent leaves. `outer` was already being handled when the
    handler was made: it belongs to the caller, who may run all this in an `except` block of its own, and does not count. A
    rendezvous error does not count either, because then the work on this node has not failed.
    """
    if error is None or error is outer or isinstance(error, (torch_api.RendezvousError, SystemExit, KeyboardInterrupt)):
        return ""
    if not isinstance(error, ChildFailedError):
        return f"{type(error).__name__}: {error}"
    rank, first = error.get_first_failure()
    how = f"exit code {first.exitcode}" if first.exitcode >= 0 else f"killed by {first.signal_name()}"
    # torch's error file holds a text, or a record with a text in it.
    message = first.message.get("message", "") if isinstance(first.message, dict) else first.message
    text = str(message).strip()
    text = "" if text.startswith(_NO_MESSAGE) else text.partition("\n")[0]
    return f"rank {rank} failed: {how}{f': {text}' if text else ''}"


def torch_handles_graceful_exit() -> bool:
    """Try whether this torch survives its own RendezvousGracefulExitError.

    Up to 2.13 at least, it does not: `SimpleElasticAgent.run` returns None, and the launcher reads the result of that. No
    version number tells when this changes. False also means that the trial itself failed.
    """

    def refuse(role: str) -> NoReturn:  # noqa: ARG001
        raise torch_api.RendezvousGracefulExitError("a trial")

    agent = SimpleNamespace(_invoke_run=refuse, _shutdown=lambda **_: None, _shutdown_timeout=0, _total_execution_time=0)
    try:
        return SimpleElasticAgent.run(agent) is not None
    except Exception:  # noqa: BLE001
        return False
