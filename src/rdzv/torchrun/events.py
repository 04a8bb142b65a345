"""torch's rendezvous events, and what the command line of torchrun tells about an agent."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event

logger = logging.getLogger("rdzv.torchrun")


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


def is_torchrun(arguments: Sequence[str]) -> bool:
    """Whether this is torchrun's command line, and not that of a program that uses torch's agent."""
    program = Path(arguments[0]) if arguments else Path()
    # `python -m torch.distributed.run` has the path of that module. Many a program of its own is called run.py, too.
    return program.name in ("torchrun", "torch.distributed.run") or program.parts[-3:] == ("torch", "distributed", "run.py")


def max_restarts(arguments: Sequence[str], environ: dict[str, str] | os._Environ[str]) -> int | None:
    """Return `--max-restarts` of torchrun's command line; None if the command is not torchrun's."""
    if not is_torchrun(arguments):
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
