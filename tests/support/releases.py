"""Releases of this package beside each other: processes of today's code and of the previous release in one run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support.member_processes import LONG_S, QUICK, Line, Process, ProcessSet, is_world

ROOT = Path(__file__).parents[2]
PREVIOUS = max((ROOT / "tests" / "golden").iterdir(), key=lambda path: [int(part) for part in path.name.split(".")])
"""The previous release: the newest one whose golden bytes are kept. Beside them stands the id of its commit."""
PROGRAM = Path(__file__).with_name("release_process.py")
PRETENDED = Path(__file__).with_name("pretended_release.py")
NEW, OLD = "new", "old"
OTHER = {NEW: OLD, OLD: NEW}
Release = str | tuple[str, str, str]
"""NEW, OLD, or a later version that is made up: a module of the package, a line of it, and the line in that version."""
RUN = "job"


def source_of(release: Release) -> Path:
    """Return the folder to have in PYTHONPATH for that release.

    The source of the previous one is taken from the repository's history, once: it keeps its bytecode.
    """
    if release != OLD:
        return ROOT / "src"
    commit = (PREVIOUS / "COMMIT").read_text().strip()
    folder = ROOT / "build" / "releases" / commit
    if not folder.exists():
        made = subprocess.run(["git", "-C", ROOT, "archive", commit, "src"], capture_output=True, check=False)
        if made.returncode:
            pytest.skip(
                f"NOT TESTED with members of rdzv {PREVIOUS.name}: its commit {commit} is not in this repository's history "
                f"(a shallow clone needs `git fetch --unshallow`): {made.stderr.decode().strip()}"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent))
        with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
            archive.extractall(part, filter="data")
        try:
            part.rename(folder)
        except OSError:
            assert folder.exists()  # Another process was quicker.
    return folder / "src"


def on(release: Release) -> tuple[str, ...]:
    """Return the beginning of a command that runs with the code of that release. Python's own name follows it."""
    return ("env", f"PYTHONPATH={source_of(release)}")


def program(release: Release, *words: str) -> tuple[str, ...]:
    """Return the arguments of Python that run a program with the code of that release."""
    return words if isinstance(release, str) else (str(PRETENDED), *release, *words)


class MixedRun:
    """A run with members of both releases, each a process of its own."""

    def __init__(self, processes: ProcessSet, endpoint: str, nnodes: str, *settings: str) -> None:
        self.processes = processes
        self.endpoint = endpoint
        self.nnodes = nnodes
        self.settings = settings
        self.members: dict[str, Process] = {}
        low, _, high = nnodes.partition(":")
        processes.bounds[RUN] = int(low), int(high)

    def member(self, name: str, release: Release, *settings: str) -> Process:
        """Start a member of that release, and make sure that it is one."""
        words = (self.endpoint, RUN, self.nnodes, *QUICK, "last_call=1", f"slot={name}", *self.settings, *settings)
        made = self.processes.start(f"{name} ({release})", *program(release, str(PROGRAM), *words), on=on(release))
        code = made.until(lambda line: line["event"] == "code", "which code it runs")
        assert Path(code["path"]).is_relative_to(source_of(release)), code
        self.members[name] = made
        return made

    def round(self, *names: str, after: int = 0) -> int:
        """Wait until these members, and only they, have a round; check that they agree on it and on its store."""
        worlds = [self.members[name].until(_is_round(len(names), after), f"a round of {names}") for name in names]
        latest = max(line["round"] for line in worlds)
        for number, name in enumerate(names):
            if worlds[number]["round"] < latest:
                worlds[number] = self.members[name].until(_is_round(len(names), latest - 1), f"round {latest} of {names}")
        check_agreement(worlds)
        return latest

    def status(self, release: str) -> dict[str, Any]:
        """Return the status as that release's command shows it."""
        return json.loads(self.command(release, "status", "--json"))

    def command(self, release: str, *words: str) -> str:
        """Run an operator's command of that release, and return its output."""
        command = [*on(release), sys.executable, "-m", "rdzv", *words, self.endpoint, "--run-id", RUN]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 0, f"{release}: {words}: {done.stdout}{done.stderr}"
        return done.stdout


def _is_round(size: int, after: int) -> Any:
    return lambda line: is_world(size, after)(line) and line["store"] is not None


def check_agreement(worlds: list[Line]) -> None:
    """Check that all members had the same round and the same view of its store."""
    size = len(worlds)
    ranks = [str(rank) for rank in range(size)]
    names = ("round", "size", "incarnation", "era", "digest", "bootstrap", "fence", "reason", "store")
    same = {name: worlds[0][name] for name in names}
    for line in worlds:
        assert {name: line[name] for name in same} == same, f"members of two releases disagree about their round: {worlds}"
    assert sorted(line["rank"] for line in worlds) == list(range(size))
    store = same["store"]
    if not store:  # These members were told to leave it alone.
        return
    assert store["got"] == ranks
    assert store["count"] == sum(range(1, size + 1)), f"`add` was counted twice or not at all: {store}"
    assert sorted(store["appended"].split(";")) == ["", *ranks]
    assert store["winner"] == store["lost"]
    assert store["winner"] in ranks
    assert store["multi"] == ["2"] * size
    assert store["deleted"] == [True, False]
    assert store["there"] == [True, False]
    assert store["members"] == size
    assert len(store["keys"]) == 4 + 5 * size, store["keys"]
