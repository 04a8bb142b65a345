"""Members and servers that are killed and paused: real processes, real signals, on one host.

Each test runs once in `make test`, and ten times more in `make soak`.
"""

from __future__ import annotations

import random
import time

import pytest

from support.member_processes import LONG_S, ProcessSet, is_change, is_notice, is_world, listens, wrong_worlds
from support.timing import within

TURNS = 10
TOLD_S = 2.0
"""How long it may take until all others are told of a kill."""
LEASE_S = 60
turns = pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.soak) for turn in range(1, TURNS + 1))])


@pytest.fixture
def processes():
    """Processes on this host; no network is needed."""
    with ProcessSet() as made:
        yield made


def told_s(turn: int) -> float:
    """In `make test` the machine may be busy with other tests: there it counts that nobody waits for the lease to end."""
    return TOLD_S if turn else LEASE_S / 2


def formed(processes, place, count, nnodes, *settings):
    """Form a round of so many members. The first one leads; the last one joined last."""
    members = []
    for number in range(count):
        members.append(processes.member(f"n{number}", place, nnodes, *settings))
        for member in {0: members, count - 2: members[1:]}.get(number, []):
            member.until(is_notice("present"), "it has come")
    rounds = {member.world(count)["round"] for member in members}
    assert len(rounds) == 1
    return members, rounds.pop()


def all_told(others, at, round, limit_s):
    """Each is told, in time, that the round is broken."""
    for member in others:
        line = member.until(is_notice("broken", after=round - 1), f"round {round} is broken")
        within(line["at"] - at, limit_s, f"{member.name} was told so late\n{member.report()}")


# ---- members


@turns
def test_all_others_are_told_of_a_kill_in_time(processes, turn):
    _, place = processes.serve()
    members, round = formed(processes, place, 5, "2:5", f"lease={LEASE_S}")
    for victim in (members[-1], members[0], members[2]):
        at = victim.kill()
        members.remove(victim)
        all_told(members, at, round, told_s(turn))
        now = {member.world(len(members), after=round)["round"] for member in members}
        assert now == {round + 1}
        round += 1


@turns
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_one_that_was_paused_for_longer_than_its_lease_is_evicted_and_may_come_back(processes, turn, who):
    _, place = processes.serve()
    members, round = formed(processes, place, 3, "2:3")
    paused = members[0 if who == "leader" else 2]
    others = [member for member in members if member is not paused]
    paused.pause()
    for member in others:
        line = member.until(is_notice("broken"), "the round is broken")
        assert f"{paused.name} lost" in line["reason"]
    assert {member.world(2)["round"] for member in others} == {round + 1}
    paused.skip_lines()
    at = paused.resume()
    first = paused.until(lambda line: line["event"] in ("world", "changed"), "what it is told")
    assert (first["event"], first["kind"], first["round"]) == ("changed", "evicted", round), paused.report()
    assert not paused.said(is_world(), at - 0.001)[:-1]
    grown = {member.world(3)["round"] for member in members}
    assert len(grown) == 1
    assert grown.pop() > round + 1


@turns
def test_one_that_was_paused_for_less_than_its_lease_is_not_missed(processes, turn):
    _, place = processes.serve()
    members, _ = formed(processes, place, 3, "2:3", "lease=10")
    at = members[1].pause()
    time.sleep(2.5)  # Longer than the linger: but its connection stands.
    members[1].resume()
    members[2].leave()
    members[0].until(is_notice("broken"), "somebody left")
    for member in members[:2]:
        assert not [line for line in member.said(is_notice("broken", "evicted"), at) if "n1" in line["reason"]]


# ---- the server


@turns
def test_a_server_that_is_killed_and_restarted_disturbs_nobody(processes, turn):
    server, place = processes.serve()
    members, round = formed(processes, place, 4, "2:4", f"lease={LEASE_S}")
    for _ in range(2 if turn else 1):
        server.kill()
        server, again = processes.serve(place)
        assert again == place
        for member in members:
            line = member.until(is_notice("sealed"), "the round is kept")
            assert (line["round"], line["reason"]) == (round, "kept after the engine came back")
    for member in members:
        assert not member.said(is_change("round", "evicted", "closed", "outage", "refused"))
    # And it still notices who is lost.
    at = members.pop().kill()
    all_told(members, at, round, told_s(turn))
    assert {member.world(3)["round"] for member in members} == {round + 1}


