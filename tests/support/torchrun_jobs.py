"""Real torchrun agents and workers on this machine.

Agents and workers write events as lines of JSON with the machine's monotonic time. A test waits for such rows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from support.member_processes import listens
from support.ports import free_port
from support.timing import TooSlow

PROGRAMS = Path(__file__).parent / "torchrun_programs"
AGENT, WORKER = PROGRAMS / "agent.py", PROGRAMS / "worker.py"
LONG_S = 60.0
"""The longest wait of a test, unless it names another."""
IMPORT_S = 180.0
"""For several processes that import torch at the same time, beside dozens of others."""

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str = "it", timeout_s: float = LONG_S, report: Callable[[], str] = str) -> T:
    """Poll for the first true result. If none comes, fail with the text that `report` returns."""
    began_at = time.monotonic()
    while True:
        result = look()
        if result:
            return result
        if time.monotonic() - began_at > timeout_s:
            problem = TooSlow if timeout_s < LONG_S else AssertionError
            raise problem(f"{what}: not within {timeout_s:g} s\n{report()}")
        time.sleep(0.02)


@dataclass(frozen=True)
class Row:
    """One event of an agent or a worker."""

    at: float
    node: str
    event: str
    pid: int
    fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None


class AgentForker:
    """A process that has imported torch, and forks agents. `source`: the code of rdzv that they run, if not today's."""

    def __init__(self, source: Path | None = None) -> None:
        self.environ = {} if source is None else {"PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            [sys.executable, str(AGENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **self.environ},
        )  # fmt: skip
        self._lock = threading.Condition()
        self._forked: dict[int, int] = {}
        """The agent of each request. One that came too late must not be taken for that of the next test."""
        self._number = 0
        self._is_ready = False
        self.codes: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._lock:
                if "ready" in said:
                    self._is_ready = True
                elif "code" in said:
                    self.codes[said["pid"]] = said["code"]
                else:
                    self.codes.pop(said["pid"], None)  # The number may be that of an agent that ended long ago.
                    self._forked[said["request"]] = said["pid"]
                self._lock.notify_all()

    def wait_ready(self) -> None:
        """Wait until torch is imported, so that a measurement does not contain that."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._is_ready, IMPORT_S), "torch could not be imported"

    def fork(self, **request: object) -> int:
        assert self._process.stdin is not None
        self.wait_ready()
        with self._lock:
            self._number += 1
            number = self._number
            self._process.stdin.write(json.dumps({**request, "number": number}) + "\n")
            self._process.stdin.flush()
            assert self._lock.wait_for(lambda: number in self._forked, LONG_S), "no agent was forked"
            return self._forked.pop(number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class ServeProcess:
    """`rdzv serve` as a process that can be stopped, killed and started again."""

    def __init__(self) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ServeProcess:  # noqa: PYI034  Self came with 3.11.
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = [sys.executable, "-m", "rdzv", "serve", "--bind", self.endpoint]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"serving at {self.endpoint}\n"

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(LONG_S)
        self._process.stdout.close()


class Agent:
    """One torchrun, leader of its own process group. Its workers have their own groups."""

    def __init__(self, job: Job, node: str, pid: int, code: Callable[[], int | None]) -> None:
        self._job = job
        self.node = node
        self.pid = pid
        self.started_at = time.monotonic()
        self._code = code

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._code()

    @property
    def out(self) -> str:
        return (self._job.folder / f"{self.node}.out").read_text()

    def ends(self, timeout_s: float = LONG_S) -> int:
        """Wait for the exit code."""
        wait_for(lambda: self.code is not None, f"{self.node} ends", timeout_s, self._job.report)
        code = self.code
        assert code is not None
        return code

    def signal(self, number: signal.Signals) -> float:
        """Send a signal to the agent alone, and return the time."""
        at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return at

    def kill(self) -> float:
        """Kill the agent and its workers, as if the node had lost power, and return the time."""
        workers = children_of(self.pid)
        at = self.signal(signal.SIGKILL)
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at


class Job:
    """An elastic job: a folder for the events, an endpoint, and its agents."""

    def __init__(
        self,
        folder: Path,
        nnodes: str = "1:4",
        *,
        forker: AgentForker | None = None,
        backend: str = "rdzv",
        endpoint: str = "",
        run_id: str = "job",
        max_restarts: int = 10,
        mode: str = "idle",
        **conf: object,
    ) -> None:
        self.folder = folder
        self.jobs = PROGRAMS
        folder.mkdir(exist_ok=True)
        self.nnodes = nnodes
        self.backend = backend
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.run_id = run_id
        self.max_restarts = max_restarts
        self.mode = mode
        self.conf = conf
        self.agents: dict[str, Agent] = {}
        self._forker = forker
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.code is None:
                agent.kill()
        for pid in {row.pid for row in self.rows("start")}:  # Workers whose agent was killed before them.
            if str(self.folder) in environ_of(pid):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(LONG_S)
        for agent in self.agents.values():
            agent.ends()

    def agent(
        self,
        node: str,
        *,
        mode: str = "",
        nnodes: str = "",
        workers: int = 1,
        max_restarts: int | None = None,
        program: Sequence[str] = (),
        function: str = "",
        wrap: Sequence[str] = (),
        container: str = "",
        netns: str = "",
        env: dict[str, str] | None = None,
        forker: AgentForker | None = None,
        **conf: object,
    ) -> Agent:
        """Start an agent, by another forker if one is given. `wrap` is a command that runs it, which costs an import of torch.

        In a `container` it is process 1 on a host of that name, and its `pid` is that of the process outside.
        """
        restarts = self.max_restarts if max_restarts is None else max_restarts
        argv = [
            f"--nnodes={nnodes or self.nnodes}", f"--nproc-per-node={workers}", f"--max-restarts={restarts}",
            "--monitor-interval=0.1",
            f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}",
        ]  # fmt: skip
        settings = {**self.conf, **conf}
        if settings:
            argv.append("--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()))
        argv += program or [str(WORKER)]
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "JOB_DIR": str(self.folder), "JOB_NODE": node,
            "JOB_MODE": mode or self.mode, "JOB_ARGV": json.dumps(argv), **(env or {}),
        }  # fmt: skip
        out = self.folder / f"{node}.out"
        forker = forker or self._forker
        if forker is not None and not wrap:
            environ.update(forker.environ)
            pid = forker.fork(argv=argv, env=environ, out=str(out), function=function, container=container, netns=netns)
            codes = forker.codes
            agent = Agent(self, node, pid, lambda: codes.get(pid))
        else:
            with out.open("ab") as file:
                process = subprocess.Popen(
                    [*wrap, sys.executable, str(AGENT), *argv], env=environ, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self._processes.append(process)
            agent = Agent(self, node, process.pid, process.poll)
        self.agents[node] = agent
        return agent

    def start(self, *nodes: str, **options: Any) -> list[Agent]:
        return [self.agent(node, **options) for node in nodes]

    def hold(self, node: str) -> None:
        """Stop the agent, once, between getting a world and assigning the ranks in it, until it is released."""
        (self.folder / f"{node}.hold").touch()

    def release(self, node: str) -> None:
        """Let a held agent assign the ranks."""
        (self.folder / f"{node}.release").touch()

    def order(self, node: str, code: int = 0) -> None:
        """Tell the node's worker to end with that code, once."""
        self._write(f"{node}.order", code)

    def finish(self) -> None:
        """Tell all workers, also later ones, to end with success."""
        self._write("all.order", 0)

    def check_success(self, nodes: Iterable[str]) -> None:
        """Wait until the agents of these nodes have ended with code 0."""
        codes = {node: self.agents[node].ends() for node in nodes}
        assert set(codes.values()) == {0}, f"{codes}\n{self.report()}"

    def finish_all(self, nodes: Iterable[str]) -> None:
        """Tell all workers to end, and wait until these nodes have ended with code 0."""
        self.finish()
        self.check_success(nodes)

    def _write(self, name: str, code: int) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(str(code))
        part.rename(self.folder / name)

    def rows(self, *events: str, node: str = "", after: float = 0.0) -> list[Row]:
        """Return the events, in the order of time."""
        found = []
        for path in self.folder.glob(f"{node or '*'}.jsonl"):
            for line in path.read_text().splitlines():
                said = json.loads(line)
                row = Row(said.pop("at"), said.pop("node"), said.pop("event"), said.pop("pid"), said)
                if row.at > after and (not events or row.event in events):
                    found.append(row)
        return sorted(found, key=lambda row: row.at)

    def world(self, nodes: Iterable[str], size: int, *, after: float = 0.0, timeout_s: float = LONG_S) -> dict[str, Row]:
        """Wait until the newest worker of each of these nodes is in the same world of that size."""
        names = set(nodes)

        def look() -> dict[str, Row] | None:
            newest = {row.node: row for row in self.rows("start", after=after) if row.node in names}
            same = {(row.size, row.round, row.master) for row in newest.values()}
            return newest if set(newest) == names and len(same) == 1 and same.pop()[0] == size else None

        found = wait_for(look, f"{sorted(names)} in a world of {size}", timeout_s, self.report)
        ranks = sorted(row.rank for row in found.values())
        assert len(set(ranks)) == len(names), ranks
        assert ranks[-1] < size
        return found

    def world_of(self, size: int, *, after: float = 0.0) -> dict[str, Row]:
        """Wait until that many workers, of any nodes, are in the same world."""

        def look() -> dict[str, Row] | None:
            newest = {row.node: row for row in self.rows("start", after=after)}
            last = max((row.round for row in newest.values()), default=0)
            found = {node: row for node, row in newest.items() if row.round == last and row.size == size}
            return found if len(found) == size else None

        return wait_for(look, f"a world of {size}", report=self.report)

    def server(self) -> str:
        """Return the node whose agent listens at the endpoint."""
        port = int(self.endpoint.rpartition(":")[2])
        for node, agent in self.agents.items():
            with suppress(OSError):
                if listens(agent.pid, port):
                    return node
        return ""

    def other_than_server(self, nodes: Iterable[str] = "ab") -> tuple[str, str]:
        """Return the first node that does not serve, and the one that does."""
        server = self.server()
        first, *_ = (node for node in nodes if node != server)
        return first, server

    def row(self, event: str, node: str, *, after: float = 0.0, timeout_s: float = LONG_S) -> Row:
        """Wait for the first such event."""
        found = wait_for(lambda: self.rows(event, node=node, after=after), f"{node} {event}", timeout_s, self.report)
        return found[0]

    def report(self) -> str:
        """Return all events and output, for the message of a failed test."""
        rows = [f"{row.at:.3f} {row.node} {row.pid} {row.event} {row.fields}" for row in self.rows()]
        outs = [f"---- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("*.out"))]
        return "\n".join([*rows, *outs])


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environ_of(pid: int) -> str:
    """Return the environment of a process, to be sure that the pid was not reused."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""
