"""The environment of an agent: its clock, its name, its engine, its run id, and the program that it is part of."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.torchrun_jobs import Job, ServeProcess

TOGETHER = {"last_call": 10}


@pytest.fixture
def serve() -> Iterator[ServeProcess]:
    with ServeProcess() as serving:
        yield serving


# ---- clocks and names


def faketime() -> str:
    """The library that shifts a process's clock; Debian has it in the package `faketime`."""
    given = os.environ.get("LIBFAKETIME", "")
    found = [given] if given else [str(path) for path in Path("/usr/lib").glob("**/faketime/libfaketime.so.1")]
    if not found:
        pytest.skip("libfaketime is not installed (Debian: `apt-get install faketime`): clocks apart are NOT tested")
    return found[0]


def test_clocks_twenty_seconds_apart_change_nothing(job):
    """Longer than a lease after the seal, no member is lost."""
    library = faketime()
    training = job("2:2", lease=2)
    training.agent("a")
    # All clocks of the process are shifted: with the monotonic one left alone, the library's sleeps fail.
    training.agent("b", wrap=["env", f"LD_PRELOAD={library}", "FAKETIME=+20s"])
    rows = training.world("ab", 2)
    apart_s = (rows["b"].clock - rows["b"].at) - (rows["a"].clock - rows["a"].at)
    assert 19 < apart_s < 21, "the library works"
    time.sleep(5)
    assert training.rows("told") == []
    training.finish_all("ab")


def test_two_agents_with_one_host_name_and_one_process_number_are_two_members(job):
    training = job("2:2")
    for node in "ab":
        training.agent(node, container="same")
    assert {row.host for row in training.rows("contained")} <= {"same"}
    training.world("ab", 2)
    assert {row.pid for row in training.rows("joined")} == {1}
    training.finish_all("ab")


# ---- the engine


@pytest.mark.parametrize("restarted", [False, True], ids=["stopped", "restarted"])
@pytest.mark.parametrize(("lasts_s", "conf"), [(3, {"lease": 2}), pytest.param(20, {}, marks=pytest.mark.soak)])
def test_an_outage_of_the_engine_restarts_nobody_and_a_later_loss_is_noticed(job, serve, restarted, lasts_s, conf):
    training = job("2:3", endpoint=serve.endpoint, **conf, **TOGETHER)
    training.start("a", "b", "c")
    rows = training.world("abc", 3)
    if restarted:
        serve.kill()
        time.sleep(lasts_s)
        serve.start()
    else:
        serve.signal(signal.SIGSTOP)
        time.sleep(lasts_s)
        serve.signal(signal.SIGCONT)
    time.sleep(2)  # Back at the engine, members would hear by now what they must not.
    assert training.rows("told") == [], training.report()
    assert training.rows("start") == sorted(rows.values(), key=lambda row: row.at)
    killed_at = training.agents["c"].kill()
    after = training.world("ab", 2, after=killed_at)
    assert {row.round for row in after.values()} == {2}
    training.finish_all("ab")


# ---- run ids


def close_by_failure(training: Job) -> str:
    """Start two nodes, let one fail for good, and return the reason that the other is told."""
    training.start("a", "b", max_restarts=0)
    rows = training.world("ab", 2)
    training.order("a", 17)
    assert {agent.ends() for agent in training.agents.values()} == {1}
    return f"rank {rows['a'].rank} failed: exit code 17"


def test_a_closed_run_id_says_who_closed_it_and_serves_a_later_incarnation_at_once(job, serve):
    failure = close_by_failure(job("2:2", "first", endpoint=serve.endpoint))

    refused = job("2:2", "refused", endpoint=serve.endpoint)
    assert refused.agent("late").ends() == 1
    said = refused.agents["late"].out
    assert "RendezvousClosedError: run 'job' is closed: " in said
    assert failure in said
    assert "the id can be used again 60 s after the close, or at once with a higher incarnation" in said

    requeued = job("2:2", "requeued", endpoint=serve.endpoint)
    requeued.start("a", "b", env={"SLURM_RESTART_COUNT": "1"})
    again = requeued.world("ab", 2)
    assert {row.restarts for row in again.values()} == {0}
    requeued.finish_all("ab")


@pytest.mark.soak
def test_a_closed_run_id_can_be_used_again_when_its_time_is_over(job, serve):
    close_by_failure(job("2:2", "first", endpoint=serve.endpoint, closed_for=5))
    time.sleep(6)
    later = job("2:2", "later", endpoint=serve.endpoint, closed_for=5)
    later.start("a", "b")
    later.world("ab", 2)
    later.finish_all("ab")


# ---- the program around it


@pytest.mark.parametrize("function", ["launch_forked", "launch_spawned", "launch_after_a_failure"])
def test_the_launcher_as_a_library_returns_what_the_functions_returned(job, function):
    """One launches in an `except` block, where `sys.exc_info` shows the exception of the caller."""
    training = job("2:2")
    training.start("a", "b", function=f"functions:{function}", env={"PYTHONPATH": str(training.jobs)})
    assert {agent.ends() for agent in training.agents.values()} == {0}, training.report()
    results = {row.node: row.ranks for row in training.rows("result")}
    ranks = {rank for node in results for rank in results[node].values()}
    assert (set(results), ranks) == ({"a", "b"}, {0, 1})


def test_one_node_needs_no_endpoint(job):
    training = job("1:1")
    training.endpoint = ""
    training.start("a")
    row = training.world("a", 1)["a"]
    assert (row.rank, row.round) == (0, 1)
    training.finish_all("a")


def test_agents_meet_where_the_variables_of_the_platform_say(job, free_port):
    """The same line on each, without an endpoint and an id. Any host but loopback would go before this one."""
    training = job("2:2", endpoint="auto", run_id="none")
    training.start("a", "b", env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "TORCHX_JOB_ID": "app://j-1"})
    rows = training.world("ab", 2)
    assert {row.run_id for row in rows.values()} == {"app-j-1"}
    training.finish_all("ab")