@turns
def test_a_member_lost_while_the_server_was_away_is_noticed(processes, turn):
    server, place = processes.serve()
    members, round = formed(processes, place, 4, "2:4")
    server.kill()
    victim = members.pop(turn % 4)
    victim.kill()
    processes.serve(place)
    at = time.monotonic()  # How long a server takes to start is not the question.
    # The members are given three seconds to come back, by one who needs half a second itself.
    all_told(members, at, round, 5.0 if turn else LONG_S)
    for member in members:
        assert member.world(3)["round"] == round + 1


@turns
def test_a_server_that_does_not_answer_for_long_disturbs_nobody(processes, turn):
    """Longer than the lease and the read timeout: every connection times out, and no new one succeeds."""
    server, place = processes.serve()
    members, round = formed(processes, place, 3, "2:4", "read_timeout=3", "last_call=1")
    server.pause()
    for member in members:
        member.until(is_notice("engine away"), "the engine is away", LONG_S)
    time.sleep(20.0 if turn else 2.0)
    for member in members:
        member.skip_lines()
    at = server.resume()
    late = processes.member("late", place, "2:4", "last_call=1")
    assert late.world(4)["round"] == round + 1  # The only reason to disturb the others, and it shows that they are back.
    for member in members:
        reasons = {line["reason"] for line in member.said(is_change("round", "evicted", "outage"), at)}
        assert len(reasons) == 1, member.report()
        assert "late came to join" in reasons.pop()


@turns
def test_an_agent_that_serves_and_is_killed_is_replaced_by_another_of_its_host(processes, turn):
    """First arrival, leader and server in one; no other service was started."""
    server, place = processes.serve()
    server.kill()  # It has found a free port for us.
    port = int(place.rpartition(":")[2])
    members, round = formed(processes, place, 4, "2:4")
    serving = [member for member in members if listens(member.pid, port)]
    assert serving == members[:1]
    at = members.pop(0).kill()
    all_told(members, at, round, 5.0 if turn else LONG_S)
    assert {member.world(3)["round"] for member in members} == {round + 1}
    assert sum(listens(member.pid, port) for member in members) == 1


# ---- many


def storm(processes, size, seconds, settings, seed):
    """Members are killed at random, a tenth in all, and each is replaced."""
    rng = random.Random(seed)
    _, place = processes.serve()
    nnodes = f"{size // 2}:{size}"
    members = [processes.member(f"n{number}", place, nnodes, *settings) for number in range(size)]
    for member in members:
        member.until(is_world(), "its first world", 4 * LONG_S)
    kills = max(2, size // 10)
    began_at = time.monotonic()
    due = sorted(rng.uniform(0, seconds) for _ in range(kills))
    for number, after_s in enumerate(due):
        time.sleep(max(0.0, began_at + after_s - time.monotonic()))
        victim = members.pop(rng.randrange(len(members)))
        victim.kill()
        members.append(processes.member(f"r{number}", place, nnodes, *settings))
    settle(members, size)
    assert sum(len(member.said(is_world())) for member in processes.processes[1:]) > size


def settle(members, size):
    """Wait until all members are in one round of the full size."""
    deadline = time.monotonic() + 4 * LONG_S
    while True:
        latest = [member.said(is_world())[-1:] for member in members]
        rounds = {(line[0]["round"], line[0]["size"]) if line else (0, 0) for line in latest}
        if len(rounds) == 1 and rounds.pop()[1] == size:
            return
        assert time.monotonic() < deadline, sorted(rounds)
        time.sleep(0.2)


def test_no_kill_at_whatever_moment_splits_twenty_members(processes):
    storm(processes, 20, 5.0, ["lease=6", "last_call=20"], seed=1)


@pytest.mark.soak
def test_no_kill_at_whatever_moment_splits_two_hundred_members(processes):
    storm(processes, 200, 60.0, ["lease=30", "last_call=120", "join_timeout=600"], seed=2)


# ---- the check of worlds


WORLD = {
    "run": "job", "incarnation": "i", "era": [1, "e"], "round": 3, "rank": 0, "size": 2, "bootstrap": "h:1", "digest": "d",
}  # fmt: skip


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"rank": 1}, ""),
        ({"rank": 1, "bootstrap": "h:2"}, "G1"),
        ({"rank": 1, "digest": "x"}, "G1"),
        ({"rank": 1, "era": [1, "f"]}, "G1"),
        ({"rank": 0}, "G2"),
        ({"rank": 2}, "G2"),
        ({"rank": 1, "round": 2}, "G3"),
        ({"rank": 1, "round": 4, "size": 5}, "G2"),
    ],
)
def test_a_split_would_be_found(second, problem):
    who = "a" if problem == "G3" else "b"
    found = [text[:2] for text in wrong_worlds([("a", WORLD), (who, {**WORLD, **second})], {"job": (1, 4)})]
    assert found[:1] == [problem] * bool(problem)
