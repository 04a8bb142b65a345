"""Durations as people write and read them: 90, 90s, 15m, 2h, 1d."""

from __future__ import annotations

import re

_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd]?)")


def read_duration(text: str) -> float:
    """Return the seconds of a text such as 2h; a number alone is seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration: write 90s, 15m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def show_duration(seconds: float) -> str:
    """Return the duration in the largest unit of which it is a whole number: 2 h, 90 min, 10 s."""
    for unit, length in _UNITS.items():
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {'min' if unit == 'm' else unit}"
    return f"{seconds:g} s"
