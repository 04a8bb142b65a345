"""Something that takes long and that all jobs of one pytest share: the first job that needs it makes it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled. If that failed in another job, this one tries again, and fails by itself."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    shared.mkdir(exist_ok=True)
    done = shared / "done"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder = shared / f"made-{os.getpid()}"
            folder.mkdir()
            make(folder)
            done.write_text(str(folder))
    return Path(done.read_text())
