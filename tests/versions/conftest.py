"""Fixtures of the tests in which versions meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.member_processes import ProcessSet


@pytest.fixture
def processes() -> Iterator[ProcessSet]:
    """Processes that end with the test; every world that they printed is checked."""
    with ProcessSet() as made:
        yield made
