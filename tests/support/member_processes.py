"""Servers and members as real processes: their lines with the time each came, signals by process id, and one judgement of
every world that any of them printed.
"""

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

AGENT = Path(__file__).with_name("member_process.py")
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent), "PYTHONUNBUFFERED": "1"}
LONG_S = 40.0
"""No wait is longer: one that is has failed. Nothing here takes more than a few seconds on an idle machine."""
QUICK = ("last_call=10", "settle=0.3", "grow_every=0", "lease=4")
"""Leases of seconds, not less: a loaded machine must not make a member look dead."""

Line = dict[str, Any]


def is_world(size: int = 0, after: int = 0) -> Callable[[Line], bool]:
    """Of that size (0: any) and of a later round than that."""
    return lambda line: line["event"] == "world" and line["round"] > after and size in (0, line["size"])


def is_notice(*kinds: str, after: int = -1) -> Callable[[Line], bool]:
    """Of one of these kinds, of a later round than that."""
    return lambda line: line["event"] == "notice" and line["kind"] in kinds and line["round"] > after


def is_change(*kinds: str) -> Callable[[Line], bool]:
    return lambda line: line["event"] == "changed" and line["kind"] in kinds


class Process:
    """One of them; `lines` is what it has printed so far, each with `at`, the time at which it came."""

    def __init__(self, name: str, command: Sequence[str], *, as_json: bool = True) -> None:
        self.name = name
        self.lines: list[Line] = []
        self._as_json = as_json
        self._came = threading.Condition()
        self._ended = False
        self._read_to = 0
        # A file, so that nobody is held up by what it has to say.
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

    # ---- what it says

    def until(self, holds: Callable[[Line], bool], what: str, limit_s: float = LONG_S) -> Line:
        """The next line that fits, beginning after the one found last."""
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
                    raise AssertionError(f"{self.name} did not say it: {what}\n{self.story()}")
                self._came.wait(left_s)

    def world(self, size: int = 0, after: int = 0) -> Line:
        return self.until(is_world(size, after), f"a world of {size} after round {after}")

    def all_read(self) -> None:
        """What it has said so far is known; look at what comes from now on."""
        self._read_to = len(self.lines)

    def said(self, holds: Callable[[Line], bool], since: float = 0.0) -> list[Line]:
        """All that fit, of those since then."""
        return [line for line in list(self.lines) if line["at"] >= since and holds(line)]

    def complaints(self) -> str:
        """What it wrote to stderr."""
        self._stderr.flush()
        self._stderr.seek(0)
        return self._stderr.read()

    def story(self) -> str:
        lines = "\n".join(f"  {line['at']:.2f} {({k: v for k, v in line.items() if k != 'at'})}" for line in self.lines[-30:])
        return f"{self.name} (pid {self.pid}):\n{lines}\n  stderr: {self.complaints()[-2000:]}"

    # ---- what is done to it

    def send(self, number: signal.Signals) -> float:
        """Signal it; when that was."""
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
        """Its exit code."""
        return self._process.wait(limit_s)

    def put_away(self) -> None:
        """Killed if need be, and all that it said is read."""
        self.send(signal.SIGKILL)
        self._process.wait()
        self._reader.join(LONG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


class Stage:
    """All processes of a test. Its end kills what still runs and judges every world that was printed by anyone."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.bounds: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Stage:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        wrong = None if kind is not None else [*self.judge()]
        for process in self.processes:
            process.put_away()
        assert not wrong, "\n".join(wrong)

    def start(self, name: str, *words: str, on: Sequence[str] = (), as_json: bool = True) -> Process:
        """Any program of ours; `on` is what leads to its host."""
        process = Process(name, [*on, sys.executable, *words], as_json=as_json)
        self.processes.append(process)
        return process

    def serve(self, bind: str = "127.0.0.1:0", on: Sequence[str] = ()) -> tuple[Process, str]:
        """`rdzv serve`, and where it serves."""
        server = self.start("server", "-m", "rdzv", "serve", "--bind", bind, on=on, as_json=False)
        line = server.until(lambda line: "serving at" in line["text"], "where it serves")
        return server, line["text"].split()[-1]

    def member(
        self,
        name: str,
        endpoint: str,
        nnodes: str,
        *settings: str,
        run_id: str = "job",
        on: Sequence[str] = (),
    ) -> Process:
        """One that does what an agent does."""
        low, _, high = nnodes.partition(":")
        self.bounds[run_id] = int(low), int(high or low)
        words = [str(AGENT), endpoint, run_id, nnodes, *QUICK, f"slot={name}", *settings]
        return self.start(name, *words, on=on)

    def judge(self) -> Iterable[str]:
        """G1 to G3, as far as they can be seen from what was printed."""
        worlds = [(process.name, line) for process in self.processes for line in process.said(is_world())]
        return judge(worlds, self.bounds)


def judge(worlds: Iterable[tuple[str, Line]], bounds: dict[str, tuple[int, int]]) -> Iterable[str]:
    """What is wrong with these worlds, each with the process that printed it, in the order in which that one did.

    A round number is unique in a run, over all engines that ever kept it: whoever finds two worlds under one number has found
    two groups that each take themselves for the run.
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
