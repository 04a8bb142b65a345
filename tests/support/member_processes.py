"""Servers and members as real processes: their output with timestamps, signals, and a check of every world they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import rdzv
from support.ports import free_port

AGENT = Path(__file__).with_name("member_process.py")
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent), "PYTHONUNBUFFERED": "1"}
LONG_S = 40.0
"""The longest wait. Nothing here takes more than a few seconds on an idle machine."""
QUICK = ("last_call=10", "settle=0.3", "grow_every=0", "lease=4")
"""Leases of seconds, not less: a loaded machine must not make a member look dead."""

Line = dict[str, Any]


def is_world(size: int = 0, after: int = 0) -> Callable[[Line], bool]:
    """Match a world of that size (0: any) and of a later round."""
    return lambda line: line["event"] == "world" and line["round"] > after and size in (0, line["size"])


def is_notice(*kinds: str, after: int = -1) -> Callable[[Line], bool]:
    """Match a notice of one of these kinds and of a later round."""
    return lambda line: line["event"] == "notice" and line["kind"] in kinds and line["round"] > after


def is_change(*kinds: str) -> Callable[[Line], bool]:
    return lambda line: line["event"] == "changed" and line["kind"] in kinds


class Process:
    """One process. `lines` is its output so far; each line has `at`, the time at which it came."""

    def __init__(self, name: str, command: Sequence[str], *, as_json: bool = True) -> None:
        self.name = name
        self.lines: list[Line] = []
        self._as_json = as_json
        self._came = threading.Condition()
        self._ended = False
        self._read_to = 0
        # A file, because a full pipe would block the process.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=ENVIRON)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"reads {name}")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text) if self._as_json else {"event": "text", "text": text.rstrip("\n")}
            with self._came:
                self.lines.append({**line, "at": time.monotonic()})
                self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def until(self, holds: Callable[[Line], bool], what: str, limit_s: float = LONG_S) -> Line:
        """Wait for the next line that matches, after the one found last."""
        deadline = time.monotonic() + limit_s
        with self._came:
            while True:
                while self._read_to < len(self.lines):
                    line = self.lines[self._read_to]
                    self._read_to += 1
                    if holds(line):
                        return line
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._ended:
                    raise AssertionError(f"{self.name} did not print it: {what}\n{self.report()}")
                self._came.wait(left_s)

    def world(self, size: int = 0, after: int = 0) -> Line:
        return self.until(is_world(size, after), f"a world of {size} after round {after}")

    def skip_lines(self) -> None:
        """Skip the lines so far."""
        self._read_to = len(self.lines)

    def said(self, holds: Callable[[Line], bool], since: float = 0.0) -> list[Line]:
        """Return all lines that match, since that time."""
        return [line for line in list(self.lines) if line["at"] >= since and holds(line)]

    def errors(self) -> str:
        """Return its stderr."""
        self._stderr.flush()
        self._stderr.seek(0)
        return self._stderr.read()

    def report(self) -> str:
        lines = "\n".join(f"  {line['at']:.2f} {({k: v for k, v in line.items() if k != 'at'})}" for line in self.lines[-30:])
        return f"{self.name} (pid {self.pid}):\n{lines}\n  stderr: {self.errors()[-2000:]}"

    def send(self, number: signal.Signals) -> float:
        """Send a signal and return the time."""
        at = time.monotonic()
        if self._process.poll() is None:
            os.kill(self.pid, number)
        return at

    def kill(self) -> float:
        at = self.send(signal.SIGKILL)
        self.wait()
        return at

    def pause(self) -> float:
        return self.send(signal.SIGSTOP)

    def resume(self) -> float:
        return self.send(signal.SIGCONT)

    def leave(self) -> float:
        return self.send(signal.SIGTERM)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def wait(self, limit_s: float = LONG_S) -> int:
        return self._process.wait(limit_s)

    def close(self) -> None:
        """Kill it if it still runs, and read the rest of its output."""
        self.send(signal.SIGKILL)
        self._process.wait()
        self._reader.join(LONG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


class ProcessSet:
    """All processes of a test. Leaving the block kills them and checks every world that any of them printed."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.bounds: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> ProcessSet:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        wrong = None if kind is not None else [*self.check()]
        for process in self.processes:
            process.close()
        assert not wrong, "\n".join(wrong)

    def start(self, name: str, *words: str, on: Sequence[str] = (), as_json: bool = True) -> Process:
        """Start a Python program; `on` is the command prefix that runs it on its host."""
        process = Process(name, [*on, sys.executable, *words], as_json=as_json)
        self.processes.append(process)
        return process

    def serve(
        self, bind: str = "", on: Sequence[str] = (), before: Sequence[str] = (), limit_s: float = LONG_S
    ) -> tuple[Process, str]:
        """Start `rdzv serve`, and return it and its address. `before`: arguments of Python.

        Its port is one that no other process is given while the test has killed the server (`ports.py`).
        """
        bind = bind or f"127.0.0.1:{free_port()}"
        server = self.start("server", *before, "-m", "rdzv", "serve", "--bind", bind, on=on, as_json=False)
        line = server.until(lambda line: "serving at" in line["text"], "where it serves", limit_s)
        return server, line["text"].split()[-1]

    def member(
        self, name: str, endpoint: str, nnodes: str, *settings: str, run_id: str = "job", on: Sequence[str] = ()
    ) -> Process:
        """Start a member (`member_process.py`)."""
        low, _, high = nnodes.partition(":")
        self.bounds[run_id] = int(low), int(high or low)
        words = [str(AGENT), endpoint, run_id, nnodes, *QUICK, f"slot={name}", *settings]
        return self.start(name, *words, on=on)

    def check(self) -> Iterable[str]:
        """Check G1 to G3, as far as the output shows them."""
        worlds = [(process.name, line) for process in self.processes for line in process.said(is_world())]
        return wrong_worlds(worlds, self.bounds)


def wrong_worlds(worlds: Iterable[tuple[str, Line]], bounds: dict[str, tuple[int, int]]) -> Iterable[str]:
    """Yield the problems of these worlds, each with the process that printed it, in the order of printing.

    A round number is unique in a run, over all engines that ever kept it. Two worlds with one number are two groups that each
    take themselves for the run.
    """
    rounds: dict[tuple[str, int], tuple[str, tuple[object, ...]]] = {}
    ranks: dict[tuple[str, int, int], str] = {}
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for process, line in worlds:
        run, number, size, rank = line["run"], line["round"], line["size"], line["rank"]
        world = (line["incarnation"], *line["era"], size, line["bootstrap"], line["digest"])
        who, first = rounds.setdefault((run, number), (process, world))
        if first != world:
            yield f"G1 agreement: round {number} of {run} is {world} for {process}, but {first} for {who}"
        holder = ranks.setdefault((run, number, rank), process)
        low, high = bounds[run]
        if holder != process or not 0 <= rank < size or not low <= size <= high:
            yield f"G2 ranks: round {number} of {run}: rank {rank} of {size} is {process}'s and {holder}'s"
        taken, now = last.get((run, process), (0, 0)), (line["era"][0], number)
        if now[0] < taken[0] or now[1] <= taken[1]:
            yield f"G3 order: {process} took round {now} of {run} after {taken}"
        last[run, process] = now


def listens(pid: int, port: int) -> bool:
    """Whether a process listens at a port, according to /proc."""
    process, sockets = Path(f"/proc/{pid}"), set()
    for table in ("tcp", "tcp6"):
        for row in (process / "net" / table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    return any(str(link.readlink()) in sockets for link in (process / "fd").iterdir())
