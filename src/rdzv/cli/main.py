"""The command `rdzv` as typer knows it, for all command lines that `start.py` leaves to it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.markup import escape

from .._version import __version__
from . import completion
from .command import SCHEMES, Command, Group, ProgramCommand
from .start import GROUPS, MODULES, command_of, set_up_log
from .words import PROGRAM, Argument, word_of


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _shared(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log events to stderr")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")] = False,  # noqa: ARG001
) -> None:
    set_up_log(logging.INFO if verbose else logging.WARNING)


def make_app(names: Iterable[str] = MODULES) -> typer.Typer:
    """Return the command line with these subcommands."""
    app = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        help="Elastic rendezvous for distributed training: who is in, who has which rank, and when that changes.",
        epilog="An endpoint says where runs are kept: " + "; ".join(f"{text} ({meaning})" for text, meaning in SCHEMES) + ".",
    )
    app.callback()(_shared)
    wanted = frozenset(names)
    for panel, commands in GROUPS.items():
        for name in commands:
            if name in wanted:
                command = command_of(name)
                kind = ProgramCommand if PROGRAM in inspect.signature(command).parameters else Command
                app.command(name, cls=kind, rich_help_panel=panel)(_for_typer(command))
    return app


def _for_typer(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with typer's own descriptions of its parameters, and the program from typer's context."""

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        if context in values:
            values[PROGRAM] = values.pop(context).args
        command(**values)

    context = "context"
    parameters = []
    for name, one in inspect.signature(command).parameters.items():
        if name == PROGRAM:
            parameters.append(one.replace(name=context, annotation=typer.Context))
            continue
        found = word_of(one)
        assert found is not None, f"{name} of {command} has no description"
        kind, word = found
        # typer reads brackets as markup, and would not show them.
        details = {**word.details, "help": escape(word.details["help"])}
        if "autocompletion" in details:
            details["autocompletion"] = getattr(completion, details["autocompletion"])
        make = typer.Argument if isinstance(word, Argument) else typer.Option
        # Annotated at run time: the type is a value here.
        parameters.append(one.replace(annotation=Annotated[kind, make(*word.names, **details)]))
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped
