"""Real processes on networks of hosts."""

from __future__ import annotations

import pytest

from support.member_processes import ProcessSet


@pytest.fixture
def processes(network):
    """Processes that end before the network does, because they run on its hosts."""
    with ProcessSet() as made:
        yield made
