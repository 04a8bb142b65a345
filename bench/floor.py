"""The lower bound of forming: the requests and notifications of a join, without rules and without error handling.

Each client sends `joins` join transactions, the first with its lease; all but the last fail and read the state instead. It
watches five keys and gets `heads` heads, the last together with its entry of the table. The first client also gets every
member and, once all are there, writes the heads and the table. Frames, server and sizes of values are those of real members,
so the difference to them is the cost of member code. `joins` and `heads` are counted from real members.
"""

from __future__ import annotations

import asyncio

from rdzv.engines.embedded import frames
from rdzv.engines.embedded.features import TxnThenWatch, mark, welcome_decoder
from rdzv.engines.embedded.frames import Hello, LeaseGrant, Txn, TxnDone, WatchNews, WatchStart
from rdzv.engines.port import Created, Equals, Get, List, Order, Put

ROOT = "rdzv/floor/group/"
HEAD, SETTINGS, MEMBERS = ROOT + "round", ROOT + "settings", ROOT + "members/"
RECORD_SIZE, ENTRY_SIZE, HEAD_SIZE, SETTINGS_SIZE = 127, 114, 267, 185
"""Bytes of the records of a plain run."""
SEALED = b"s"


def entry_of(index: int, table: str = "0123456789abcdef") -> str:
    return f"{ROOT}ranks/{table}/{index:016x}"


class Bare(asyncio.Protocol):
    """One client. Each reply determines its next request."""

    def __init__(self, index: int, size: int, joins: int, heads: int) -> None:
        loop = asyncio.get_running_loop()
        self.welcome, self.done = loop.create_future(), loop.create_future()
        self._index = index
        self._size = size
        self._joins = joins
        self._heads = heads
        self._own = f"{MEMBERS}{index:016x}"
        self._entry = entry_of(index)
        self._greeted = False
        self._rest = b""
        self._asked = 0
        self._next = self._joined
        self._lease = (1 << 61) + index
        self._seen = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.write(frames.PREAMBLE + frames.encode(Hello("floor", mark(f"{self._index:016x}"), 1)))

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, end = 0, len(data)
        if not self._greeted and end >= len(frames.PREAMBLE):
            self._greeted, at = True, len(frames.PREAMBLE)
        while self._greeted and end - at >= 4:
            size = int.from_bytes(data[at : at + 4], "big")
            if end - at - 4 < size:
                break
            self._received(data[at + 4 : at + 4 + size])
            at += 4 + size
        self._rest = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server hung up"))

    def _received(self, payload: bytes) -> None:
        if not self.welcome.done():
            self.welcome.set_result(welcome_decoder.decode(payload))
            return
        answer = frames.answer_decoder.decode(payload)
        if isinstance(answer, WatchNews):
            self._notified(answer)
        else:
            self._next(answer)

    def _ask(self, frame: type[frames.Frame], then: object, *words: object) -> None:
        self._asked += 1
        self._next = then
        self._transport.write(frames.encode(frame(self._asked, *words)))

    # ---- the exchange

    def form(self) -> None:
        self._join((LeaseGrant(self._lease, 10.0),))

    def _join(self, grants: tuple[LeaseGrant, ...] = ()) -> None:
        self._joins -= 1
        here = Created(self._own, 0 if self._joins == 0 else 1)
        put = Put(self._own, b"x" * RECORD_SIZE, self._lease)
        ban = f"{ROOT}ban/node{self._index}"
        around = (Get(SETTINGS), Get(HEAD), Get(ban), List(MEMBERS, Order.ANY, 1), Get(self._own))
        before = (List(MEMBERS, Order.ANY, 1, after=self._own), List(MEMBERS, Order.ANY, 1))
        compares = (Equals(SETTINGS, b"x" * SETTINGS_SIZE), here, Created(ban, 0))
        targets = (HEAD, f"{ROOT}asks/{self._index}", entry_of(self._index, "*"))
        watch = (1, targets, (self._own,), (0, 1))
        self._ask(TxnThenWatch, self._joined, compares, (*before, put, Get(HEAD)), around, (), grants, *watch)

    def _joined(self, answer: TxnDone) -> None:
        if not answer.outcome.succeeded:
            self._join()
        elif self._index == 0:
            self._ask(Txn, self._listed, (), (List(MEMBERS),), ())

    def _listed(self, answer: TxnDone) -> None:
        self._seen = len(answer.outcome.reads[0])
        self._transport.write(frames.encode(WatchStart(2, (MEMBERS,), answer.outcome.revision)))
        self._seal()

    def _notified(self, news: WatchNews) -> None:
        if news.watch == 2:
            self._seen += len(news.batch.events)
            self._seal()
        elif any(event.key == HEAD and event.item.value[:1] == SEALED for event in news.batch.events):
            assert any(event.key == self._entry for event in news.batch.events), "there is no entry for it"
            self.done.set_result(None)

    def _seal(self) -> None:
        """Write heads and table once all members are there. The replies do not matter: this client watches the head, too."""
        if self._seen != self._size:
            return
        self._next = lambda _answer: None
        for _ in range(self._heads - 1):
            self._ask(Txn, self._next, (), (Put(HEAD, b"o" * HEAD_SIZE),), ())
        entries = [Put(entry_of(index), b"x" * ENTRY_SIZE) for index in range(self._size)]
        self._ask(Txn, self._next, (), (*entries, Put(HEAD, SEALED * HEAD_SIZE)), ())


class Floor:
    """The bare clients of one process."""

    def __init__(self, spec: dict) -> None:
        self._spec = spec
        self._clients: list[Bare] = []

    async def prepare(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._spec["address"].rsplit(":", 1)
        for index in self._spec["mine"]:
            client = Bare(index, self._spec["size"], self._spec["joins"], self._spec["heads"])
            await loop.create_connection(lambda client=client: client, host, int(port))
            self._clients.append(client)
        await asyncio.gather(*(client.welcome for client in self._clients))
        if self._spec["mine"][0] == 0:  # The settings must be there before the first join.
            await self._write_settings(self._clients[0])

    async def _write_settings(self, client: Bare) -> None:
        done = asyncio.get_running_loop().create_future()
        client._ask(Txn, done.set_result, (), (Put(SETTINGS, b"x" * SETTINGS_SIZE),), ())
        await done

    async def form(self, index: int) -> None:
        self._clients[index].form()
        await self._clients[index].done

    async def check(self) -> None:
        """Do nothing: each client checks its own entry."""

    async def stop(self) -> None:
        for client in self._clients:
            client._transport.abort()
