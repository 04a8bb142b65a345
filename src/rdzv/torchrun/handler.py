"""The rendezvous handler: what torch's agent calls, in terms of a member.

One agent has one handler for its life. In each round it takes the member's world, opens a TCPStore for the workers if it has
rank 0, and gives the agent a store of ours. The agent polls `num_nodes_waiting`, which is a local read; all news come to the
member by themselves.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from typing import Any, NoReturn

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ..blocking import Rendezvous, World
from ..config.settings import DEFAULTS, TABLE
from ..core.member_rules import ChangeKind
from ..engines.port import Driver
from ..errors import (
    Banned,
    Closed,
    Drained,
    EngineMoved,
    Evicted,
    Incompatible,
    JoinTimeout,
    LeftAlready,
    RdzvError,
    Unreachable,
)
from ..member.notices import Notice
from .agent_store import AgentStore
from .conf import Conf
from .events import Recorder, Waiting, logger, warn_if_a_loss_would_end_it
from .failure_reason import failure
from .graceful_exit import is_handled
from .signals import SignalListener, ended_by_sigterm

NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable: rank 0's worker serves the bootstrap, not its agent."""

_ERRORS: list[tuple[type[RdzvError], type[Exception]]] = [
    (Closed, RendezvousClosedError),
    (Banned, RendezvousClosedError),
    (LeftAlready, RendezvousClosedError),
    (JoinTimeout, RendezvousTimeoutError),
    (Unreachable, RendezvousConnectionError),
    (EngineMoved, RendezvousConnectionError),
    (Incompatible, RendezvousStateError),
    (RdzvError, RendezvousError),
]
"""torch's error for each of ours; the first that fits."""


def theirs(error: RdzvError) -> Exception:
    """The error of torch's for ours, with the same sentence and its code."""
    return next(kind for ours, kind in _ERRORS if isinstance(error, ours))(str(error))


