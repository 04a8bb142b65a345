"""The rules by which hosts become voters: row by row, and every cluster that a random story of faults can make."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from rdzv.engines.quorum.agreement import (
    HostRecord,
    Offer,
    VoterState,
    cluster_token,
    counted,
    decide,
    offer_of,
    quorum_name,
)

QUORUM = quorum_name("job", ("a:1", "b:1", "c:1"))
NUMBERS = ("n0", "n1", "n2")


def record(me: int = 0, number: str = "", chosen: tuple[str, ...] = ()) -> HostRecord:
    return HostRecord(QUORUM, me, number or NUMBERS[me], chosen)


def offer(*numbers: str, chosen: bool = False, quorum: str = QUORUM) -> Offer:
    return Offer(quorum, numbers, chosen)


def test_a_host_offers_its_own_number_and_those_it_has_heard():
    assert offer_of(record(), {}, 3) == offer("n0", "", "")
    assert offer_of(record(), {2: offer("", "", "n2")}, 3) == offer("n0", "", "n2")
    assert offer_of(record(chosen=NUMBERS), {}, 3) == offer(*NUMBERS, chosen=True)


def test_a_host_never_offers_what_another_only_repeats():
    """A number counts from the host that drew it: an offer that is passed on may be that of a life that is over."""
    assert offer_of(record(), {1: offer("", "n1", "n2")}, 3) == offer("n0", "n1", "")


def test_all_hosts_with_the_same_numbers_are_voters():
    decided = decide(record(), {1: offer(*NUMBERS), 2: offer(*NUMBERS)}, 3)
    assert decided.chosen == NUMBERS
    assert decided.standing is VoterState.VOTER


@pytest.mark.parametrize(
    "heard",
    [
        {},
        {1: offer(*NUMBERS)},
        {1: offer("n0", "n1", "")},
        {1: offer(*NUMBERS), 2: offer("n0", "", "n2")},
        {1: offer(*NUMBERS), 2: offer("n0", "other", "n2")},
        {1: offer(*NUMBERS), 2: offer(*NUMBERS, quorum="another run")},
        {1: offer(*NUMBERS), 2: offer("n0", "n1", chosen=True)},
        {1: offer(*NUMBERS), 2: offer("n0", "", "n2", chosen=True)},
    ],
)
def test_without_all_hosts_and_the_same_numbers_a_host_waits(heard):
    assert decide(record(), heard, 3) == record()


def test_a_choice_that_contains_our_number_is_ours_too():
    decided = decide(record(), {2: offer(*NUMBERS, chosen=True)}, 3)
    assert decided == record(chosen=NUMBERS)


def test_a_host_that_came_back_with_another_number_is_a_client_for_good():
    decided = decide(record(number="later"), {2: offer(*NUMBERS, chosen=True)}, 3)
    assert decided.standing is VoterState.CLIENT
    assert decide(decided, {1: offer("later", "n1", "n2"), 2: offer("later", "n1", "n2")}, 3) is decided
    # It tells others that come back empty, so that these become clients too.
    assert decide(record(1, "later"), {0: offer_of(decided, {}, 3)}, 3).standing is VoterState.CLIENT


def test_of_two_choices_the_one_with_our_number_counts():
    heard = {1: offer("x", "n1", "n2", chosen=True), 2: offer(*NUMBERS, chosen=True)}
    assert decide(record(), heard, 3).chosen == NUMBERS


def test_a_process_that_has_used_the_cluster_helps_to_make_no_other():
    heard = {1: offer(*NUMBERS), 2: offer(*NUMBERS)}
    assert offer_of(record(), counted(heard, formed=True), 3) == offer("n0", "", "")
    assert decide(record(), counted(heard, formed=True), 3) == record()
    heard[2] = offer(*NUMBERS, chosen=True)
    assert decide(record(), counted(heard, formed=True), 3).chosen == NUMBERS


def test_run_list_and_every_number_name_the_cluster():
    tokens = {cluster_token(record(chosen=numbers)) for numbers in (NUMBERS, ("n0", "n1", "x"), ("n0", "n2", "n1"))}
    tokens.add(cluster_token(msgspec.structs.replace(record(chosen=NUMBERS), quorum=quorum_name("job", ("a:1", "b:1", "d:1")))))
    assert len(tokens) == 4
    assert quorum_name("job", ("a:1",)) != quorum_name("other", ("a:1",))


class Story:
    """Hosts that tell each other offers, which arrive late or never, and that lose their processes or their disks."""

    def __init__(self, seed: int, size: int, *, numbers_survive: bool = False) -> None:
        self.random = random.Random(seed)
        self.size = size
        self.numbers_survive = numbers_survive
        self.disks: list[HostRecord | None] = [None] * size
        self.heard: list[dict[int, Offer]] = [{} for _ in range(size)]
        self.under_way: list[tuple[int, int, Offer]] = []
        self.drawn = 0
        self.voted: dict[tuple[str, ...], Counter[int]] = {}
        """By cluster, the hosts that have started a member of it, ever."""

    def start(self, host: int) -> HostRecord:
        found = self.disks[host]
        if found is None:
            self.drawn += 1
            found = self.disks[host] = HostRecord(QUORUM, host, f"n{host if self.numbers_survive else self.drawn}")
        return found

    def step(self) -> None:
        host, other = self.random.sample(range(self.size), 2)
        event = self.random.random()
        if event < 0.45:
            self.under_way.append((host, other, offer_of(self.start(host), self.heard[host], self.size)))
        elif event < 0.98 and self.under_way:
            sender, receiver, told = self.under_way.pop(self.random.randrange(len(self.under_way)))
            record = self.start(receiver)
            self.heard[receiver][sender] = told
            decided = decide(record, self.heard[receiver], self.size)
            if decided.standing is VoterState.VOTER:
                self.voted.setdefault(decided.chosen, Counter())[receiver] += decided is not record
            self.disks[receiver] = decided
        elif event < 0.99:
            self.heard[host].clear()  # Its process died; its disk is there.
        else:
            self.heard[host].clear()
            self.disks[host] = None

    def able(self) -> list[tuple[str, ...]]:
        """Return the clusters that a majority has ever started, whether it has its disks still or not."""
        return [chosen for chosen, hosts in self.voted.items() if len(hosts) > self.size // 2]

    def working(self) -> set[tuple[str, ...]]:
        """Return the clusters for which a majority has its data now."""
        voters = Counter(disk.chosen for disk in self.disks if disk is not None and disk.standing is VoterState.VOTER)
        return {chosen for chosen, count in voters.items() if count > self.size // 2}


def forgets(story: Story) -> bool:
    """Whether a host has started twice in one cluster: the second time without its votes of the first."""
    return any(max(hosts.values()) > 1 for hosts in story.voted.values())


@pytest.mark.parametrize("size", [3, 5])
def test_no_story_makes_two_clusters_or_a_voter_without_memory(size):
    formed = 0
    for seed in range(60):
        story = Story(seed, size)
        for _ in range(100 * size):
            story.step()
            assert len(story.working()) <= 1, seed
        assert not forgets(story), seed
        formed += bool(story.able())
    assert formed > 10, "most stories form a cluster"


def test_a_number_that_outlives_its_disk_would_be_found():
    story = Story(1, 3, numbers_survive=True)
    assert any(story.step() or forgets(story) for _ in range(20_000))
