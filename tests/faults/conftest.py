"""Networks of hosts, for tests that need some; where none can be made these are skipped, and say why."""

from __future__ import annotations

import pytest
from hosts import Network, why_not


@pytest.fixture(scope="session")
def network_allowed():
    reason = why_not()
    if reason:
        pytest.skip(f"NOT TESTED on networks of several hosts: {reason}")


@pytest.fixture
def network(network_allowed):
    with Network() as made:
        yield made
