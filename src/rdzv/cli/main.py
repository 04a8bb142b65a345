"""The command `rdzv`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from .._version import __version__
from ..aio import AsyncRendezvous
from ..config.endpoint import PORT, parse_host
from ..config.secret import put_aside
from ..config.settings import Settings
from ..engines.embedded.server import Server
from ..engines.embedded.trust import Trust
from ..errors import SettingsError, Unreachable
from ..member.notices import Notice
from . import launcher, operator, options, viewer
from .demo import Demo
from .doctor import doctor
from .exit_codes import ExitCode, sentences
from .output import Printer

PORT_MAX = 65535

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Elastic rendezvous for distributed training: who is in, who has which rank, and when that changes.",
)


_VIEWER = (viewer.status, viewer.watch, viewer.journal)
_OPERATOR = (operator.drain, operator.ban, operator.unban, operator.close, operator.adopt)
for command in (*_VIEWER, *_OPERATOR, doctor):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _shared(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log what happens to stderr")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show it and end")] = False,  # noqa: ARG001
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s: %(message)s")


def _maker(endpoint: str, run_id: str, nnodes: str, given: options.Given) -> Callable[..., AsyncRendezvous]:
    """Reads the options now; the member, which checks its settings, is made in the loop."""
    low, high = options.nodes(nnodes)

    def make(observer: Callable[[Notice], None] | None) -> AsyncRendezvous:
        return AsyncRendezvous(endpoint, run_id=run_id, min_nodes=low, max_nodes=high, observer=observer, **given)

    return make


@app.command()
@options.with_settings
def join(
    endpoint: options.Endpoint,
    run_id: options.RunId,
    nnodes: options.Nodes,
    given: options.Given,
    json: options.Json = False,
) -> None:
    """Be a member of a run: a line per world and per notice, until SIGTERM or the run is over.

    Exit codes: 0 left or all done, 2 wrong usage or settings, 3 no round in time, 4 closed, 5 engine unreachable,
    6 drained, banned or not trusted, 1 anything else.
    """
    make = _maker(endpoint, run_id, nnodes, given)
    # Its lines are the notices: not twice.
    logging.getLogger("rdzv.notices").disabled = True
    sys.exit(asyncio.run(launcher.join(make, Printer(json))))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@options.with_settings
def run(
    context: typer.Context,
    endpoint: options.Endpoint,
    run_id: options.RunId,
    nnodes: options.Nodes,
    given: options.Given,
    stop_s: Annotated[float, typer.Option("--stop-timeout", help="seconds from SIGTERM to SIGKILL of the program")] = 30.0,
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="how often a program that failed is tried again")] = 0,
) -> None:
    """Run a program, given after --, in each world; it is stopped and started again when the round changes.

    It finds RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RDZV_ROUND, RDZV_RUN_ID and RDZV_REASON in its environment, and
    RDZV_TOKEN no more.
    Ends with the program's exit code (128 + n if signal n ended it), or with one of `rdzv join`'s.
    """
    command = context.args
    if not command:
        raise SettingsError("rdzv run needs a program: rdzv run ENDPOINT --run-id R --nnodes 2:4 -- python train.py")
    if shutil.which(command[0]) is None:
        # Said before we join: the others would form a round with us only to lose us again.
        raise SettingsError(f"program {command[0]!r} cannot be run: it is not found, or is not executable")
    make = _maker(endpoint, run_id, nnodes, given)
    program = launcher.Launcher(make, command, stop_s=stop_s, max_restarts=max_restarts)
    sys.exit(asyncio.run(program.run()))


@app.command()
def demo() -> None:
    """Show the whole job on this machine: a server and four members; one is killed, the rest re-form, a late one comes in."""
    with sentences():
        sys.exit(asyncio.run(_demo()))


async def _demo() -> int:
    return await Demo(Console()).play()


@app.command()
@options.with_settings
def serve(
    given: options.Given,
    bind: Annotated[str, typer.Option("--bind", help="HOST:PORT to listen at; '*' for all interfaces")] = f"127.0.0.1:{PORT}",
) -> None:
    """Serve runs from this process's memory, until SIGTERM. Members go on undisturbed if it is restarted at the same place."""
    put_aside(os.environ)
    settings = Settings.make("rdzv://", run_id="serve", min_nodes=1, max_nodes=1, is_host=True, **given)
    sys.exit(asyncio.run(_serve(*_parse_bind(bind), Trust.of(settings))))


def _parse_bind(bind: str) -> tuple[str, int]:
    """Host ('' for all interfaces) and port (0: any free one)."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise SettingsError(f"--bind is {bind!r}: it must be HOST:PORT, such as 127.0.0.1:{PORT} or *:{PORT}")
    return ("" if host == "*" else parse_host(host.strip("[]"))), int(port)


async def _serve(host: str, port: int, trust: Trust) -> int:
    stop = launcher.Stop()
    server = Server((host, port), trust=trust)
    try:
        await server.start()
    except OSError as error:
        raise Unreachable(f"{host or '*'}:{port}", f"cannot listen there: {error.strerror or error}") from None
    # This process only serves: what is here by now stays, and thousands of connections are no reason to look through it all.
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    typer.echo(f"serving at {host or '*'}:{server.port}")
    await stop.unless(asyncio.Event().wait())
    await server.stop()
    return ExitCode.OK
