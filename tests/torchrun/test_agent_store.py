"""The store that torch's agent gets, called by torch's own code for ranks and the barrier."""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.utils import store as store_util

from rdzv import Rendezvous
from rdzv.torchrun.agent_store import BATCH, TERMINAL, AgentStore
from support.timing import within
from support.torchrun_jobs import wait_for

LONG_S = 20.0
QUICK = {"last_call": 0.2, "settle": 0.1, "drain_settle": 0.1, "grow_every": 0, "lease": 2, "closed_for": 5}
_engines = itertools.count()


class FakeHandler:
    """A fake of the handler."""

    def __init__(self, rendezvous):
        self.rendezvous = rendezvous
        self.learned = []
        self.finished = threading.Event()
        self.closed = threading.Event()

    def is_over(self):
        return self.rendezvous.changed is not None

    def learn_workers(self, role, workers):
        self.learned.append((role, workers))
        return True

    def finish(self, timeout_s):
        self.finished.set()

    def is_known_closed(self):
        return self.closed.is_set()


class Agents:
    """Agents in one round, with so many workers each; 0: they did not say how many before it."""

    def __init__(self, size, workers=None):
        self.size = size
        self.workers = workers or [2] * size
        self.stack = ExitStack()
        self.pool = self.stack.enter_context(ThreadPoolExecutor(size + 1))

    def __enter__(self):
        endpoint = f"memory://agent-store-{next(_engines)}"
        self.members = [
            self.stack.enter_context(
                Rendezvous(endpoint, run_id="job", min_nodes=1, max_nodes=self.size, slot=str(slot), **QUICK)
            )
            for slot in range(self.size)
        ]
        join = lambda member, workers: member.join(LONG_S, workers=workers, role="trainer")  # noqa: E731
        worlds = list(self.pool.map(join, self.members, self.workers))
        self.handlers = [FakeHandler(member) for member in self.members]
        pairs = sorted(zip(worlds, self.handlers, strict=True), key=lambda pair: pair[0].rank)
        self.worlds, self.handlers = zip(*pairs, strict=True)
        self.stores = [AgentStore(world, handler) for world, handler in pairs]
        return self

    def __exit__(self, *error):
        self.stack.close()

    def assign(self, rank, workers=0, role="trainer"):
        """Assign ranks, as torch's agent does after each rendezvous."""
        workers = workers or self.workers[rank]
        spec = SimpleNamespace(role=role, local_world_size=workers)
        found = SimpleElasticAgent._assign_worker_ranks(None, self.stores[rank], rank, self.size, spec)
        return [(worker.global_rank, worker.world_size, worker.role_rank, worker.role_world_size) for worker in found]


def barrier(store, size, timeout_s=LONG_S):
    store_util.barrier(store, size, TERMINAL, timeout_s)


@pytest.mark.parametrize("said", [True, False])
def test_all_agents_give_their_workers_ranks_of_one_world(said):
    """By the seal, or by an exchange if they did not say before it how many workers they have."""
    with Agents(3, [2, 1, 3] if said else [0, 0, 0]) as agents:
        found = list(agents.pool.map(agents.assign, range(3), [2, 1, 3]))
        assert agents.worlds[0].store.num_keys() == (0 if said else 6)
        assert [handler.learned for handler in agents.handlers] == [[("trainer", 2)], [("trainer", 1)], [("trainer", 3)]]
    assert found == [[(0, 6, 0, 6), (1, 6, 1, 6)], [(2, 6, 2, 6)], [(3, 6, 3, 6), (4, 6, 4, 6), (5, 6, 5, 6)]]


def test_ranks_that_were_sealed_cost_no_request(monkeypatch):
    with Agents(2) as agents:
        for store in agents.stores:
            monkeypatch.setattr(store, "_store", None)  # Every call of the round's store would fail.
        assert list(agents.pool.map(agents.assign, range(2))) == [[(0, 4, 0, 4), (1, 4, 1, 4)], [(2, 4, 2, 4), (3, 4, 3, 4)]]


