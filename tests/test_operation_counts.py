"""The cost of forming, sealing, re-forming and being idle, counted on the wire and in the simulator.

Times depend on the machine; these counts do not, and a time that got worse for a reason shows here first. Each bound is what is
needed, with no room for one frame more per member.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import sys

import pytest
from sim_form import form
from tap import Tap

from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import NODES_MAX, Settings
from rdzv.engines import leases, reference, tree
from rdzv.engines.embedded import run, server_core, session
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.embedded.server import Server
from rdzv.member import leader
from rdzv.member.member import Member
from rdzv.system.node import LocalNode

MEMBERS = 50
LONG_S = 60.0
JOIN = {"Hello": 1, "TxnThenWatch": 1}
"""All that a member says to be given a world: it comes in, with its lease and its watch. Its line is shown to it."""


CALLS = 110
"""Calls in the server for each member that greets it, joins and is told of the seal."""


class Crowd:
    """Members of one run that reach their server through a relay which counts."""

    def __init__(self, tap, **options):
        endpoint = Endpoint.parse(tap.address)
        settings = Settings.make(endpoint, run_id="job", min_nodes=MEMBERS, max_nodes=MEMBERS, **options)
        self.tap = tap
        self.members = [
            Member(RemoteDriver(endpoint, run_id="job"), settings, LocalNode(f"node{number:02}")) for number in range(MEMBERS)
        ]

    async def join(self):
        worlds = await asyncio.gather(*(member.join() for member in self.members))
        assert len({world.rank for world in worlds}) == len(worlds)

    def lines(self):
        """As they are now: the leader's, and the others'."""
        assert len(self.tap.connections) == MEMBERS, "one connection per member"
        lines = copy.deepcopy(self.tap.connections)
        leader = lines[self.tap.connections.index(self.leader)]
        return leader, [line for line in lines if line is not leader]

    def know_leader(self):
        """The one that has watched the run beside what everybody watches."""
        (self.leader,) = (line for line in self.tap.connections if line.asked["WatchStart"])


def played(story, **options):
    """The story, told of a crowd over real sockets."""

    async def scenario():
        server = Server(("127.0.0.1", 0))
        await server.start()
        try:
            async with Tap(f"127.0.0.1:{server.port}") as tap:
                crowd = Crowd(tap, **options)
                try:
                    return await story(crowd)
                finally:
                    await asyncio.gather(*(member.leave() for member in crowd.members))
        finally:
            await server.stop()

    return asyncio.run(asyncio.wait_for(scenario(), LONG_S))


async def until(holds):
    """All have been told of the first head, for instance: nobody can be waited for but the relay that sees it pass."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


def worst(lines, count):
    return max(count(line) for line in lines)


def more(counted, allowed):
    """Return the frames beyond those allowed."""
    return dict(counted - collections.Counter(allowed))


async def all_join(crowd):
    await crowd.join()
    crowd.know_leader()
    return crowd.lines()


def test_a_join_is_one_request():
    leader, others = played(all_join, lease=60)
    for line in others:
        assert not more(line.asked, JOIN)
    # The run begins with a sealed round, since all are here by then.
    assert worst(others, lambda line: line.told["WatchNews"]) <= 1
    assert worst(others, lambda line: line.bytes) <= 2_900
    # Beyond its own join: one list, with which the run gets its lease, one watch of the run, one write to begin and to seal.
    assert not more(leader.asked, {**JOIN, "Txn": 2, "WatchStart": 1})
    assert leader.bytes <= 2_900 + MEMBERS * 700


def test_the_largest_run_is_sealed_in_one_transaction(monkeypatch):
    """Else its members would be told twice: of their entries, and then of the head."""
    assert leader.BATCH_MAX == NODES_MAX
    monkeypatch.setattr(leader, "BATCH_MAX", MEMBERS)
    one, others = played(all_join, lease=60)
    assert worst(others, lambda line: line.told["WatchNews"]) <= 1
    assert not more(one.asked, {**JOIN, "Txn": 2, "WatchStart": 1})


