"""Jobs of processes that stay (`staying_process.py`), each forked from a process that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.torchrun_jobs import ServeProcess, wait_for

LONG_S = 60.0
FORKER = multiprocessing.get_context("forkserver")


def start_forker() -> None:
    """Start the process that imports torch, once. Before Python 3.13 it finds modules by the environment only."""
    FORKER.set_forkserver_preload(["support.staying_process"])
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *([given] if given else [])])
    try:
        forkserver.ensure_running()
    finally:
        if given is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = given


def _call(function: str, *args: object) -> None:
    """Call a function of `staying_process`, in the forked process: only there is torch needed."""
    from support import staying_process

    getattr(staying_process, function)(*args)


class StayingProcess:
    """One process of a job, and the lines that it has written."""

    def __init__(self, name: str, out: Path, function: str, *args: object) -> None:
        self.name = name
        self._out = out
        start_forker()
        self._process = FORKER.Process(target=_call, args=(function, str(out), *args), name=name)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def rows(self, *events: str, after: float = 0.0) -> list[Any]:
        text = self._out.read_text() if self._out.exists() else ""
        rows = [SimpleNamespace(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if row.at > after and (not events or row.event in events)]

    @property
    def text(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def errors(self) -> str:
        file = self._out.with_name(f"{self._out.name}.err")
        return file.read_text() if file.exists() else ""

    def until(self, event: str, timeout_s: float = LONG_S, after: float = 0.0, **fields: object) -> Any:
        """Wait for the first such row with these fields."""

        def look() -> Any:
            rows = self.rows(event, after=after)
            return next((row for row in rows if all(getattr(row, name) == value for name, value in fields.items())), None)

        return wait_for(look, f"{self.name}: {event} {fields}", timeout_s, self.report)

    def report(self) -> str:
        code = self._process.exitcode
        if code is None:
            self.send(signal.SIGUSR1)
            time.sleep(0.5)  # For the stacks, which it writes now.
        return f"{self.name} (pid {self.pid}, exit code {code}):\n{self.text[-3000:]}\n{self.errors[-3000:]}"

    @property
    def lives(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ends(self, timeout_s: float = LONG_S) -> int:
        """Wait for the exit code; that of a killed process is negative."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"does not end\n{self.report()}"
        return int(self._process.exitcode)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.ends()


class StayingJob:
    """A server and processes. Leaving the block kills them."""

    def __init__(self, folder: Path, nnodes: tuple[int, int] = (2, 3), **plan: Any) -> None:
        self.folder = folder
        self.nnodes = nnodes
        self.plan = plan
        self.server = ServeProcess()
        self.processes: dict[str, StayingProcess] = {}

    def __enter__(self) -> StayingJob:  # noqa: PYI034  Self came with 3.11.
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        self.server.kill()

    def start(self, name: str, *, settings: dict[str, Any] | None = None, **plan: Any) -> StayingProcess:
        """Start a process that trains."""
        both = {**self.plan.get("settings", {}), **(settings or {})}
        mine = {"seed": len(self.processes), **self.plan, **plan, "settings": both}
        args = (self.server.endpoint, name, self.nnodes, mine)
        process = StayingProcess(name, self.folder / f"{name}.jsonl", "train", *args)
        self.processes[name] = process
        return process

    def begin(self, names: str, **plan: Any) -> list[StayingProcess]:
        """Start processes, one per letter, and wait until all train together."""
        started = [self.start(name, **plan) for name in names]
        for process in started:
            process.until("step", size=len(names))
        return started

    def rows(self, *events: str) -> list[Any]:
        return sorted((row for one in self.processes.values() for row in one.rows(*events)), key=lambda row: row.at)

    def report(self) -> str:
        return "\n".join(process.report() for process in self.processes.values())

    def check_states(self) -> int:
        """Check that the members of each round began with equal states, bit by bit. Return the number of rounds."""
        digests: dict[int, set[str]] = {}
        for row in self.rows("world"):
            digests.setdefault(row.round, set()).add(row.digest)
        assert all(len(found) == 1 for found in digests.values()), f"{digests}\n{self.report()}"
        return len(digests)
