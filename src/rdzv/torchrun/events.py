"""torch's rendezvous events, and what is said on stderr while a run waits."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event

from ..core.status import Status
from ..errors import RdzvError

logger = logging.getLogger("rdzv.torchrun")

SAY_EVERY_S = 30.0
"""Seldom enough for a log that is kept, often enough that nobody takes a waiting agent for a stuck one."""
CALM = 20
"""A spare may wait for days beside a round that runs well; it says so only every so many times."""
_NAMES_MAX = 8


class Recorder:
    """Tells torch's event handlers what became of a rendezvous, in the fields that torch's own backends fill."""

    def __init__(self, backend: str, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id

    def running(self, message: str, rank: int | None = None, bootstrap: str = "") -> None:
        """On the way, or formed."""
        self._record(message, NodeState.RUNNING, rank, bootstrap)

    def succeeded(self, message: str) -> None:
        """We leave, and nothing went wrong."""
        self._record(message, NodeState.SUCCEEDED)

    def failed(self, message: str) -> None:
        """The agent is about to get an exception."""
        self._record(message, NodeState.FAILED)

    def _record(self, message: str, state: NodeState, rank: int | None = None, bootstrap: str = "") -> None:
        try:
            construct_and_record_rdzv_event(
                run_id=self._run_id,
                message=message,
                node_state=state,
                name=self._backend,
                pid=os.getpid(),
                master_endpoint=bootstrap,
                rank=rank,
            )
        except Exception:
            # Somebody's event handler; it must not end an agent whose workers are well.
            logger.exception("a rendezvous event could not be recorded: %s", message)


class Waiting:
    """Once it `lasts`, and while the block runs, says now and then what the run waits for."""

    def __init__(self, status: Callable[[], Status], limit_s: float, every_s: float = 0.0) -> None:
        """`limit_s`: for how long a first round is waited for."""
        self._status = status
        self._limit_s = limit_s
        self._every_s = every_s or SAY_EVERY_S
        self._over = threading.Event()
        self._began_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Waiting:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not joined: it may be asking an engine that does not answer, and then has nothing more to say.
        self._over.set()

    def lasts(self) -> None:
        """It is not over yet. Most are at once, and need no thread that could speak."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._speak, name="rdzv waiting", daemon=True)
            self._thread.start()

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_at

    def _speak(self) -> None:
        calm = 0
        while not self._over.wait(self._every_s):
            try:
                status = self._status()
                text = describe(status, self._limit_s - self._waited_s())
                calm = calm + 1 if status.phase == "sealed" else 0
            except RdzvError as error:
                text = str(error)
            except RuntimeError:
                return  # The interpreter is about to end.
            if (calm == 0 or calm % CALM == 1) and not self._over.is_set():
                logger.warning("waiting for a round since %.0f s: %s", self._waited_s(), text)


def describe(status: Status, left_s: float) -> str:
    """How many are here, what is waited for, who is missing or late, by name, and what happens if nobody comes."""
    parts = [str(status)]
    for state, word in (("lost", "lost"), ("straggling", "still stopping their workers")):
        names = [member.name for member in status.of(state)]
        if names:
            more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
            parts.append(f"{word}: {', '.join(names[:_NAMES_MAX])}{more}")
    if status.ready < status.min_nodes:
        forever = "a run that had a round is waited for without limit"
        parts.append(forever if status.round else f"gives up in {max(left_s, 0.0):.0f} s (join_timeout)")
    return "; ".join(parts)


def max_restarts(arguments: Sequence[str], environ: dict[str, str] | os._Environ[str]) -> int | None:
    """How often torchrun will restart workers, as far as its command line tells; None: this is not torchrun's."""
    program = Path(arguments[0]).name if arguments else ""
    if program not in ("torchrun", "run.py", "torch.distributed.run"):
        return None
    value = environ.get("PET_MAX_RESTARTS", "0")
    for index, argument in enumerate(arguments):
        name, equals, rest = argument.partition("=")
        if name in ("--max-restarts", "--max_restarts"):
            value = rest if equals else "".join(arguments[index + 1 : index + 2])
    try:
        return int(value)
    except ValueError:
        return None


def warn_if_a_loss_would_end_it(min_nodes: int, max_nodes: int) -> None:
    """A failed worker is judged before the rendezvous is asked, so without restarts a loss ends every survivor."""
    if min_nodes < max_nodes and max_restarts(sys.argv, os.environ) == 0:
        logger.warning(
            "--nnodes=%s:%s is elastic, but --max-restarts is 0: when a node is lost, the workers of the others fail in their "
            "next collective and torchrun gives up; give --max-restarts=100, say",
            min_nodes,
            max_nodes,
        )