def test_forming_takes_the_server_few_calls_for_each_member():
    """Python calls in the files that only the server runs are most of its time, and do not depend on the machine."""
    files = {module.__file__ for module in (leases, reference, run, server_core, session, tree)}
    calls = collections.Counter()

    def count(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename in files:
            calls[frame.f_code.co_filename] += 1

    async def story(crowd):
        sys.setprofile(count)
        try:
            await all_join(crowd)
        finally:
            sys.setprofile(None)

    played(story)
    assert calls.total() / MEMBERS <= CALLS, calls


def test_a_seal_is_one_notice_for_each_member_and_one_write_of_the_leader():
    async def story(crowd):
        *early, late = crowd.members
        waiting = [asyncio.create_task(member.join()) for member in early]
        lines = crowd.tap.connections
        await until(lambda: len(lines) == len(early) and all(line.told["WatchNews"] for line in lines))
        crowd.know_leader()
        crowd.tap.reset()
        await late.join()
        await asyncio.gather(*waiting)
        return crowd.lines()

    leader, others = played(story, lease=60)
    newcomer = next(line for line in others if line.asked["Hello"])
    for line in others:
        if line is not newcomer:
            assert not line.asked
            assert not more(line.told, {"WatchNews": 1})
    assert not more(newcomer.asked, JOIN)
    assert not more(leader.asked, {"Txn": 1})


def test_to_form_again_is_one_put_for_each_member():
    async def story(crowd):
        await all_join(crowd)
        crowd.tap.reset()
        await crowd.join()
        return crowd.lines()

    leader, others = played(story, lease=60)
    for line in others:
        assert not more(line.asked, {"Txn": 1})
    # The round is broken, and the next one is sealed. Of its own record and its predecessor's it wants to hear only the end.
    assert worst(others, lambda line: line.told["WatchNews"]) <= 2
    # About 200 bytes of it are the cause in the sealed head, by which every member knows why there is a new round.
    assert worst(others, lambda line: line.bytes) <= 2_450
    assert not more(leader.asked, {"Txn": 1 + 2})


def test_to_form_again_is_one_put_for_each_member_however_long_it_takes():
    """In a large run workers stop at different times. Meanwhile nobody asks whether the leader is dead (T8.7)."""

    async def story(crowd):
        await all_join(crowd)
        crowd.tap.reset()
        *early, late = [member for member in crowd.members if member.presence.leader is None]
        waiting = [asyncio.create_task(member.join()) for member in crowd.members if member is not late]
        await until(lambda: sum(line.asked["Txn"] for line in crowd.tap.connections) >= len(early))
        await asyncio.sleep(0.5)  # Twice as long as members of a small run wait before they ask.
        await late.join()
        await asyncio.gather(*waiting)
        return crowd.lines()

    _leader, others = played(story, lease=60)
    for line in others:
        assert not more(line.asked, {"Txn": 1})


def test_an_idle_member_says_one_word_per_third_of_its_lease_and_hears_one():
    lease_s, idle_s = 1.5, 3.0

    async def story(crowd):
        await all_join(crowd)
        await asyncio.sleep(lease_s / 3)
        crowd.tap.reset()
        await asyncio.sleep(idle_s)
        return crowd.lines()

    leader, others = played(story, lease=lease_s)
    beats = round(idle_s / (lease_s / 3))
    for line in (leader, *others):
        assert set(line.asked) <= {"Renew"}
        assert set(line.told) <= {"Acknowledged"}
        assert beats - 2 <= line.asked["Renew"] <= beats + 1
        assert line.bytes <= (beats + 1) * 20


STORE_CALLS = {
    "get": (lambda store: store.get("k"), {"Txn": 1}, 300),
    "multi_get": (lambda store: store.multi_get(["k", "l", "m"]), {"Txn": 1}, 700),
    "set": (lambda store: store.set("k", b"v" * 100), {"Txn": 1}, 850),
    "multi_set": (lambda store: store.multi_set({"k": b"v" * 100, "l": b"", "m": b""}), {"Txn": 1}, 1_000),
    "check": (lambda store: store.check(["k", "none"]), {"Txn": 1}, 400),
    "add": (lambda store: store.add("n", 1), {"Txn": 2}, 1_000),
}
"""A call of the store with a value of 100 bytes: its requests, and the bytes of both directions, at most."""


def test_a_call_of_the_store_is_one_request_and_as_many_bytes():
    async def story(crowd):
        worlds = await asyncio.gather(*(member.join() for member in crowd.members))
        store = worlds[0].store
        await store.multi_set({"k": b"v" * 100, "l": b"", "m": b""})
        found = {}
        for name, (call, *_) in STORE_CALLS.items():
            await call(store)  # The mark is there, as for all writes but a member's first.
            crowd.tap.reset()
            await call(store)
            found[name] = copy.deepcopy(crowd.tap.total())
        return found

    found = played(story, lease=60)
    for name, (_, asked, size) in STORE_CALLS.items():
        assert not more(found[name].asked, asked), name
        assert found[name].bytes <= size, f"{name}: {found[name].bytes} bytes"


@pytest.mark.parametrize("call", ["get", "multi_get", "wait"])
def test_to_wait_for_keys_of_the_store_is_one_read_and_one_watch(call):
    """However many keys come one after the other: the watch shows their values."""
    keys = ["0"] if call == "get" else [str(number) for number in range(20)]

    async def story(crowd):
        worlds = await asyncio.gather(*(member.join() for member in crowd.members))
        waiter, other = worlds[0].store, worlds[1].store
        crowd.tap.reset()
        waiting = asyncio.create_task(waiter.get("0") if call == "get" else getattr(waiter, call)(keys))
        await until(lambda: crowd.tap.total().asked["WatchStart"])
        for key in keys:
            await other.set(key, "v")
        found = await waiting
        await until(lambda: crowd.tap.total().asked["WatchStop"])
        return found, copy.deepcopy(next(line for line in crowd.tap.connections if line.asked["WatchStart"]))

    found, line = played(story, lease=60)
    assert found == {"get": b"v", "multi_get": [b"v"] * 20, "wait": None}[call]
    assert not more(line.asked, {"Txn": 1, "WatchStart": 1, "WatchStop": 1})
    assert not more(line.told, {"TxnDone": 1, "WatchNews": len(keys)})


@pytest.mark.parametrize("members", [100, 1000])
def test_in_the_simulator_too_a_join_costs_what_it_costs_however_many_they_are(members):
    counters, _, _ = form(members)
    *others, leader = sorted(counters.values(), key=lambda one: one.bytes)
    # The greeting and coming in; then, until all are gone, the end of the watch and the goodbye.
    assert sum(one.operations for one in counters.values()) <= 4 * members + 10
    assert max(one.operations for one in others) <= 4
    assert max(one.bytes for one in others) <= 3_000
    assert leader.operations <= 8
    assert leader.bytes <= 755 * members + 3_000
