"""The loop over the rounds of a process that stays: join, make the group, run the block, and again.

A generator cannot catch what is raised in the body of its `for`, so each round is a `with` block. Its end decides what follows:

    the block ends             the work is done: wait for the others to end theirs, and leave
    a peer is lost, or check() join again, with the process and all that it has loaded
    any other error            leave, with the error as the reason, and let it through
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import torch

from .. import worker
from ..aio import departure_of
from ..blocking import Rendezvous, Store, World
from ..config.endpoint import Endpoint
from ..config.options import Options, Unpack
from ..core.stay_messages import STAY_ENV
from ..errors import Closed, Evicted, RdzvError, RoundOver
from ..torchrun.signals import SignalListener
from .agent import AgentRendezvous, AgentWorld
from .failures import Failures, is_loss, one_line
from .group import ProcessGroup
from .watchdog import AnyRendezvous, Watchdog

DRAIN_S = 5.0
"""After a signal: how long the process waits for the round to be formed again without it. Then it goes anyway."""
_FINISHED, _ALL_FINISHED = "rdzv/finished", "rdzv/all finished"  # Keys of the round's store.
_PROCESS_ENV = {"slot": "SLURM_LOCALID", "order": "SLURM_PROCID"}
"""Settings that tell the processes of one node apart, and where srun gives them."""

logger = logging.getLogger("rdzv")


def rounds(
    endpoint: str | Endpoint = "auto", *, run_id: str = "", min_nodes: int | str = 0, max_nodes: int | str = 0,
    backend: str = "", timeout_s: float = 600.0, form_s: float = 10.0, max_failures: int = 5, **options: Unpack[Options],
) -> Rounds:  # fmt: skip
    """Return the rounds of this process, to be iterated over once.

    Under `rdzv run --stay` the agent is the member and knows the run: then endpoint, run id, numbers of nodes and settings
    given here do not count. Elsewhere each process is a member of its own, and `min_nodes` and `max_nodes` count processes.

    Load and build all that takes long before: the process asks to be let in when the iteration begins.

    `backend` is that of `init_process_group` (default: gloo, and NCCL if there is a GPU). `timeout_s` is the limit of a
    collective; it need not be short, because a lost or paused member ends the collectives of the others. `form_s` is the
    limit for the connections of a new group. `max_failures` rounds in a row that fail before a step was completed close the
    run. The other arguments are those of `rdzv.Rendezvous`.
    """
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    settings: dict[str, Any] = {**_settings_of(os.environ), **options}
    agent = os.environ.get(STAY_ENV, "")
    rendezvous: AnyRendezvous
    if agent:
        rendezvous = AgentRendezvous(agent, int(os.environ.get("LOCAL_RANK", "0")))
    else:
        rendezvous = Rendezvous(endpoint, run_id=run_id, min_nodes=min_nodes, max_nodes=max_nodes, **settings)
    return Rounds(rendezvous, ProcessGroup(chosen, form_s, timeout_s), Failures(max_failures), timeout_s)


def _settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[variable] for name, variable in _PROCESS_ENV.items() if environ.get(variable)}


class Rounds:
    """The rounds of one process. Make it with `rounds`; iterating over it takes part in the run and gives a world per round."""

    def __init__(self, rendezvous: AnyRendezvous, group: ProcessGroup, failures: Failures, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self._group = group
        self._failures = failures
        self._timeout_s = timeout_s
        self._watchdog = Watchdog(rendezvous)
        self._joining = False
        self._finishing = False
        """The block has ended: this process only waits for the others."""
        self._signal = 0
        """The number of the signal that ends this process; 0: none has come."""
        self._stopped = ""
        """Why this process must leave the round, although the round may stand; empty: it need not."""

    def __iter__(self) -> Iterator[LiveWorld]:
        with self._listening(), self._rendezvous:
            try:
                self._rendezvous.prepare()
                self._group.warm_up()
                while (world := self._next()) is not None:
                    yield world
                    if world.finished:
                        self._group.close()
                        return
                    if not world.entered:
                        raise RuntimeError("a round was not used: put the body of the loop into `with world:`")
            except SystemExit:
                if self._signal:  # A process that was told to end has not failed.
                    self._rendezvous.leave(reason=f"{signal.Signals(self._signal).name} received")
                raise
            finally:
                # A loop that was left by `break`, or by an error outside of the `with` block, may have left a group.
                worker.end_rounds()
                self._watchdog.close()
                self._end_group()

    def _next(self) -> LiveWorld | None:
        """Join until a round has a group. None: the run has ended well without this process."""
        while True:
            given = self._join()
            if given is None:
                return None
            self._watchdog.guard(self._group.abort)
            try:
                self._group.form(given)
                self.check(given.round)
            except Exception as error:
                self._end_group()
                if not is_loss(error) or self._is_hopeless(error):
                    raise
                logger.info("round %d has no process group: %s", given.round, one_line(error))
                continue
            if isinstance(self._rendezvous, Rendezvous):  # Otherwise the agent of this node serves it.
                worker.begin_round(self._rendezvous.serve_workers, given.rank, given.round)
            return LiveWorld(self, given)

    def _join(self) -> World | AgentWorld | None:
        self._joining = True
        try:
            while True:
                if self._signal:
                    raise SystemExit(128 + self._signal)
                try:
                    return self._rendezvous.join()
                except Evicted as error:
                    logger.warning("%s", error)
                except Closed as error:
                    if not error.success:
                        raise
                    logger.info("%s", error)
                    return None
        finally:
            self._joining = False

    # ---- the calls of a world

    def check(self, number: int) -> None:
        """Raise RoundOver if the round is over, or must be left."""
        change = self._rendezvous.changed
        why = self._stopped or ("" if change is None else change.reason)
        if why:
            raise RoundOver(number, why)

    def end(self, world: LiveWorld, error: BaseException | None) -> bool:
        """End a round, and return whether another one follows."""
        if error is None:
            self._finishing = True
            try:
                self._finish(world)
            except RdzvError as problem:
                error = problem
            finally:
                self._finishing = False
        if error is None:
            self._end_group()
            world.finished = True
            return False
        if is_loss(error) and (world.steps or not self._is_hopeless(error)):
            self._end_group()
            logger.info("round %d is over for this process after %d steps: %s", world.round, world.steps, one_line(error))
            return True
        # The reason first: the others must not take the end of the connections for a loss.
        failed, reason = departure_of(error)
        self._rendezvous.leave(failed=failed, reason=reason)
        self._end_group()
        return False

    def progressed(self) -> None:
        """Note a completed step."""
        self._failures.progressed()

    def _finish(self, world: LiveWorld) -> None:
        """Wait until all members of the round have finished, and say so. Raises RoundOver if one is lost before."""
        # By the round's store, not by a collective: a member that is past its last barrier ends its connections, and another
        # might see that before the end of its own barrier.
        self.check(world.round)  # If a signal came before, nobody ends the wait below.
        if world.store.add(_FINISHED, 1) == world.size:
            world.store.set(_ALL_FINISHED, b"1")
        else:
            world.store.wait([_ALL_FINISHED], self._timeout_s)
        self._rendezvous.done()

    def _is_hopeless(self, error: BaseException) -> bool:
        """Count a round that failed before a step was completed. Close the run if there were too many in a row."""
        change = self._rendezvous.changed
        if isinstance(error, RoundOver) or (change is not None and change.newcomers):
            return False  # The round was ended, for a newcomer or a drain: it did not fail.
        why = self._failures.failed(one_line(error))
        if not why:
            return False
        logger.error("this process closes the run: %s", why)
        with suppress(RdzvError):
            self._rendezvous.close_run(why)
        return True

    def _end_group(self) -> None:
        self._watchdog.rest()
        self._group.end()

    # ---- signals

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Notice SIGTERM and SIGINT, also while a collective blocks the main thread."""
        listener = SignalListener(weakref.WeakMethod(self._on_signal))
        ours = _is_main() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if ours:  # Without a handler the interpreter does not tell of the signal. A handler of the program stays.
            signal.signal(signal.SIGTERM, self._on_sigterm)
        listener.listen()
        try:
            yield
        finally:
            listener.close()
            if ours and _is_main():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> Any:  # noqa: ARG002
        """Leave at once if nothing of a round runs here. Otherwise the end of the round frees the main thread first."""
        self._signal = number
        if self._joining:
            raise SystemExit(128 + number)

    def _on_signal(self, name: str) -> None:
        """Let the others form a round without this process, then end it here. In the listener's thread."""
        self._signal = signal.Signals[name]
        with suppress(RdzvError):
            self._rendezvous.drain(f"{name} received", DRAIN_S)
            self._rendezvous.wait_drained()
            self._rendezvous.wait_changed(DRAIN_S)
        self._stopped = f"{name} received"
        self._watchdog.abort()
        if self._finishing:
            self._rendezvous.leave(reason=self._stopped)  # It ends the main thread's wait, too.