def test_the_agent_of_rank_0_may_also_read_what_the_others_start():
    """It computes ranks from that and writes them, but nobody reads those."""
    with Agents(2) as agents:
        assert agents.assign(0) == [(0, 4, 0, 4), (1, 4, 1, 4)]
        roles = agents.stores[0].multi_get(["torchelastic/role_info/0", "torchelastic/role_info/1"])
        assert [json.loads(role)["local_world_size"] for role in roles] == [2, 2]


def test_many_keys_go_in_batches_that_every_engine_takes():
    with Agents(2) as agents:
        keys = [f"some/key/{number}" for number in range(2 * BATCH + 1)]
        asked = []
        real = agents.worlds[0].store.multi_set
        agents.worlds[0].store.multi_set = lambda values: (asked.append(len(values)), real(values))
        agents.stores[0].multi_set(keys, ["x"] * len(keys))
        assert asked == [BATCH, BATCH, 1]
        assert agents.stores[1].multi_get(keys) == [b"x"] * len(keys)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_loss_the_agent_still_gets_the_ranks_that_were_sealed(rank):
    with Agents(2, [8, 4]) as agents:
        agents.handlers[1 - rank].rendezvous.leave(reason="gone")
        wait_for(agents.handlers[rank].is_over)
        first, total = agents.assign(rank)[0][:2]
        assert (first, total) == (0 if rank == 0 else 8, 12)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_were_not_sealed_are_not_made_up(rank):
    with Agents(2, [0, 0]) as agents:
        waiting = agents.pool.submit(agents.assign, rank, 2)
        agents.handlers[1 - rank].rendezvous.leave(reason="gone")
        with pytest.raises(DistStoreError, match="round 1 is over"):
            waiting.result(LONG_S)


def test_a_key_of_the_ranks_that_torch_did_not_write_is_any_key():
    with Agents(2, [0, 0]) as agents:
        for value in ("x", "[]", "{}"):
            agents.stores[1].set("torchelastic/role_info/1", value)
        assert agents.stores[0].get("torchelastic/role_info/1") == b"{}"
        assert agents.handlers[1].learned == []


def test_other_keys_behave_as_in_any_store():
    with Agents(2) as agents:
        one, other = agents.stores
        assert one.timeout == timedelta(seconds=300)
        one.set("k", "v")
        assert other.get("k") == b"v"
        assert (one.add("n", 2), other.add("n", 3)) == (2, 5)
        assert one.check(["k", "n"]) is True
        assert one.check(["nothing"]) is False
        assert one.compare_set("k", "v", "w") == b"w"
        one.append("k", "x")
        other.wait(["k"], timedelta(seconds=LONG_S))
        assert other.get("k") == b"wx"
        assert one.num_keys() == 2
        assert (one.delete_key("k"), one.delete_key("k")) == (True, False)
        with pytest.raises(DistStoreError, match="'k' not set within"):
            one.wait(["k"], timedelta(seconds=0.1))


# ---- the barrier at the end


def test_the_barrier_says_that_we_are_done_and_is_over_when_the_run_is_closed():
    with Agents(2) as agents:
        handler = agents.handlers[0]
        waiting = agents.pool.submit(barrier, agents.stores[0], 2)
        assert handler.finished.wait(LONG_S)
        assert not waiting.done()
        handler.closed.set()
        waiting.result(LONG_S)
        assert agents.worlds[0].store.num_keys() == 0


def test_the_barrier_is_over_when_the_round_breaks():
    with Agents(2) as agents:
        waiting = agents.pool.submit(barrier, agents.stores[0], 2)
        assert agents.handlers[0].finished.wait(LONG_S)
        agents.handlers[1].rendezvous.leave(reason="gone")
        waiting.result(LONG_S)
        assert agents.handlers[0].is_over()


def test_the_barrier_ends_in_its_time_without_an_error(caplog):
    with Agents(2) as agents:
        began_at = time.monotonic()
        barrier(agents.stores[0], 2, timeout_s=0.3)
        within(time.monotonic() - began_at, 0.3 + 3)
        assert "the others are not done after 0 s" in caplog.text
