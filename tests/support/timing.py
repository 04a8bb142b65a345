"""Times that tests measure on a machine that does other things too."""

from __future__ import annotations


class TooSlow(AssertionError):
    """Something took longer than it may. The test is run again, twice at most: the machine may have been busy just then."""


def within(took_s: float, limit_s: float, about: object = "") -> None:
    """Fail if it took too long. Use it for what really took time, and plain `assert` for all else: that is never run again."""
    if took_s >= limit_s:
        raise TooSlow(f"it took {took_s:.3f} s, and may take {limit_s:g} s" + (f": {about}" if about else ""))
