"""Times that tests measure on a machine that does other things too."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

AGAIN = pytest.mark.flaky(reruns=2, only_rerun=["^TooSlow"])
"""The mark of a test that may be too slow. Only these have it: the plug-in asks a socket before each test that is marked."""


class TooSlow(AssertionError):
    """Something took longer than it may. The test is run again, twice at most: the machine may have been busy just then."""


def within(took_s: float, limit_s: float, about: object = "") -> None:
    """Fail if it took too long. Use it for what really took time, and plain `assert` for all else: that is never run again."""
    if took_s >= limit_s:
        raise TooSlow(f"it took {took_s:.3f} s, and may take {limit_s:g} s" + (f": {about}" if about else ""))


def mark_measuring(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that can raise `TooSlow`: their module or a fixture of theirs uses it, itself or through tests/support."""
    known: dict[int, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
            if any(_measures(one.__globals__, known) for one in (item.function, *fixtures) if hasattr(one, "__globals__")):
                item.add_marker(AGAIN)


def _measures(names: dict[str, Any], known: dict[int, bool]) -> bool:
    """Whether code with these global names can raise `TooSlow`. `known` are the answers so far."""
    if id(names) not in known:
        known[id(names)] = False  # The answer for modules that import each other.
        used = {str(getattr(one, "__module__", "")) for one in names.values()}
        known[id(names)] = any(one is within or one is TooSlow for one in names.values()) or any(
            _measures(vars(sys.modules[name]), known) for name in used if name.startswith("support.") and name != __name__
        )
    return known[id(names)]
