"""torch's rendezvous events, and the messages on stderr while a run waits."""

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

REPORT_EVERY_S = 30.0  # Rare enough for a log that is kept, often enough that a waiting agent does not look stuck.
SPARE_REPORTS_EVERY = 20
"""A spare may wait for days beside a round that runs well, so it logs only one in this many reports."""
_NAMES_MAX = 8


class Recorder:
    """Records rendezvous events for torch's event handlers, in the fields that torch's own backends fill."""

    def __init__(self, backend: str, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id

    def record(self, message: str, state: NodeState = NodeState.RUNNING, rank: int | None = None, bootstrap: str = "") -> None:
        """Record a step or a formed round (RUNNING), a clean leave (SUCCEEDED), or a failure of the agent (FAILED)."""
        try:
            construct_and_record_rdzv_event(
                run_id=self._run_id, message=message, node_state=state, name=self._backend, pid=os.getpid(),
                master_endpoint=bootstrap, rank=rank,
            )  # fmt: skip
        except Exception:
            # A user's event handler failed. It must not end an agent whose workers are well.
            logger.exception("a rendezvous event could not be recorded: %s", message)


class WaitReporter:
    """Logs every `every_s` what a run waits for, from `start` to the end of the block."""

    def __init__(self, status: Callable[[], Status], limit_s: float, every_s: float = 0.0) -> None:
        """`limit_s` is the time limit for a first round."""
        self._status = status
        self._limit_s = limit_s
        self._every_s = every_s or REPORT_EVERY_S
        self._stopped = threading.Event()
        self._began_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> WaitReporter:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The thread is not joined: it may be waiting for an engine that does not answer, and logs nothing more then.
        self._stopped.set()

    def start(self) -> None:
        """Start the thread. Called once a join takes time: most do not, and need no thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._report, name="rdzv waiting", daemon=True)
            self._thread.start()

    def _report(self) -> None:
        as_spare = 0
        while not self._stopped.wait(self._every_s):
            waited_s = time.monotonic() - self._began_at
            try:
                status = self._status()
                text = describe(status, self._limit_s - waited_s)
                as_spare = as_spare + 1 if status.phase == "sealed" else 0
            except RdzvError as error:
                text = str(error)
            except RuntimeError:
                return  # The interpreter is shutting down.
            if (as_spare == 0 or as_spare % SPARE_REPORTS_EVERY == 1) and not self._stopped.is_set():
                logger.warning("waiting for a round since %.0f s: %s", waited_s, text)


def describe(status: Status, left_s: float) -> str:
    """Describe what a run waits for: the count, names of lost and late members, and what happens if nobody comes."""
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
    """Return `--max-restarts` of torchrun's command line; None if the command is not torchrun's."""
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


def warn_without_restarts(min_nodes: int, max_nodes: int) -> None:
    """Warn if an elastic run has no restarts: torch's agent looks at failed workers before it asks the rendezvous."""
    if min_nodes < max_nodes and max_restarts(sys.argv, os.environ) == 0:
        logger.warning(
            "--nnodes=%s:%s is elastic, but --max-restarts is 0: when a node is lost, the workers of the others fail in their "
            "next collective and torchrun gives up; give --max-restarts=100, say", min_nodes, max_nodes,
        )  # fmt: skip
