"""What the tests with torch have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support import torchrun_jobs


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at now. Whoever takes it in between fails the test with 'address in use'."""
    return torchrun_jobs.free_port()


@pytest.fixture(scope="session")
def nursery() -> Iterator[torchrun_jobs.Nursery]:
    """One import of torch for all agents of the session."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the extra `torch` brings it")
    made = torchrun_jobs.Nursery()
    yield made
    made.close()


@pytest.fixture
def job(nursery: torchrun_jobs.Nursery, tmp_path: Path) -> Iterator[Callable[..., torchrun_jobs.Job]]:
    """Makes jobs, and ends whatever of them is still there."""
    with ExitStack() as stack:

        def make(nnodes: str = "1:4", folder: str = "job", **options: Any) -> torchrun_jobs.Job:
            return stack.enter_context(torchrun_jobs.Job(tmp_path / folder, nnodes, nursery=nursery, **options))

        yield make
