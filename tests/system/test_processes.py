"""Processes that are started while another thread forks, as torch's agent does for its workers: nothing waits for the fork."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rdzv.config.settings import Settings
from rdzv.config.topology import locate
from rdzv.engines.etcd import sentinel
from rdzv.engines.etcd.server import SupervisedProcess
from rdzv.engines.quorum.etcd_program import find_program
from rdzv.system.check_command import run_check
from rdzv.system.processes import reap, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

LIVES_S = 30
"""How long a forked process lives: a start that waits for it is found, and ends all the same."""
FORKS_S = 0.5
"""How long a start is held at its worst moment, so that another thread can fork. That takes 10 ms if nothing prevents it."""


class Forks:
    """Processes that another thread forks at the worst moment of each start."""

    def __init__(self) -> None:
        self.started: list[int] = []
        """Programs that were started."""
        self.pids: list[int] = []
        """Processes that were forked meanwhile."""
        self.threads: list[threading.Thread] = []

    def begin(self, started: int) -> None:
        self.started.append(started)
        thread = threading.Thread(target=self._fork)
        self.threads.append(thread)
        thread.start()
        thread.join(FORKS_S)

    def _fork(self) -> None:
        pid = os.fork()
        if not pid:
            time.sleep(LIVES_S)
            os._exit(0)
        self.pids.append(pid)

    def all_live(self) -> bool:
        """Whether a process was forked for each start, and none of them has ended: then nothing has waited for its end."""
        for thread in self.threads:
            thread.join(LIVES_S)
        ended = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.pids]
        return bool(ended) and not any(ended)

    def end(self) -> None:
        for thread in self.threads:
            thread.join(LIVES_S)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _and_fork(real: Callable[..., int], made: Forks) -> Callable[..., int]:
    def started(*words: object, **options: object) -> int:
        pid = real(*words, **options)
        made.begin(pid)
        return pid

    return started


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """Have a process forked in each start between the moment at which the program runs and that at which Python knows it."""
    made = Forks()
    # Python 3.13 and later use `posix_spawn` for a program that is named by its path.
    ways = [(subprocess, "_fork_exec") if sys.version_info >= (3, 11) else (subprocess._posixsubprocess, "fork_exec")]
    ways += [(os, "posix_spawn")] if hasattr(os, "posix_spawn") else []
    for owner, name in ways:
        monkeypatch.setattr(owner, name, _and_fork(getattr(owner, name), made))
    yield made
    made.end()


def test_a_start_waits_for_no_process_that_is_forked_in_the_same_moment(forks):
    process = start([sys.executable, "-c", "print('hello')"], stdout=subprocess.PIPE)
    # The end of the output is seen, too: the forked process does not have the pipe.
    assert process.communicate(timeout=LIVES_S)[0] == b"hello\n"
    assert forks.all_live()


async def test_a_check_waits_for_no_process_that_is_forked_in_the_same_moment(forks):
    command = f"{shlex.quote(sys.executable)} -c \"print('bad gpu'); raise SystemExit(1)\""
    assert await run_check(command, LIVES_S) == "the check failed with exit code 1: bad gpu"
    assert forks.all_live()


def test_the_command_for_the_path_of_a_node_waits_for_no_process_that_is_forked_in_the_same_moment(forks):
    settings = Settings.make("n1", run_id="job", min_nodes=1, max_nodes=1, topology_command="echo b1/r2")
    assert locate(settings, "n1").topology == "b1/r2"
    assert forks.all_live()


async def test_a_sentinel_waits_for_no_process_that_is_forked_in_the_same_moment(forks):
    process = sentinel._start_process()
    assert forks.all_live()
    process.kill()
    process.stdin.close()
    await reap(process)


def test_the_start_of_etcd_waits_for_no_process_that_is_forked_in_the_same_moment(forks):
    assert find_program().version
    process = SupervisedProcess(["sleep", "60"])
    assert process.pid
    process.stop()
    nothing = SupervisedProcess(["/nowhere/etcd"])
    assert nothing.pid == 0, "the end of its output is seen"
    nothing.stop()
    assert forks.all_live()


async def test_a_helper_for_grpc_waits_for_no_process_that_is_forked_in_the_same_moment_and_its_death_is_seen(forks):
    pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")
    from rdzv.engines.etcd.client.relay import Relay, RelayChannel

    relay = Relay(None)
    call = RelayChannel(relay, "127.0.0.1:1").stream_stream("/none")(metadata=None)
    while not forks.threads:  # noqa: ASYNC110  The fixture has no event.
        await asyncio.sleep(0.01)
    assert forks.all_live()
    os.kill(forks.started[0], signal.SIGKILL)
    with pytest.raises(Exception, match="helper process for gRPC has ended"):
        await call.read()
    assert forks.all_live()
    await relay.close()


async def test_a_child_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr("rdzv.system.processes.END_S", 0.1)
    process = start(["sleep", "60"])
    await reap(process)
    assert process.returncode == -signal.SIGKILL
