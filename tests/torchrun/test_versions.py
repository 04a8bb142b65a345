"""torchrun agents of the previous release and of today's code in one job."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.releases import NEW, OLD, source_of
from support.torchrun_jobs import AgentForker


@pytest.fixture(scope="module")
def old_forker() -> Iterator[AgentForker]:
    made = AgentForker(source_of(OLD))
    yield made
    made.close()


def code_of(job, node) -> str:
    """Return the file of rdzv that the node's agent runs, as it says itself."""
    return job.rows("joined", node=node)[0].code


def test_a_job_of_torchrun_agents_is_upgraded_one_by_one(job, forker, old_forker):
    """The agent that serves is of the old release first; then that of today's code serves the old one."""
    run = job("1:2", last_call=1, settle=0.3, grow_every=0, lease=4, serve_on=0)
    run.agent("a", forker=old_forker)
    run.world("a", 1)
    run.agent("b")
    first = run.world("ab", 2)
    assert code_of(run, "a").startswith(str(source_of(OLD)))
    assert code_of(run, "b").startswith(str(source_of(NEW)))
    assert run.server() == "a"

    left_at = run.agents["a"].signal(signal.SIGTERM)
    alone = run.world("b", 1, after=left_at)
    run.agent("c", forker=old_forker)
    second = run.world("bc", 2, after=left_at)
    assert run.server() == "b"
    assert first["b"].round < alone["b"].round < second["b"].round
    run.finish_all("bc")
