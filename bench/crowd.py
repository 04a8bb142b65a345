"""A process with many members, or with many clients of a peer: prepares them and lets all act at one instant.

`common.Crowd` starts it and talks to it in lines of JSON. Times are of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from datetime import timedelta

import msgspec
from common import allow_files
from floor import Floor
from servers import torchft

from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.port import Driver, Session
from rdzv.errors import Unreachable
from rdzv.member.member import Member
from rdzv.system.node import LocalNode

LIMIT_S = 600.0
CROWDED = 5000
"""Above so many members on one machine each has ports of its own. A member binds any free port otherwise, and above 7,000
listening sockets the kernel takes 1.5 ms to find one instead of 9 us. Nodes of their own do not meet this."""
FIRST_PORT = 10_000
LOOP_LATE_S = 0.003
"""An event loop rounds its waits up to whole milliseconds. Threads begin on time, so those in a loop must, too."""


class Connected:
    """A driver that is connected in advance. The first `connect` returns that session; later ones connect."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._session: Session | None = None
        self.endpoint = driver.endpoint
        self.close = driver.close

    async def prepare(self) -> None:
        """Connect, however often that must be tried: thousands do so at once, on a node that may be busy."""
        deadline = time.monotonic() + LIMIT_S
        while self._session is None:
            try:
                self._session = await self._driver.connect()
            except Unreachable:
                if time.monotonic() > deadline:
                    raise

    async def connect(self) -> Session:
        session, self._session = self._session, None
        return session or await self._driver.connect()


def own_ports(settings: Settings, index: int) -> Settings:
    """Give a member two ports of its own for the sockets that it binds, below the range of outgoing connections."""
    first = FIRST_PORT + 2 * index
    return msgspec.structs.replace(settings, bootstrap_port=(first, first + 1))


class Members:
    """Real members in one event loop. With `warm`, their connections are made in advance."""

    def __init__(self, spec: dict) -> None:
        size = spec["size"]
        settings = Settings.make(
            spec["address"],
            run_id=spec.get("run_id", "bench"),
            min_nodes=size,
            max_nodes=size,
            is_host=False,
            **spec.get("settings", {}),
        )
        self._drivers = [open_driver(settings) for _ in spec["mine"]]
        self._warm = spec.get("warm", False)
        self._at_once = spec.get("at_once", 200)
        if self._warm:
            self._drivers = [Connected(driver) for driver in self._drivers]
        nodes = [LocalNode(f"node{index}") for index in spec["mine"]]
        each = [own_ports(settings, index) if size > CROWDED else settings for index in spec["mine"]]
        self.members = [Member(*one) for one in zip(self._drivers, each, nodes, strict=True)]
        self._worlds = [None] * len(nodes)

    async def prepare(self) -> None:
        if self._warm:
            for start in range(0, len(self._drivers), self._at_once):
                await asyncio.gather(*(driver.prepare() for driver in self._drivers[start : start + self._at_once]))

    async def form(self, index: int) -> None:
        self._worlds[index] = await self.members[index].join(LIMIT_S)

    async def check(self) -> None:
        size = {world.size for world in self._worlds}
        assert len(size) == 1, size
        assert len({world.rank for world in self._worlds}) == len(self._worlds), "one rank twice"
        assert len({world.round for world in self._worlds}) == 1, "two rounds"

    async def told(self) -> float:
        """Return the time at which the last member was told that its world has changed."""

        async def one(member: Member) -> float:
            assert await member.wait_changed(LIMIT_S), "a member was never told"
            return time.monotonic()

        return max(await asyncio.gather(*(one(member) for member in self.members)))

    async def stop(self) -> None:
        await asyncio.gather(*(member.leave() for member in self.members))


class Lighthouse:
    """Clients of torchft, one thread each: their calls block outside of Python."""

    def __init__(self, spec: dict) -> None:
        self._count = len(spec["mine"])
        self._spec = spec
        self._seen = [0] * self._count

    def prepare(self) -> None:
        make = torchft().LighthouseClient
        self._clients = [make(self._spec["address"], timedelta(seconds=60)) for _ in range(self._count)]

    def form(self, index: int) -> None:
        name = f"node{self._spec['mine'][index]}"
        quorum = self._clients[index].quorum(name, timedelta(seconds=LIMIT_S), step=1, world_size=1, shrink_only=False)
        self._seen[index] = len(quorum.participants)

    def check(self) -> None:
        assert set(self._seen) == {self._spec["size"]}

    def stop(self) -> None:
        pass


