"""Releases of this package beside each other: processes of the present one and of the previous one."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREVIOUS = "c0bad42"
"""The commit of release 0.1.0."""
PROGRAM = Path(__file__).with_name("release_process.py")


def previous_source(folder: Path) -> Path:
    """Unpack the source of the previous release into the folder and return it, as PYTHONPATH needs it."""
    archived = folder / "previous.tar"
    with archived.open("wb") as file:
        made = subprocess.run(
            ["git", "-C", ROOT, "archive", PREVIOUS, "src"], stdout=file, stderr=subprocess.PIPE, check=False
        )
    if made.returncode:
        pytest.skip(f"the repository does not hold the previous release ({PREVIOUS}): {made.stderr.decode().strip()}")
    with tarfile.open(archived) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


class Running:
    """A process of `release_process.py`."""

    def __init__(self, source: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, *words], env={**os.environ, "PYTHONPATH": str(source)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> list[str]:
        """Return the words of its next line; none: it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the input, on which the program ends, and wait for that."""
        try:
            self._process.communicate(timeout=30)
        finally:
            self._process.kill()


@contextmanager
def running(*processes: tuple[Path, tuple[str, ...]]) -> Iterator[list[Running]]:
    """Run processes of these releases until the end of the block."""
    started = [Running(source, *words) for source, words in processes]
    try:
        yield started
    finally:
        for one in started:
            one.close()
