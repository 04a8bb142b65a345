"""Real processes on networks of hosts, as the tests of faults have them."""

from __future__ import annotations

import pytest


@pytest.fixture
def stage(network):
    """Ends before the network does, because its processes live there."""
    from support.member_processes import Stage

    with Stage() as made:
        yield made
