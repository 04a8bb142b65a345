"""The table of the subcommands of `rdzv`, and the quick way to start those of agents: no typer, no rich, no other command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from .._version import __version__
from .output import say
from .words import read

GROUPS = {
    "Take part": {"join": "taking_part", "run": "taking_part", "demo": "demo"},
    "Look": {"runs": "viewer", "status": "viewer", "watch": "viewer", "journal": "journal", "doctor": "viewer"},
    "Operate": {"drain": "operator", "ban": "operator", "unban": "operator", "close": "operator", "adopt": "operator"},
    "Serve": {"serve": "serving", "dashboard": "dashboard"},
}
"""The commands as `rdzv --help` shows them, each with the module of this package that has it."""
MODULES = {name: module for group in GROUPS.values() for name, module in group.items()}
AGENTS = frozenset({"join", "run", "serve"})
"""Commands that start on every node of a job. A person waits for the others, and a shell completes them."""
_COMPLETE = "_RDZV_COMPLETE"
"""The variable by which a shell asks for completions."""


def command_of(name: str) -> Callable[..., Any]:
    """Import the command of that name."""
    found: Callable[..., Any] = getattr(import_module(f".{MODULES[name]}", __package__), name)
    return found


def needed(words: Sequence[str]) -> Iterable[str]:
    """Return the subcommands that a line needs: the one that it names, or all, to list them or to find a similar one."""
    called = next((word for word in words if not word.startswith("-")), "")
    return (called,) if called in MODULES and _COMPLETE not in os.environ else MODULES


def set_up_log(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")


def start(words: Sequence[str]) -> bool:
    """Run the command of an agent. Return False, and do nothing, if typer has to read the line."""
    if words == ["--version"]:
        say(__version__)
        return True
    if not words or words[0] not in AGENTS or _COMPLETE in os.environ:
        return False
    command = command_of(words[0])
    values = read(command, words[1:])
    if values is None:
        return False
    set_up_log(logging.WARNING)
    try:
        command(**values)
    except KeyboardInterrupt:  # As under typer.
        sys.exit(1)
    return True