class LiveWorld:
    """A round with its process group. Use it as `with world:`; the group is torch's default group inside of the block."""

    round: int
    """Number of the round, from 1 on."""
    rank: int
    """Rank of this process: 0 to `size` - 1."""
    size: int
    """How many processes are in the round."""
    reason: str
    """Why the round before this one ended; empty for a first round."""
    fence: int
    """A number above those of all earlier rounds, for what is written elsewhere."""
    store: Store
    """A small store that all processes of the round share, and that ends with it."""
    given: World | AgentWorld
    """The world as `rdzv.Rendezvous.join` gave it: members, bootstrap address and the rest."""
    steps: int
    """Steps completed in this round, as `check` counts them."""

    def __init__(self, run: Rounds, given: World | AgentWorld) -> None:
        self.round = given.round
        self.rank = given.rank
        self.size = given.size
        self.reason = given.reason
        self.fence = given.fence
        self.store = given.store
        self.given = given
        self.steps = 0
        self.entered = False
        self.finished = False
        self._checked = False
        self._run = run

    def __repr__(self) -> str:
        return repr(self.given)

    def check(self) -> None:
        """Raise RoundOver if a newcomer waits, a member is lost or drained, or this process must go. Local and quick.

        Call it at the beginning of each step: the second call says that the first step was completed.
        """
        if self._checked:
            self.steps += 1
            self._run.progressed()
        self._checked = True
        self._run.check(self.round)

    def __enter__(self) -> LiveWorld:  # noqa: PYI034  Self came with 3.11.
        self.entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return self._run.end(self, error)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
