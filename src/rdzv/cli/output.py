"""The one way out of every command: what others wrote reaches a terminal without escapes, line breaks or NULs."""

from __future__ import annotations

import codecs
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec

from ..printable import clean

_NOT_PRINTABLE = re.compile("[\x7f-\U0010ffff]")
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of writing to a full disk, or to a terminal that is gone. All other errors of the system are bugs here."""


def json_text(value: Any) -> str:
    """Return one line of JSON. Characters that are not printable are escaped, so that nothing is lost for programs."""
    # JSON itself escapes only the first 32 control characters.
    return _NOT_PRINTABLE.sub(_printable, msgspec.json.encode(value).decode())


def _printable(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else _escaped(found[0])


def _escaped(text: str) -> str:
    """Return the text as escapes of JSON."""
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def say(text: str) -> None:
    """Print lines to stdout. Each is flushed, because its reader may wait for it."""
    sys.stdout.write("".join(f"{clean(line)}\n" for line in text.split("\n")))
    sys.stdout.flush()


def complain(sentence: str) -> None:
    """Print one line to stderr."""
    sys.stderr.write(f"rdzv: {clean(sentence)}\n")


def _escape_unknown(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return _escaped(error.object[error.start : error.end]), error.end


@contextmanager
def usable_stdout() -> Iterator[None]:
    """Let neither a name that the encoding of stdout does not have nor a full disk nor a closed stream cause a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The caller has closed it, as some starters of daemons do.
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  For as long as the process lives.
    if isinstance(sys.stdout, TextIOWrapper):
        # Python's own "backslashreplace" writes \xe9, which is no JSON.
        codecs.register_error("rdzv-escape", _escape_unknown)
        sys.stdout.reconfigure(errors="rdzv-escape")
    try:
        yield
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        complain(f"the output cannot be written: {error.strerror}")
        sys.exit(1)
