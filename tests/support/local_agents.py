"""Torch's local elastic agents over `etcd-v3`, all started by one process: some run in it, the others are forked from it.

A scenario is a function that returns what it observed. The scenarios follow torch's own suite of its local agent, which starts
etcd and agents in one process and forks more agents from it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv.torchrun.plugin import create_etcd_v3
from rdzv.torchrun.rendezvous import EtcdServer

fork = multiprocessing.get_context("fork")
LONG_S = 60.0
ENVIRONMENT = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")


# ---- workers


def echo(text: str) -> str:
    return text


def read_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ENVIRONMENT}


def all_reduce() -> float:
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def fail() -> None:
    raise RuntimeError("on purpose")


def fail_once_on_rank_1() -> tuple[str, str]:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RDZV_ROUND"] == "1":
        if os.environ["RANK"] == "1":
            raise RuntimeError("on purpose, once")
        time.sleep(LONG_S)
    all_reduce()
    return os.environ["WORLD_SIZE"], attempt


def drift(slow_s: float) -> str:
    """Take longer on rank 1 than on rank 0."""
    if os.environ["RANK"] == "1":
        time.sleep(slow_s)
    return os.environ["RANK"]


def wait_for(folder: str) -> str:
    """Say that this worker runs, and wait for the file that lets it end."""
    (Path(folder) / f"{os.environ['GROUP_RANK']}-of-{os.environ['WORLD_SIZE']}-{os.getppid()}").touch()
    soon((Path(folder) / "go").exists)
    return os.environ["WORLD_SIZE"]


# ---- agents


class Group(NamedTuple):
    """A run: the etcd server, the id and the number of nodes."""

    endpoint: str
    run_id: str
    low: int
    high: int


def run_agent(
    group: Group, function: Callable[..., Any], args: tuple[Any, ...] = (), workers: int = 1, restarts: int = 0,
    before_leaving: Callable[[], object] = lambda: None,
) -> Any:  # fmt: skip
    """Run an agent to its end. Returns the workers' results by global rank, or the name of the final state."""
    conf = {"last_call": "1", "lease": "3", "grow_every": "0", "join_timeout": "50", "slot": str(os.getpid())}
    given = RendezvousParameters("etcd-v3", group.endpoint, group.run_id, group.low, group.high, "127.0.0.1", **conf)
    handler = create_etcd_v3(given)
    spec = WorkerSpec("worker", workers, handler, entrypoint=function, args=args, max_restarts=restarts, monitor_interval=0.05)
    logs = DefaultLogsSpecs(tempfile.mkdtemp(prefix="agents-"))
    try:
        result = LocalElasticAgent(spec, logs, start_method="fork", exit_barrier_timeout=20).run()
        before_leaving()
        return result.state.name if result.is_failed() else result.return_values
    finally:
        handler.shutdown()


class Agent:
    """An agent in a process forked from this one."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._results = fork.Queue()
        self.process = fork.Process(target=self._run, args=args, kwargs=more)
        self.process.start()

    def _run(self, *args: Any, **more: Any) -> None:
        self._results.put(run_agent(*args, **more))

    def result(self) -> Any:
        """Return the result of the agent, after its process has ended well."""
        found = self._results.get(timeout=LONG_S)
        self.process.join(LONG_S)
        return found if self.process.exitcode == 0 else f"exit code {self.process.exitcode}"

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LONG_S)


def soon(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not look():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def merged(agents: list[Agent]) -> list[Any]:
    """Return the workers' results of all agents, in the order of ranks."""
    found: dict[int, Any] = {}
    for agent in agents:
        result = agent.result()
        found |= result if isinstance(result, dict) else {-len(found) - 1: result}
    return [found[rank] for rank in sorted(found)]


# ---- scenarios


def a_function(group: Group) -> Any:
    return run_agent(group._replace(high=1, low=1), echo, ("hello",), workers=2)


def a_function_that_fails(group: Group) -> Any:
    return run_agent(group._replace(high=1, low=1), fail, restarts=1)


def two_agents_reduce(group: Group) -> Any:
    return merged([Agent(group, all_reduce, workers=2) for _ in range(2)])


def two_agents_fail(group: Group) -> Any:
    """If one left before the other's worker has failed, the other would form the next round, and wait for a second node."""
    both_failed = fork.Barrier(2, timeout=LONG_S)
    return merged([Agent(group, fail, before_leaving=both_failed.wait) for _ in range(2)])


def a_failure_restarts_both(group: Group) -> Any:
    return merged([Agent(group, fail_once_on_rank_1, restarts=3) for _ in range(2)])


def a_slow_worker(group: Group) -> Any:
    return merged([Agent(group, drift, (2.0,)) for _ in range(2)])


def ranks_of_unequal_agents(group: Group) -> Any:
    found = merged([Agent(group._replace(low=3, high=3), read_environment, workers=n) for n in (1, 2, 3)])
    sizes = sorted({(int(one["GROUP_RANK"]), int(one["LOCAL_WORLD_SIZE"])) for one in found})
    return {
        "ranks": [int(one["RANK"]) for one in found],
        "role ranks": [int(one["ROLE_RANK"]) for one in found],
        "sizes": sorted({(one["WORLD_SIZE"], one["ROLE_WORLD_SIZE"]) for one in found}),
        "workers": sorted(size for _, size in sizes),
        "groups": [rank for rank, _ in sizes],
    }


def _with_two_running(group: Group, folder: str) -> list[Agent]:
    agents = [Agent(group, wait_for, (folder,)) for _ in range(2)]
    soon(lambda: len(list(Path(folder).glob("*-of-2-*"))) == 2)
    return agents


def the_others_go_on_after_a_kill(group: Group) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        lost, left = _with_two_running(group._replace(low=1), folder)
        lost.kill()
        soon(lambda: bool(list(Path(folder).glob("0-of-1-*"))))
        (Path(folder) / "go").touch()
        return left.result()


def a_killed_agent_is_replaced(group: Group) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        lost, left = _with_two_running(group, folder)
        lost.kill()
        new = Agent(group, wait_for, (folder,))
        soon(lambda: any(file.name.endswith(f"-of-2-{new.process.pid}") for file in Path(folder).iterdir()))
        (Path(folder) / "go").touch()
        return merged([left, new])


SCENARIOS = (
    a_function, a_function_that_fails, two_agents_reduce, two_agents_fail, a_failure_restarts_both, a_slow_worker,
    ranks_of_unequal_agents, the_others_go_on_after_a_kill, a_killed_agent_is_replaced, a_function,
)  # fmt: skip


def main() -> None:
    server = EtcdServer()
    server.start()
    client = server.get_client()
    found = []
    for number, scenario in enumerate(SCENARIOS):
        began_at = time.monotonic()
        found.append((scenario.__name__, scenario(Group(server.get_endpoint(), f"run{number}", 2, 2))))
        sys.stderr.write(f"{scenario.__name__}: {time.monotonic() - began_at:.1f} s\n")
    client.close()
    server.stop()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
