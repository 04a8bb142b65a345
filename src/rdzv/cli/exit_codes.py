"""Exit codes of the commands. They are stable, so that scripts can rely on them; docs/cli.md lists them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from .. import errors
from ..errors import Closed, RdzvError
from .output import complain


class ExitCode(IntEnum):
    """Exit codes of every command; `rdzv run` ends with its program's code if the program ran to its end."""

    OK = 0
    FAILED = 1  # Another failure; the message on stderr says which.
    USAGE = 2  # An option, setting or endpoint is wrong, or differs from what the run agreed on.
    TIMEOUT = 3  # No round was sealed in time.
    CLOSED = 4  # The run is closed, and not because all members were done.
    UNREACHABLE = 5  # The engine cannot be reached, or another engine answers.
    REFUSED = 6  # An operator drained this member or banned this host, or the server and it do not trust each other.
    ABSENT = 7  # No such run, it has not ended, no member matches, it is closed already, or the host is not banned.


_ERRORS: dict[ExitCode, tuple[type[RdzvError], ...]] = {
    ExitCode.USAGE: (errors.SettingsError,),
    ExitCode.TIMEOUT: (errors.JoinTimeout,),
    ExitCode.CLOSED: (Closed,),
    ExitCode.UNREACHABLE: (errors.Unreachable, errors.EngineMoved),
    ExitCode.REFUSED: (errors.Drained, errors.Banned, errors.Untrusted),
    ExitCode.ABSENT: (errors.NotFound,),
}


def exit_code_of(error: RdzvError) -> ExitCode:
    """Return the exit code for an error. A run that was closed because all members were done is no failure."""
    if isinstance(error, Closed) and error.success:
        return ExitCode.OK
    return next((code for code, kinds in _ERRORS.items() if isinstance(error, kinds)), ExitCode.FAILED)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process with one sentence and an exit code, instead of a traceback, for every error of rdzv."""
    try:
        yield
    except RdzvError as error:
        code = exit_code_of(error)
        if code is not ExitCode.OK:
            complain(str(error))
        sys.exit(code)
    except asyncio.CancelledError:
        complain("ended at once, as the second signal asked")
        sys.exit(ExitCode.FAILED)
