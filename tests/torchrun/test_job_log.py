"""A scripted job of real torchrun agents: one log, and the journals of all, tell each round, its cause and its cost."""

from __future__ import annotations

import json
import os
import re

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from rdzv.operate.account import accounts, find_files, read_files
from support.cli_commands import rdzv
from support.torchrun_jobs import ServeProcess

HOST = os.uname().nodename
PREFIX = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ rdzv\] \[job\] ", re.ASCII)
S = r"\d+\.\d+ s"
NAME = re.escape(f"{HOST}/")
NOISE_S = 2.0
"""Between what two processes see of one thing, on a loaded machine."""
QUICK = {"linger": 0.3, "lease": 5, "settle": 0.2, "drain_settle": 0.1, "grow_every": 0}




def log_of(agent):
    """Return the lines of rdzv in an agent's output, without time and level."""
    return [PREFIX.sub("", line) for line in agent.out.splitlines() if PREFIX.match(line)]


def check_lines(lines, patterns):
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert len(lines) == len(patterns), "\n".join(lines)


def rounds_of(rank):
    """The lines about all rounds in the log of an agent that was there from the beginning."""
    return [
        rf"round 1: rank {rank} of 4, formed in {S}; came in: {NAME}a, {NAME}b, {NAME}c, {NAME}d",
        rf"round 1 broken after {S}: {NAME}d lost.*",
        rf"round 2: rank {rank} of 3 \(4 before\), re-formed in {S} \(lost: {NAME}d\)",
        rf"round 2 broken after {S}: {NAME}c draining: maintenance",
        rf"round 3: rank {rank} of 2 \(3 before\), re-formed in {S} \(drained: {NAME}c\)",
        rf"round 3 broken after {S}: {NAME}e came to join",
        rf"round 4: rank {rank} of 3 \(2 before\), re-formed in {S} \(growth: {NAME}e\)",
        rf"round 4 broken after {S}: {NAME}e gave up: rank 2 failed: exit code 3.*",
        rf"round 5: rank {rank} of 2 \(3 before\), re-formed in {S} \(gave up: {NAME}e\)",
    ]


def left_after(rounds, restarts):
    return rf"leaves the run after {S}, {rounds} and {restarts} \(\d+(\.\d)? % of the time in a round\): "


def test_the_log_of_one_agent_and_the_journals_of_all_tell_each_round_its_cause_and_its_cost(job, tmp_path):
    """One agent is killed, one drained, one added; it has a bug, and at last another one, too."""
    folder = tmp_path / "state"
    with ServeProcess() as server:
        it = job("2:4", endpoint=server.endpoint, max_restarts=0, **QUICK)

        def start(*nodes):
            for node in nodes:
                it.agent(node, slot=node, order=node, env={"XDG_STATE_HOME": str(folder)})

        start("a", "b", "c", "d")
        it.world("abcd", 4)
        it.agents["d"].kill()
        it.world("abc", 3)
        drained = rdzv("drain", f"{HOST}/c", server.endpoint, "--run-id", "job", "--reason", "maintenance")
        assert drained.returncode == 0, drained.stderr
        it.world("ab", 2)
        start("e")
        it.world("abe", 3)
        it.order("e", 3)
        it.world("ab", 2, after=it.row("order", "e").at)
        it.order("b", 1)
        assert [it.agents[node].ends() for node in "abce"] == [1, 1, 0, 1], it.report()
        live = rdzv("journal", server.endpoint, "--run-id", "job", "--json")
    lines = {node: log_of(it.agents[node]) for node in "abcde"}
    joins = rf"{NAME}{{}} joins at engine rdzv://{re.escape(server.endpoint)}, for rounds of 2 to 4 nodes"
    over = rf"{NAME}b gave up: rank 1 failed: exit code 1; 1 of at least 2 nodes remain"
    restarts = rf"4 restarts that took {S}"
    check_lines(lines["a"], [
        joins.format("a"), *rounds_of(0), rf"the run is closed: {over}",
        left_after("5 rounds", restarts) + "it was given no round",
    ])  # fmt: skip
    check_lines(lines["b"], [joins.format("b"), *rounds_of(1), left_after("5 rounds", restarts) + "rank 1 failed: exit code 1"])
    check_lines(lines["c"], [
        joins.format("c"), *rounds_of(2)[:4], left_after("2 rounds", f"1 restart that took {S}") + "it is not needed any more",
    ])  # fmt: skip
    check_lines(lines["d"], [joins.format("d"), rounds_of(3)[0]])
    check_lines(lines["e"], [
        joins.format("e"), "round 3 runs without this node: it has 2 nodes, and this node waits to be let in",
        rf"round 3 broken: {NAME}e came to join", rf"round 4: rank 2 of 3, formed in {S}; came in: {NAME}e",
        left_after("1 round", "0 restarts") + "rank 2 failed: exit code 3",
    ])  # fmt: skip
    told = it.agents["a"].out
    assert re.search(rf"^\S*RendezvousClosedError: run 'job' is closed: {over}", told, re.MULTILINE)
    assert "direct cause" not in told
    check_journals(folder, lines["a"], [json.loads(line) for line in live.stdout.splitlines()])


def check_journals(folder, lines, live):
    """The journals of all agents tell the same as the log of one, and as the journal that the engine kept."""
    files = find_files([str(folder)])
    assert len(files) == 5
    (account,) = accounts(read_files(files))
    theirs = [one for one in live if one["event"] == "restart"]
    causes = [("lost", "d"), ("drained", "c"), ("growth", "e"), ("gave_up", "e")]
    expected = [(number, kind, [f"{HOST}/{who}"]) for number, (kind, who) in enumerate(causes, 1)]
    assert [(one.round, one.kind, list(one.members)) for one in account.restarts] == expected
    assert [(one["round"], one["kind"], one["members"]) for one in theirs] == expected
    logged = [float(re.search(r"re-formed in (\S+) s", line)[1]) for line in lines if "re-formed" in line]
    for one, other, seconds in zip(account.restarts, theirs, logged, strict=True):
        assert one.cost.seconds == pytest.approx(other["cost_s"], abs=NOISE_S)
        assert seconds - 0.06 <= one.cost.seconds <= seconds + NOISE_S, "the slowest agent counts"
    assert account.cost.exact
    assert 0 < account.availability < 1
    assert account.end.startswith(f"{HOST}/b gave up: rank 1 failed: exit code 1")
