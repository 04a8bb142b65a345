"""`rdzv join` and `rdzv run`: the commands that take part in a run."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from typing import Annotated

from ..aio import AsyncRendezvous
from ..config import auto_endpoint
from ..errors import SettingsError
from ..launch.nproc import Devices, count
from ..launch.output import log_folder
from ..member.journal_file import state_folder
from ..member.notices import Notice
from . import launcher, options
from .words import Option


def _maker(endpoint: str, run_id: str, nnodes: str, given: options.Given) -> launcher.MemberFactory:
    """Read the options now; make the member, which checks its settings, later in the event loop."""
    if not re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", nnodes):
        raise SettingsError(f"--nnodes is {nnodes!r}: it must be a number or min:max of 1 and more, such as 2:4")
    low, _, high = nnodes.partition(":")
    if not endpoint and not run_id and (high or low) == "1":
        run_id = f"alone-{secrets.token_hex(4)}"  # Nobody else must find it.
    if not run_id and endpoint.strip() not in ("", auto_endpoint.AUTO):
        raise SettingsError("--run-id is not given: name the run; nodes with the same id meet")

    def make(observer: Callable[[Notice], None] | None) -> AsyncRendezvous:
        return AsyncRendezvous(endpoint, run_id=run_id, min_nodes=low, max_nodes=high or low, observer=observer, **given)

    return make


@options.with_settings
def join(
    *,
    endpoint: options.MemberEndpoint = "",
    nnodes: options.Nodes,
    given: options.Given,
    run_id: options.RunId = "",
    json: options.Json = False,
) -> None:
    """Join a run as a member and print a line per event, until SIGTERM or the run is over.

    Exit codes: 0 left, or all members done, 2 wrong usage or settings, 3 no round in time, 4 closed, 5 engine unreachable,
    6 drained, banned or not trusted, 1 anything else.
    """
    make = _maker(endpoint, run_id, nnodes, given)
    sys.exit(asyncio.run(launcher.join(make, launcher.Printer(json))))


@options.with_settings
def run(
    *,
    program: list[str],
    endpoint: options.MemberEndpoint = "",
    nnodes: options.Nodes,
    given: options.Given,
    run_id: options.RunId = "",
    nproc: Annotated[
        str, Option("--nproc-per-node", metavar="N|auto|gpu|cpu", help="how many workers this node runs")
    ] = "1",
    role: Annotated[str, Option("--role", help="the role of this node's workers (ROLE_NAME)")] = "default",
    max_restarts: Annotated[int, Option("--max-restarts", min=0, help="how often failed workers are started again")] = 0,
    stop_s: Annotated[
        float, Option("--stop-timeout", min=0, help="seconds from SIGTERM to stack dump and SIGKILL of a worker")
    ] = 30.0,
    log_dir: Annotated[str, Option("--log-dir", metavar="DIR", help="write each worker's output to files there")] = "",
    tee: Annotated[bool, Option("--tee", help="show the output on the console too, beside --log-dir")] = False,
    stay: Annotated[
        bool, Option("--stay", help="keep the workers through all rounds: the program uses rdzv.torch.rounds()")
    ] = False,
    prefix: Annotated[
        bool | None, Option("--prefix/--no-prefix", help="begin lines with [rank N]; default: with several workers")
    ] = None,
) -> None:
    """Run a program, given after --, in each world, with one or more workers per node. It is restarted when the round changes.

    The workers find the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on), of JAX
    (JAX_COORDINATOR_ADDRESS) and RDZV_ROUND, RDZV_FENCE, RDZV_RUN_ID, RDZV_REASON and RDZV_WORKER, and no RDZV_TOKEN or
    RDZV_ETCD_PASSWORD. Ends with the exit code of the first worker that failed (128 + n if signal n ended it), or with
    one of `rdzv join`.
    """
    if not program:
        raise SettingsError("rdzv run needs a program: rdzv run ENDPOINT --run-id R --nnodes 2:4 -- python train.py")
    if shutil.which(program[0]) is None:
        # Checked before the join: the others would form a round with this member and lose it at once.
        raise SettingsError(f"program {program[0]!r} cannot be run: it is not found, or is not executable")
    if tee and not log_dir:
        raise SettingsError("--tee is given without --log-dir: without files, the output is on the console anyway")
    workers, folder = count(nproc, Devices.here()), log_folder(log_dir)
    make = _maker(endpoint, run_id, nnodes, {"journal_dir": folder or state_folder(os.environ), **given})
    chosen = launcher.RunOptions(program, workers, role, stop_s, max_restarts, folder, tee, prefix)
    if not stay:
        sys.exit(asyncio.run(launcher.run(make, chosen)))
    from .staying import stay_in_rounds  # noqa: PLC0415  Others do without it.

    sys.exit(asyncio.run(launcher.run(make, chosen, stay_in_rounds)))
