"""The one way out of every command: what others wrote reaches a terminal without escapes, line breaks or NULs."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec

from ..printable import clean

_NOT_PRINTABLE = re.compile("[\x7f-\U0010ffff]")


def json_text(value: Any) -> str:
    """Return one line of JSON. Characters that are not printable are escaped, so that nothing is lost for programs."""
    # JSON itself escapes only the first 32 control characters.
    return _NOT_PRINTABLE.sub(_escape, msgspec.json.encode(value).decode())


def _escape(found: re.Match[str]) -> str:
    sign = found[0]
    if sign.isprintable():
        return sign
    units = sign.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def say(text: str) -> None:
    """Print lines to stdout. Each is flushed, because its reader may wait for it."""
    sys.stdout.write("".join(f"{clean(line)}\n" for line in text.split("\n")))
    sys.stdout.flush()


def complain(sentence: str) -> None:
    """Print one line to stderr."""
    sys.stderr.write(f"rdzv: {clean(sentence)}\n")
