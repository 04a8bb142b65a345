"""The command `rdzv`: all its subcommands, and those that take part in a run or serve one."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .._version import __version__
from ..aio import AsyncRendezvous
from ..config.endpoint import PORT, parse_bind
from ..config.secret import put_aside
from ..config.settings import Settings
from ..engines.embedded.hosting import check_name
from ..engines.embedded.limits import give_back_freed_memory
from ..engines.embedded.server import Server
from ..engines.embedded.trust import Trust
from ..errors import SettingsError, Unreachable
from ..launch.nproc import Devices, count
from ..launch.output import log_folder
from ..member.journal_file import state_folder
from ..member.notices import Notice
from . import dashboard, journal, launcher, operator, options, viewer
from .command import SCHEMES, Command, Group, ProgramCommand
from .demo import Demo
from .exit_codes import ExitCode, exit_on_error
from .staying import stay_in_rounds

if TYPE_CHECKING:
    from ..web.serving import WebServer

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Elastic rendezvous for distributed training: who is in, who has which rank, and when that changes.",
    epilog="An endpoint says where runs are kept: " + "; ".join(f"{text} ({meaning})" for text, meaning in SCHEMES) + ".",
)


_OPERATOR = (operator.drain, operator.ban, operator.unban, operator.close, operator.adopt)
for _command in (viewer.runs, viewer.status, viewer.watch, journal.journal, dashboard.dashboard, *_OPERATOR, viewer.doctor):
    app.command()(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _shared(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log events to stderr")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")] = False,  # noqa: ARG001
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s: %(message)s")


def _maker(endpoint: str, run_id: str, nnodes: str, given: options.Given) -> launcher.MemberFactory:
    """Read the options now; make the member, which checks its settings, later in the event loop."""
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", nnodes):
        raise SettingsError(f"--nnodes is {nnodes!r}: it must be a number or min:max, such as 2:4")
    low, _, high = nnodes.partition(":")
    if not endpoint and not run_id and (high or low) == "1":
        run_id = f"alone-{secrets.token_hex(4)}"  # Nobody else must find it.

    def make(observer: Callable[[Notice], None] | None) -> AsyncRendezvous:
        return AsyncRendezvous(endpoint, run_id=run_id, min_nodes=low, max_nodes=high or low, observer=observer, **given)

    return make


@app.command()
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


@app.command(cls=ProgramCommand)
@options.with_settings
def run(
    context: typer.Context,
    *,
    endpoint: options.MemberEndpoint = "",
    nnodes: options.Nodes,
    given: options.Given,
    run_id: options.RunId = "",
    nproc: Annotated[
        str, typer.Option("--nproc-per-node", metavar="N|auto|gpu|cpu", help="how many workers this node runs")
    ] = "1",
    role: Annotated[str, typer.Option("--role", help="the role of this node's workers (ROLE_NAME)")] = "default",
    max_restarts: Annotated[int, typer.Option("--max-restarts", min=0, help="how often failed workers are started again")] = 0,
    stop_s: Annotated[
        float, typer.Option("--stop-timeout", min=0, help="seconds from SIGTERM to stack dump and SIGKILL of a worker")
    ] = 30.0,
    log_dir: Annotated[str, typer.Option("--log-dir", metavar="DIR", help="write each worker's output to files there")] = "",
    tee: Annotated[bool, typer.Option("--tee", help="show the output on the console too, beside --log-dir")] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="keep the workers through all rounds: the program uses rdzv.torch.rounds()")
    ] = False,
    prefix: Annotated[
        bool | None, typer.Option("--prefix/--no-prefix", help="begin lines with [rank N]; default: with several workers")
    ] = None,
) -> None:
    """Run a program, given after --, in each world, with one or more workers per node. It is restarted when the round changes.

    The workers find the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on), of JAX
    (JAX_COORDINATOR_ADDRESS) and RDZV_ROUND, RDZV_FENCE, RDZV_RUN_ID and RDZV_REASON, and no RDZV_TOKEN or
    RDZV_ETCD_PASSWORD. Ends with the exit code of the first worker that failed (128 + n if signal n ended it), or with
    one of `rdzv join`.
    """
    command = context.args
    if not command:
        raise SettingsError("rdzv run needs a program: rdzv run ENDPOINT --run-id R --nnodes 2:4 -- python train.py")
    if shutil.which(command[0]) is None:
        # Checked before the join: the others would form a round with this member and lose it at once.
        raise SettingsError(f"program {command[0]!r} cannot be run: it is not found, or is not executable")
    if tee and not log_dir:
        raise SettingsError("--tee is given without --log-dir: without files, the output is on the console anyway")
    workers, folder = count(nproc, Devices.here()), log_folder(log_dir)
    make = _maker(endpoint, run_id, nnodes, {"journal_dir": folder or state_folder(os.environ), **given})
    chosen = launcher.RunOptions(command, workers, role, stop_s, max_restarts, folder, tee, prefix)
    sys.exit(asyncio.run(launcher.run(make, chosen, stay_in_rounds if stay else None)))


@app.command()
def demo() -> None:
    """Show rdzv on this machine: a server and four members; one is killed, the others re-form, a late one joins."""
    with exit_on_error():
        sys.exit(asyncio.run(Demo(Console()).run()))


@app.command()
@options.with_settings
def serve(
    given: options.Given,
    bind: Annotated[str, typer.Option("--bind", help="HOST:PORT to listen at; '*' for all interfaces")] = f"127.0.0.1:{PORT}",
    http: dashboard.Http = "",
    http_name: dashboard.HttpName = None,
    allow_actions: dashboard.AllowActions = False,
    actions_token_file: dashboard.ActionsTokenFile = None,
) -> None:
    """Keep runs in the memory of this process, until SIGTERM. Members stay in their round if it is restarted in place."""
    put_aside(os.environ)
    settings = Settings.make("rdzv://", run_id="serve", min_nodes=1, max_nodes=1, is_host=True, **given)
    actions = dashboard.actions_secret(settings, allow_actions, actions_token_file)
    where = dashboard.parse_http(http) if http else None
    page = partial(dashboard.page_of, settings=settings, where=where, actions=actions, names=http_name or []) if where else None
    if settings.place:
        check_name(settings.place)
    sys.exit(asyncio.run(_serve(_parse_bind(bind), Trust.of(settings), settings.place, page)))


def _parse_bind(bind: str) -> tuple[str, int]:
    try:
        return parse_bind(bind)
    except ValueError as error:
        raise SettingsError(f"--bind is wrong: {error}; it must be HOST:PORT, such as 127.0.0.1:{PORT} or *:{PORT}") from None


async def _serve(bind: tuple[str, int], trust: Trust, place: str, make_page: Callable[[Server], WebServer] | None) -> int:
    stop, (host, port) = launcher.StopSignal(), bind
    server = Server(bind, trust=trust, promised=place)
    try:
        await server.start()
    except OSError as error:
        raise Unreachable(f"{host or '*'}:{port}", f"cannot listen there: {error.strerror or error}") from None
    # This process only serves. Its modules stay for ever, and without this each of thousands of connections would make the
    # garbage collector scan them again.
    give_back_freed_memory()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    typer.echo(f"serving at {host or '*'}:{server.port}")
    page = make_page(server) if make_page is not None else None
    if page is not None:
        await dashboard.open_page(page)
    await stop.run_until(server.retired.wait())
    if page is not None:
        await page.stop()
    await server.stop()
    return ExitCode.UNREACHABLE if server.is_retired else ExitCode.OK  # The server has logged why.


_GROUPS = {
    "Take part": ("join", "run", "demo"),
    "Look": ("runs", "status", "watch", "journal", "doctor"),
    "Operate": ("drain", "ban", "unban", "close", "adopt"),
    "Serve": ("serve", "dashboard"),
}  # The commands as `rdzv --help` shows them.
_PANELS = {command: group for group, commands in _GROUPS.items() for command in commands}


def _name(command: typer.models.CommandInfo) -> str:
    return str(getattr(command.callback, "__name__", command.name))


app.registered_commands.sort(key=lambda one: list(_PANELS).index(_name(one)))
for _info in app.registered_commands:
    _info.rich_help_panel = _PANELS[_name(_info)]
    if _info.cls is not ProgramCommand:
        _info.cls = Command
