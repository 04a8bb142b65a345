"""What the tests with torch have in common."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at now. Whoever takes it in between fails the test with 'address in use'."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