class Handlers:
    """Rendezvous handlers of torchrun, one thread each: torch's own (c10d) or ours, made by the same registry."""

    def __init__(self, spec: dict) -> None:
        self._spec = spec
        self._infos = [None] * len(spec["mine"])

    def prepare(self) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters  # noqa: PLC0415  Seconds.
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry  # noqa: PLC0415

        from rdzv.torchrun.plugin import create_rdzv  # noqa: PLC0415

        backend, size = self._spec["backend"], self._spec["size"]
        registry.register("rdzv", create_rdzv)  # In case the entry point is not installed.
        self._handlers = []
        for index in self._spec["mine"]:
            # All are on one node, so our members need a slot each; torch's handlers have a counter.
            conf = {"slot": str(index)} if backend == "rdzv" else {"join_timeout": self._spec["limit_s"]}
            where = (backend, self._spec["address"], self._spec["run_id"], size, size, "127.0.0.1")
            is_host = self._spec.get("hosted", False) and index == 0
            self._handlers.append(registry.create_handler(RendezvousParameters(*where, is_host=is_host, **conf)))

    def form(self, index: int) -> None:
        self._infos[index] = self._handlers[index].next_rendezvous()

    def check(self) -> None:
        assert {info.world_size for info in self._infos} == {self._spec["size"]}
        assert len({info.rank for info in self._infos}) == len(self._infos), "one rank twice"

    def stop(self) -> None:
        """Shut down the handlers; torch's would go on renewing."""
        for handler in self._handlers:
            handler.shutdown()


def _kind(name: str) -> type:
    if name == "agents":
        from store import Agents  # noqa: PLC0415  It needs torch.

        return Agents
    return {"members": Members, "floor": Floor, "lighthouse": Lighthouse, "handlers": Handlers}[name]


class Act:
    """One forming: the times at which each member began and was done."""

    def __init__(self, spec: dict, order: dict) -> None:
        self._late = spec["size"] - 1
        self._mine = spec["mine"]
        self._gap_s = order["gap_s"]
        self.at = order["at"]
        self.began = [0.0] * len(self._mine)
        self.done = [0.0] * len(self._mine)

    def begins_at(self, index: int) -> float:
        return self.at + (self._gap_s if self._mine[index] == self._late else 0.0)

    def in_threads(self, crowd: Lighthouse | Handlers) -> None:
        problems = []

        def one(index: int) -> None:
            time.sleep(max(0.0, self.begins_at(index) - time.monotonic()))
            self.began[index] = time.monotonic()
            try:
                crowd.form(index)
            except Exception as problem:  # noqa: BLE001  Raised below.
                problems.append(problem)
            self.done[index] = time.monotonic()

        threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(self._mine))]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if problems:
            raise problems[0]
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"some members have not formed within {LIMIT_S:g} s")
        crowd.check()

    async def in_loop(self, crowd: Members | Floor) -> None:
        async def one(index: int) -> None:
            delay_s = self.begins_at(index) - time.monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            self.began[index] = time.monotonic()
            await crowd.form(index)
            self.done[index] = time.monotonic()

        await asyncio.sleep(max(0.0, self.at - time.monotonic() - LOOP_LATE_S))
        time.sleep(max(0.0, self.at - time.monotonic()))  # noqa: ASYNC251  The loop has nothing else to do.
        await asyncio.gather(*(one(index) for index in range(len(self._mine))))
        await crowd.check()


def reply(words: dict) -> None:
    print(json.dumps(words), flush=True)


async def serve() -> None:
    """Execute the orders from standard input. The loop runs on between them, to keep members alive."""
    crowd = None
    spec: dict = {}
    while True:
        line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        order = json.loads(line or '{"act": "stop"}')
        if order["act"] == "form":
            act = Act(spec, order)
            before_s = time.process_time()
            await _finish(act.in_loop(crowd) if isinstance(crowd, (Members, Floor)) else act.in_threads(crowd))
            cpu_s = time.process_time() - before_s
            extra = crowd.extra() if hasattr(crowd, "extra") else {}
            reply({"began": max(act.began), "done": max(act.done), "cpu_s": cpu_s, "extra": extra})
            continue
        if order["act"] == "told":
            reply({"told": await crowd.told()})
            continue
        if crowd is not None:
            await _finish(crowd.stop())
            crowd = None
        if order["act"] == "stop":
            return
        if order["act"] == "leave":
            reply({"left": True})
            continue
        spec = order["spec"]
        crowd = _kind(spec["kind"])(spec)
        await _finish(crowd.prepare())
        gc.freeze()  # In a job, each member has its own process, and its collector does not scan the others.
        reply({"ready": True})


async def _finish(done: object) -> None:
    """Await the result of the kinds that run in the loop; the others return None."""
    if done is not None:
        await done


def main() -> None:
    allow_files()
    try:
        asyncio.run(serve())
    except Exception as problem:
        reply({"problem": f"{type(problem).__name__}: {problem}"})
        raise


if __name__ == "__main__":
    main()
