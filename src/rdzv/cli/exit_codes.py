"""How a command ends: stable, so that scripts can tell. A table of these is in the documentation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from ..errors import (
    Banned,
    Closed,
    Drained,
    EngineMoved,
    JoinTimeout,
    NotFound,
    RdzvError,
    SettingsError,
    Unreachable,
    Untrusted,
)


class ExitCode(IntEnum):
    """Exit codes of every command; `rdzv run` ends with its program's code if the program ran to its end."""

    OK = 0
    FAILED = 1
    """Something else went wrong; the sentence on stderr says what."""
    USAGE = 2
    """An option, setting or endpoint is wrong, or differs from what the run agreed on."""
    TIMEOUT = 3
    """No round was sealed in time."""
    CLOSED = 4
    """The run is closed, and not because all were done."""
    UNREACHABLE = 5
    """The engine cannot be reached, or another one answers."""
    REFUSED = 6
    """An operator drained this member or banned this host, or the server and we do not trust each other."""
    ABSENT = 7
    """The engine keeps no such run, or nobody of that name is in it."""


_CODES: tuple[tuple[type[RdzvError], ExitCode], ...] = (
    (SettingsError, ExitCode.USAGE),
    (JoinTimeout, ExitCode.TIMEOUT),
    (Closed, ExitCode.CLOSED),
    (Unreachable, ExitCode.UNREACHABLE),
    (EngineMoved, ExitCode.UNREACHABLE),
    (Drained, ExitCode.REFUSED),
    (Banned, ExitCode.REFUSED),
    (Untrusted, ExitCode.REFUSED),
    (NotFound, ExitCode.ABSENT),
)


def exit_code_of(error: RdzvError) -> ExitCode:
    """The exit code for an error; a run that was closed because all were done is no failure."""
    if isinstance(error, Closed) and error.success:
        return ExitCode.OK
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


@contextmanager
def sentences() -> Iterator[None]:
    """One sentence and a code instead of a traceback, for everything that is not a defect."""
    try:
        yield
    except RdzvError as error:
        code = exit_code_of(error)
        if code is not ExitCode.OK:
            sys.stderr.write(f"rdzv: {error}\n")
        sys.exit(code)
    except asyncio.CancelledError:
        sys.stderr.write("rdzv: ended at once, as the second signal asked\n")
        sys.exit(ExitCode.FAILED)
