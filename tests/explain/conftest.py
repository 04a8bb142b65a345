"""Networks of hosts, as the tests of faults have them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "faults"))


@pytest.fixture
def network():
    from hosts import Network, why_not

    reason = why_not()
    if reason:
        pytest.skip(f"NOT TESTED on networks of several hosts: {reason}")
    with Network() as made:
        yield made


@pytest.fixture
def stage(network):
    """Ends before the network does, because its processes live there."""
    from procs import Stage

    with Stage() as made:
        yield made
