"""What the tests with torch have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import agents
import pytest


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at now. Whoever takes it in between fails the test with 'address in use'."""
    return agents.free_port()


@pytest.fixture(scope="session")
def nursery() -> Iterator[agents.Nursery]:
    """One import of torch for all agents of the session."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the extra `torch` brings it")
    made = agents.Nursery()
    yield made
    made.close()


@pytest.fixture
def job(nursery: agents.Nursery, tmp_path: Path) -> Iterator[Callable[..., agents.Job]]:
    """Makes jobs, and ends whatever of them is still there."""
    with ExitStack() as stack:

        def make(nnodes: str = "1:4", folder: str = "job", **options: Any) -> agents.Job:
            return stack.enter_context(agents.Job(tmp_path / folder, nnodes, nursery=nursery, **options))

        yield make