class Handler(RendezvousHandler):
    """See the module's docstring."""

    def __init__(self, backend: str, conf: Conf, driver: Driver | None = None) -> None:
        """`driver` is for an engine that no endpoint names."""
        self._backend = backend
        self._conf = conf
        self._recorder = Recorder(backend, conf.run_id)
        self._news = _News(self._recorder)
        self._rendezvous = Rendezvous(
            conf.endpoint,
            run_id=conf.run_id,
            min_nodes=conf.min_nodes,
            max_nodes=conf.max_nodes,
            observer=self._news.hear,
            driver=driver,
            **conf.settings,
        )
        join_timeout: Any = TABLE["join_timeout"].read(conf.settings.get("join_timeout", DEFAULTS["join_timeout"]))
        self._join_timeout_s: float = join_timeout
        # Held weakly, by a thread: a program that catches the signal may drop us, and the member must leave then.
        self._ear = SignalListener(weakref.WeakMethod(self._signalled))
        weakref.finalize(self, self._ear.close)
        self._world: World | None = None
        self._bootstrap: TCPStore | None = None
        self._given_up = ""
        self._finished = False
        self._not_needed = False
        # What is being handled already when we are made is not ours: whoever tries again does it in an `except` block.
        self._outer = sys.exc_info()[1]
        warn_if_a_loss_would_end_it(conf.min_nodes, conf.max_nodes)
        self._rendezvous.prepare()  # While the agent gets ready; as torch's does.

    # ---- torch's interface

    def get_backend(self) -> str:
        """The name of the entry point, which torch compares."""
        return self._backend

    def get_run_id(self) -> str:
        """Workers find it in TORCHELASTIC_RUN_ID."""
        return self._conf.run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the TCPStore of rank 0's agent."""
        return os.environ.get(NOT_SHARED, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Being called says that no worker of this agent runs."""
        reason = self._reason()
        # A fixed bootstrap_port must be free before the next round's socket is bound.
        self._bootstrap = None
        self._ear.listen()
        self._recorder.running(f"joins run {self._conf.run_id}: {reason}")
        try:
            with ended_by_sigterm(), Waiting(self._rendezvous.status, self._join_timeout_s) as waiting:
                world = self._join(waiting)
            return self._enter(world, reason)
        except RdzvError as error:
            self._refuse(error)

    def num_nodes_waiting(self) -> int:
        """Above 0: stop the workers and call `next_rendezvous`. Local, and never raises."""
        return int(self.is_over())

    def is_closed(self) -> bool:
        """Whether the run is known to be over. Local."""
        change = self._rendezvous.changed
        return self._news.over.is_set() or (change is not None and change.kind is ChangeKind.CLOSED)

    def set_closed(self) -> None:
        """End the run for everybody."""
        try:
            self._rendezvous.close_run("closed by its program")
        except RdzvError as error:
            self._refuse(error)

    def shutdown(self) -> bool:
        """Leave; never ends the run by itself, and never raises: torch would show that in place of the workers' failure."""
        failed = failure(None if self._finished or self._not_needed else sys.exc_info()[1], self._outer)
        try:
            self._ear.close()
            self._bootstrap = None
            if failed:
                self._recorder.failed(failed)
            else:
                self._recorder.succeeded("leaves")
            # Who serves stays here until the others have gone.
            self._rendezvous.leave(failed=bool(failed), reason=failed or "its work here is over")
        except (SignalException, KeyboardInterrupt) as error:
            logger.warning("told to go while leaving (%s), and goes", error)
        except Exception:  # noqa: BLE001
            logger.exception("could not leave run %r as it should", self._conf.run_id)
            return False
        return True

    # ---- rounds

    def _reason(self) -> str:
        """Why there is a next round, as this agent knows it."""
        change = self._rendezvous.changed
        if change is not None:
            return change.reason
        if self._given_up:
            return self._given_up
        return "this node came to join" if self._world is None else "workers of this node have failed"

    def _join(self, waiting: Waiting) -> World:
        while True:
            try:
                return self._rendezvous.join(lasts=waiting.lasts)
            except Evicted as evicted:
                # Its workers have stopped, so it can come back as a new member at once.
                logger.warning("%s", evicted)

    def _enter(self, world: World, reason: str) -> RendezvousInfo:
        self._world = world
        self._given_up = ""
        if world.rank == 0:
            if self.use_agent_store:
                self._bootstrap = _serve(world.take_bootstrap_socket())
            else:
                world.bootstrap.release()
        os.environ.update(RDZV_RUN_ID=world.run_id, RDZV_ROUND=str(world.round), RDZV_REASON=reason)
        self._recorder.running(
            f"round {world.round}: rank {world.rank} of {world.size}", world.rank, str(world.bootstrap)
        )
        logger.info("round %s of run %r: rank %s of %s", world.round, world.run_id, world.rank, world.size)
        info = RendezvousStoreInfo(world.bootstrap.host, world.bootstrap.port)
        return RendezvousInfo(AgentStore(world, self), world.rank, world.size, info)

    def _refuse(self, error: RdzvError) -> NoReturn:
        """Raise torch's error for ours; or, if nothing is wrong and we are just not needed, a clean end."""
        # A run that had ended before we came is not one we were a spare of.
        spare = isinstance(error, Closed) and error.success and self._news.present.is_set()
        if spare or isinstance(error, Drained):
            self._not_needed = True
            self._recorder.succeeded(str(error))
            logger.warning("this agent is not needed any more: %s", error)
            if self._conf.spare_exit == "error" or (self._conf.spare_exit == "auto" and is_handled()):
                raise RendezvousGracefulExitError(str(error)) from None
            raise SystemExit(0)
        self._recorder.failed(str(error))
        raise theirs(error) from error

    # ---- what the agent's store asks

    def is_over(self) -> bool:
        """The agent is to start anew: the round changed, or its ranks could not be given out."""
        return bool(self._given_up) or self._rendezvous.changed is not None

    def give_up(self, reason: str) -> None:
        """Have the agent start anew."""
        logger.warning("%s", reason)
        self._given_up = reason

    def finish(self, timeout_s: float) -> None:
        """Our workers have succeeded: we are done. If the engine is away we try for a while, and go in any case."""
        self._finished = True
        telling = threading.Thread(target=self._tell_done, name="rdzv done", daemon=True)
        telling.start()
        telling.join(timeout_s)

    def _tell_done(self) -> None:
        try:
            self._rendezvous.done()
        except RdzvError as error:
            logger.warning("the others could not be told that this agent is done: %s", error)

    # ---- what we hear

    def _signalled(self, name: str) -> None:
        """In the ear's thread: let the others go on without waiting for our workers to stop."""
        if self._finished:
            return
        try:
            self._rendezvous.drain(f"{name} received")
        except RdzvError as error:
            logger.info("could not say that we go: %s", error)


class _News:
    """What the member's notices tell. It does not know the handler, so that the member does not keep that alive."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.present = threading.Event()
        """We have been in the run."""
        self.over = threading.Event()
        """The run is closed, or refuses us for good."""

    def hear(self, notice: Notice) -> None:
        """In the member's thread."""
        # A sink of its own: torch's event handlers hear what every other sink hears.
        self._recorder.running(f"round {notice.round}, {notice.member}: {notice.kind}: {notice.reason}")
        if notice.kind == "present":
            self.present.set()
        elif notice.kind in ("closed", "ended"):
            self.over.set()


def _serve(listener: socket.socket) -> TCPStore:
    """A TCPStore on a socket that was bound before. It also connects to itself, and that works by loopback everywhere."""
    host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    port = listener.getsockname()[1]
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
