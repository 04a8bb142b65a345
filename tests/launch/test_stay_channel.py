"""The socket between an agent and the workers that stay: what each side bears with, with the real link of a worker."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from types import SimpleNamespace

import pytest

from rdzv.core import stay_messages as messages
from rdzv.core.model import WorkerRanks
from rdzv.core.stay_messages import CloseRun, FromAgent, FromWorker, RoundEnded, StoreCall, WorkerReady
from rdzv.errors import Closed, RoundOver, StoreTimeout, Unreachable, WrongArgument
from rdzv.launch.environment import NodeInRound
from rdzv.launch.stay_channel import StayChannel, StayingWorker

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the worker's link is in rdzv.torch")
NODE = NodeInRound(
    run_id="job", round=2, fence=9, reason="b lost", host="127.0.0.1", port=1, rank=1, nodes=2, workers=2,
    ranks=WorkerRanks(4, 6, 4, 6), role="default", restarts=0, max_restarts=0,
)  # fmt: skip
LONG_S = 20.0


class FakeStore:
    """The calls of a store, each with another end."""

    async def add(self, _key, amount):
        return amount + 1

    async def compare_set(self, *_):
        raise RuntimeError("a defect")

    async def get(self, key, _timeout_s):
        if key == "late":
            raise StoreTimeout([key], 1.0, 2)
        if key == "away":
            raise Unreachable("of this run", "no answer", 3.0)
        raise RoundOver(2, "c lost")

    async def set(self, _key, _value):
        raise ValueError("too large")

    async def wait(self, _keys, _timeout_s):
        await asyncio.get_running_loop().create_future()


@pytest.fixture
def calls(monkeypatch):
    names = ("add", "compare_set", "get", "set", "wait")
    monkeypatch.setattr("rdzv.launch.stay_channel.CALLS", {name: getattr(FakeStore, name) for name in names})


def play(scenario):
    """Run it with an open channel for two workers. It hears of news by an event."""

    async def main():
        closed, news = [], asyncio.Event()
        channel = StayChannel(2, news.set, lambda reason: (closed.append(reason), news.set()))
        await channel.open()

        async def until(holds):
            while not holds():
                await asyncio.wait_for(news.wait(), LONG_S)
                news.clear()

        try:
            await scenario(channel, until, closed)
        finally:
            channel.close()

    asyncio.run(main())


def in_thread(function, *args):
    return asyncio.get_running_loop().run_in_executor(None, function, *args)


async def in_round_2(channel, until):
    """Return the link of worker 0, and the world that it was given."""
    from rdzv.torch.agent import AgentRendezvous

    link = AgentRendezvous(channel.path, 0)
    link.prepare()
    joining = in_thread(link.join)
    await until(lambda: 0 in channel.workers)
    channel.give(SimpleNamespace(round=2, store=FakeStore()), NODE)
    return link, await joining


@needs_torch
def test_a_worker_is_given_its_rank_calls_the_store_and_hears_of_the_end(calls, monkeypatch):
    from rdzv.torch.agent import AgentRendezvous

    for name in ("RANK", "WORLD_SIZE", "RDZV_ROUND"):
        monkeypatch.setenv(name, "stale")

    async def scenario(channel, until, closed):
        link = AgentRendezvous(channel.path, 1)
        link.prepare()
        joining = in_thread(link.join)
        await until(lambda: 1 in channel.workers)
        assert channel.workers[1].is_ready
        channel.give(SimpleNamespace(round=2, store=FakeStore()), NODE)
        world = await joining
        assert (world.rank, world.size, world.round, world.fence, world.reason) == (5, 6, 2, 9, "b lost")
        assert "rank 5 of 6" in repr(world)
        assert not channel.workers[1].is_ready
        assert await in_thread(world.store.add, "n", 1) == 2
        for key, error in (("late", StoreTimeout), ("away", Unreachable), ("over", RoundOver)):
            with pytest.raises(error):
                await in_thread(world.store.get, key)
        with pytest.raises(ValueError, match="too large"):
            await in_thread(world.store.set, "k", b"v")
        with pytest.raises(ValueError, match="append"):
            await in_thread(world.store.append, "k", b"v")
        assert link.changed is None
        assert await in_thread(link.wait_changed, 0.01) is None
        channel.end_round(2, "c came to join", 1)
        change = await in_thread(link.wait_changed, LONG_S)
        assert (change.reason, change.newcomers) == ("c came to join", 1)
        with pytest.raises(RoundOver, match="the agent has left it"):
            await in_thread(world.store.add, "n", 1)
        link.close_run("it would fail again")
        await until(lambda: closed)
        assert closed == ["it would fail again"]
        again = in_thread(link.join)
        await until(lambda: channel.workers[1].is_ready)
        channel.end_run("job", "all are done", True)
        with pytest.raises(Closed) as ended:
            await again
        assert ended.value.success
        link.leave()
        await until(lambda: 1 not in channel.workers)
        with pytest.raises(Unreachable):
            link.close_run("too late")

    play(scenario)


@needs_torch
def test_a_text_for_the_keys_is_refused_as_by_any_other_store(calls):
    async def scenario(channel, until, _closed):
        link, world = await in_round_2(channel, until)
        for call in (world.store.check, world.store.multi_get, world.store.wait):
            with pytest.raises(WrongArgument, match="keys is 'done', of type str: it must be a list of keys"):
                await in_thread(call, "done")
        with pytest.raises(WrongArgument, match="values is 'done', of type str: it must be a dict of keys and values"):
            await in_thread(world.store.multi_set, "done")
        link.leave()

    play(scenario)


@needs_torch
def test_a_worker_that_waits_in_the_store_hears_that_its_agent_has_left_the_round(calls):
    async def scenario(channel, until, _closed):
        link, world = await in_round_2(channel, until)
        waiting = in_thread(world.store.wait, ["never"], 600.0)
        while not channel._calls:  # noqa: ASYNC110  Nobody is told of a call.
            await asyncio.sleep(0.01)
        channel.end_round(2, "a worker of this node failed")
        with pytest.raises(RoundOver, match="the agent has left it"):
            await asyncio.wait_for(waiting, LONG_S)
        link.leave()

    play(scenario)


class FakeWorker:
    """Keeps what is sent to it, as the frames of a worker."""

    def __init__(self):
        self.answers = []

    def write(self, data):
        self.answers.append(messages.decode(FromAgent, data[messages.SIZE_BYTES :]))


def test_every_call_gets_one_answer_also_one_that_comes_in_the_same_moment_as_the_end_of_the_round(calls):
    async def scenario(channel, _until, _closed):
        said = FakeWorker()
        worker = StayingWorker(said)
        channel._world = SimpleNamespace(round=2, store=FakeStore())
        wrong = [("add", ["n", 2**64]), ("set", ["k", b""]), ("compare_set", []), ("add", []), ("no such call", [])]
        for number, (name, arguments) in enumerate([("wait", [["k"], 1.0]), *wrong]):
            await channel._start_call(worker, StoreCall(number, 2, name, arguments))
        while len(channel._calls) > 1:  # noqa: ASYNC110  All but the first end in their first step.
            await asyncio.sleep(0)
        await channel._start_call(worker, StoreCall(6, 2, "wait", [["k"], 1.0]))
        channel.end_round(2, "c lost")
        await channel._start_call(worker, StoreCall(7, 2, "wait", [["k"], 1.0]))
        while channel._calls:
            await asyncio.wait_for(asyncio.wait(channel._calls), LONG_S)
        errors = ["over", *["wrong"] * len(wrong), "over", "over"]
        assert sorted((one.id, one.error) for one in said.answers) == list(enumerate(errors))

    play(scenario)


@needs_torch
def test_a_call_that_is_never_answered_ends_soon_after_the_round(calls, monkeypatch):
    monkeypatch.setattr("rdzv.torch.agent.ANSWER_S", 0.1)
    monkeypatch.setattr(StayChannel, "_answer", lambda *_: None)

    async def scenario(channel, until, _closed):
        link, world = await in_round_2(channel, until)
        waiting = in_thread(world.store.wait, ["never"], 600.0)
        try:
            while not channel._calls:  # noqa: ASYNC110  Nobody is told of a call.
                await asyncio.sleep(0.01)
            channel.end_round(2, "a worker of this node failed")
            with pytest.raises(RoundOver, match="the agent did not answer"):
                await asyncio.wait_for(waiting, LONG_S)
        finally:
            link.leave()

    play(scenario)


@needs_torch
def test_the_end_of_a_round_that_comes_after_the_worker_left_it_does_not_end_the_next(calls):
    async def scenario(channel, until, _closed):
        link, _ = await in_round_2(channel, until)
        again = in_thread(link.join)
        await until(lambda: channel.workers[0].is_ready)
        channel.workers[0].send(RoundEnded(2, "late"))
        channel.give(SimpleNamespace(round=3, store=FakeStore()), NODE)
        await again
        assert link.changed is None
        link.leave()

    play(scenario)


@needs_torch
def test_a_worker_whose_agent_is_gone_is_told():
    from rdzv.torch.agent import AgentRendezvous

    async def scenario(channel, until, _closed):
        link = AgentRendezvous(channel.path, 0)
        link.prepare()
        joining = in_thread(link.join)
        await until(lambda: 0 in channel.workers)
        channel.workers[0]._writer.close()
        with pytest.raises(Unreachable, match="it has ended"):
            await joining
        with pytest.raises(Unreachable):
            AgentRendezvous(channel.path + "x", 0).prepare()
        link.leave()

    play(scenario)


def frame(message):
    return messages.encode(message)


@pytest.mark.parametrize("data", [
    frame(StoreCall(1, 2, "get", ["k"])), frame(CloseRun("before it has said who it is")),
    frame(WorkerReady(2, 0)), frame(WorkerReady(-1, 0)), frame(WorkerReady(0, 0)) + frame(WorkerReady(1, 0)),
    b"\x00\x00\x00\x05hello", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", b"\x00",
])  # fmt: skip
def test_a_process_that_says_nonsense_is_not_heard_any_longer(data):
    async def scenario(channel, until, closed):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(channel.path)
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(LONG_S)
            assert await in_thread(stranger.recv, 1) == b""
        await until(lambda: not channel.workers)
        assert closed == []

    play(scenario)


def test_messages_are_bounded_and_of_one_kind():
    with pytest.raises(ValueError, match="at most 8388608 are allowed"):
        messages.encode(CloseRun("x" * messages.FRAME_MAX))
    with pytest.raises(ValueError, match="no message"):
        messages.decode(FromWorker, messages.encode(RoundEnded(1, "x"))[4:])
    assert messages.decode(FromAgent, messages.encode(RoundEnded(1, "x"))[4:]) == RoundEnded(1, "x")
