"""Real processes on networks of hosts, as the tests of faults have them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("faults", "etcd"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture
def stage(network):
    """Ends before the network does, because its processes live there."""
    from procs import Stage

    with Stage() as made:
        yield made
