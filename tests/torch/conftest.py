"""Fixtures of the tests of processes that stay."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.staying import StayingJob


@pytest.fixture
def staying(tmp_path: Path) -> Iterator[Callable[..., StayingJob]]:
    """Makes jobs, and ends their processes."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the extra `torch` brings it")
    with ExitStack() as stack:
        yield lambda *args, **plan: stack.enter_context(StayingJob(tmp_path, *args, **plan))
