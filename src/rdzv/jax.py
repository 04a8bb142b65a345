"""JAX under `rdzv run`.

    import rdzv.jax

    rdzv.jax.initialize()

The call stands for `jax.distributed.initialize()`. It takes the coordinator's address, the number of processes and this
process's number from the variables of `rdzv run`, and asks no other launcher: under Slurm, JAX would take the ranks of
Slurm, which do not change when a node is lost. For code that calls `jax.distributed.initialize()` itself, it is enough to
import this module.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import jax

from .errors import SettingsError

__all__ = ["initialize"]

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"


def initialize(**options: Any) -> None:
    """Connect this process with the others of its round. The options are those of `jax.distributed.initialize`.

    An exception that the program does not catch then ends the process at once. JAX would first wait for the other
    processes, which wait for this one in their collectives, and `rdzv run` would learn of the failure minutes later.
    Raises SettingsError if `rdzv run` did not start the program.
    """
    jax.distributed.initialize(**{**arguments(os.environ), **options})
    _end_at_once_after_an_exception()


def arguments(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` that the environment gives. Raises SettingsError."""
    missing = [name for name in (ADDRESS, COUNT, NUMBER) if not environ.get(name)]
    if missing:
        raise SettingsError(f"{' and '.join(missing)} not set: start the program with `rdzv run ... -- python program.py`")
    devices = environ.get(DEVICES)
    return {
        "coordinator_address": environ[ADDRESS],
        "num_processes": int(environ[COUNT]),
        "process_id": int(environ[NUMBER]),
        "local_device_ids": [int(one) for one in devices.split(",")] if devices else None,
        "cluster_detection_method": "deactivate",
    }


def _end_at_once_after_an_exception() -> None:
    show, failed = sys.excepthook, []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(kind)
        show(kind, error, trace)

    def end() -> None:
        if failed:
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):  # It is closed, or nobody reads it any more.
                    stream.flush()
            os._exit(1)

    sys.excepthook = note
    # Exit handlers run in the reverse order: those of the program, then this one. JAX's, which waits, is not reached.
    atexit.register(end)


def _register() -> None:
    """Let `jax.distributed.initialize()` without arguments find out by itself that `rdzv run` started the process."""
    from jax._src.clusters import ClusterEnv  # noqa: PLC0415  JAX has no public name for it.

    class RdzvCluster(ClusterEnv):  # type: ignore[misc]
        """The way in which JAX asks about the launcher."""

        name = "rdzv"

        @classmethod
        def is_env_present(cls) -> bool:
            return "RDZV_ROUND" in os.environ and NUMBER in os.environ

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:  # noqa: ARG003
            return os.environ[ADDRESS]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ[COUNT])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ[NUMBER])

    # JAX asks the first one that is present, and Slurm's is there as well in a job of Slurm.
    kinds = ClusterEnv._cluster_types  # noqa: SLF001
    kinds.insert(0, kinds.pop(kinds.index(RdzvCluster)))


with suppress(ImportError, AttributeError):  # A JAX that has it elsewhere: `initialize` does not need it.
    _register()
