"""Attacks on a server, each for a few seconds: `python -m support.attacks NAME PORT SECONDS`.

Every attack is a client that speaks the protocol, or half of it, and asks for more than it should get. They run in a process of
their own, so that what honest clients measure is the server and not the attacker.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import ssl
import sys
import time
from contextlib import suppress

from rdzv.engines.embedded.frames import (
    PREAMBLE,
    Hello,
    LeaseGrant,
    Ping,
    RunsWanted,
    Txn,
    WatchStart,
    WatchStop,
    encode,
)
from rdzv.engines.port import Delete, DeletePrefix, Empty, Get, List, Put

MIB = 1024 * 1024
RUN = "attacked"
LIMITS = {
    "hoard": {"stored": 64 * MIB, "unread": 16 * MIB, "runs": 50},
    "deaf": {"stored": 64 * MIB, "unread": 64 * MIB},
}
"""Limits of the servers of two attacks, low enough for one attacker to go far beyond them within seconds."""


class Attacker:
    """A client that does what it likes. A server that hangs up on it is called again."""

    def __init__(self, port, run=RUN):
        self.port = port
        self.run = run
        self.number = 0
        self.writer = None

    async def connect(self, *, reads=True):
        """Come in. `reads`: all answers are read and thrown away."""
        with suppress(OSError):
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=64 * MIB)
            Attacker.number = getattr(Attacker, "number", 0) + 1
            self.writer.write(PREAMBLE + encode(Hello(self.run, f"a{os.getpid()}-{Attacker.number}", 1)))
            self.sink = asyncio.ensure_future(self._read()) if reads else None
            if not reads:
                self.writer.transport.pause_reading()
        return self

    async def _read(self):
        with suppress(OSError):
            while await self.reader.read(MIB):
                pass

    async def send(self, *frames):
        """Write, wait until it is taken, and come back if the server hung up."""
        data = b"".join(one if isinstance(one, bytes) else encode(one) for one in frames)
        try:
            if self.writer is None or self.writer.transport.is_closing():
                raise ConnectionError
            self.writer.write(data)
            await asyncio.wait_for(self.writer.drain(), 1.0)
        except (OSError, asyncio.TimeoutError):
            if self.writer is not None:
                self.writer.transport.abort()
            await asyncio.sleep(0.01)
            await self.connect()

    def txn(self, *then, compares=(), grants=()):
        self.number += 1
        return Txn(self.number, tuple(compares), tuple(then), (), (), tuple(grants))


async def clean_up(port, *prefixes):
    """Delete what was put, and wait for the answer: what is left then is what the server failed to free."""
    last = await Attacker(port).connect()
    await last.send(last.txn(*(DeletePrefix(prefix) for prefix in prefixes), *(Delete(key) for key in ("k", "big"))))
    await asyncio.sleep(0.5)
    last.writer.transport.abort()


async def answers(port, ends):
    """A small request whose answer would have gigabytes."""
    one = await Attacker(port).connect()
    await one.send(one.txn(Put("big", bytes(8 * MIB))))
    while time.monotonic() < ends:
        await one.send(one.txn(*[Get("big")] * 200))
        await one.send(one.txn(*[Get("big")] * 20_000))
        await asyncio.sleep(0.02)
    await clean_up(port)


async def news(port, ends):
    """A hundred watches, on one connection or on many, that are told of a large value and do not read."""
    one = await Attacker(port).connect()
    deaf = [await Attacker(port).connect(reads=False) for _ in range(20)]
    while time.monotonic() < ends:
        for other in deaf:
            await other.send(*(WatchStart(number, ("big",), 1) for number in range(100)))
        await one.send(one.txn(Put("big", bytes(8 * MIB))))
        await asyncio.sleep(0.05)
        deaf = [other if not other.writer.is_closing() else await Attacker(port).connect(reads=False) for other in deaf]
    for other in deaf:
        other.writer.transport.abort()
    await clean_up(port)


async def past(port, ends):
    """Watches from the past that are given up at once, a thousand in each write."""
    one = await Attacker(port).connect()
    for _ in range(3):
        await one.send(one.txn(Put("big", bytes(4 * MIB))))
    many = b"".join(encode(WatchStart(1, ("big", "d/"), 1)) + encode(WatchStop(1)) for _ in range(1000))
    deaf = await Attacker(port).connect(reads=False)
    while time.monotonic() < ends:
        await one.send(many)
        await deaf.send(many)
    deaf.writer.transport.abort()
    await clean_up(port)


async def steps(port, ends):
    """A few bytes that make the server walk all keys again and again, on several connections."""
    one = await Attacker(port).connect()
    for start in range(0, 20_000, 5000):
        await one.send(one.txn(*(Put(f"d/{number}", b"") for number in range(start, start + 5000))))
    others = [await Attacker(port).connect() for _ in range(8)]
    costly = (
        one.txn(compares=[Empty(f"d/x{number}") for number in range(900)]),
        one.txn(*(List(f"d/y{number}") for number in range(400))),
        one.txn(*(DeletePrefix(f"d/z{number}") for number in range(400))),
        one.txn(*[List("d/")] * 10),
        one.txn(*(Put(f"d/{number}", b"") for number in range(5000))),
    )
    for other, request in itertools.cycle(itertools.product(others, costly)):
        if time.monotonic() > ends:
            break
        await other.send(request)
    await clean_up(port, "d/")


async def connections(port, ends):
    """Bursts of connections that say nothing, or rubbish, far beyond the server's descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    opened = []
    while time.monotonic() < ends:
        burst = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(300)), return_exceptions=True)
        opened += [one[1] for one in burst if not isinstance(one, BaseException)]
        for writer in opened[-100:]:
            with suppress(OSError):
                writer.write(b"rubbish\r\n\r\n")
        for writer in opened[:-1200]:
            writer.transport.abort()
        del opened[:-1200]
        await asyncio.sleep(0)
    for writer in opened:
        writer.transport.abort()


def hello_bytes():
    """The first record of a TLS client."""
    context, outgoing = ssl.create_default_context(), ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def half_open(port, ends):
    """TLS handshakes that stop in the middle, whose connections are then closed."""
    hello = hello_bytes()
    while time.monotonic() < ends:
        burst = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(100)), return_exceptions=True)
        opened = [one[1] for one in burst if not isinstance(one, BaseException)]
        for number, writer in enumerate(opened):
            writer.write(hello if number % 10 == 0 else hello[:-1])
        await asyncio.sleep(0.05)
        for writer in opened:
            writer.transport.abort()


async def deaf(port, ends):
    """Clients that ask for much and do not read."""
    one = await Attacker(port).connect()
    await one.send(one.txn(Put("big", bytes(8 * MIB))))
    await asyncio.sleep(0.3)  # Until it is there.
    others = [await Attacker(port).connect(reads=False) for _ in range(60)]
    while time.monotonic() < ends:
        for other in others:
            if other.writer.is_closing():
                await other.connect(reads=False)
            if other.writer.transport.get_write_buffer_size() < MIB:
                other.writer.write(b"".join(encode(other.txn(Get("big"))) for _ in range(50)))
        await asyncio.sleep(0.02)
    for other in others:
        other.writer.transport.abort()
    await clean_up(port)


async def hoard(port, ends):
    """Runs that nobody is in, keys without a lease, leases and watch targets: more than the server of this attack takes."""
    limits = LIMITS["hoard"]
    for number in range(2 * limits["runs"]):
        left = await Attacker(port, f"{RUN}-left-{number}").connect()
        await left.send(left.txn(Put("k", b"", 1), grants=[LeaseGrant(1, 86_400.0)]))
        await asyncio.sleep(0.005)  # Until it is read.
        left.writer.transport.abort()
    one, value, number, others = await Attacker(port).connect(), bytes(MIB), 0, []
    while time.monotonic() < ends or number * 8 * MIB < 3 * limits["stored"]:
        number += 1
        await one.send(*(one.txn(Put(f"d/{number}-{n}", value)) for n in range(8)))
        await one.send(one.txn(*(Put(f"e/{number}-{n}/k", b"") for n in range(500))))
        await one.send(one.txn(grants=[LeaseGrant(number * 64 + n + 1, 1.0) for n in range(64)]))
        await one.send(WatchStart(number, tuple(f"{number}/{n}" for n in range(10)), 1))
        other = await Attacker(port, f"{RUN}-{number}").connect()
        await other.send(other.txn(Put("k", value, number), grants=[LeaseGrant(number, 1.0)]))
        others.append(other)
    for other in others:
        other.writer.transport.abort()
    one.writer.transport.abort()
    await clean_up(port, "d/", "e/")


async def requests(port, ends):
    """Many connections that ask small things as fast as they can."""
    others = [await Attacker(port).connect() for _ in range(30)]
    many = b"".join(encode(Ping(number)) for number in range(5000))
    for other in itertools.cycle(others):
        if time.monotonic() > ends:
            break
        await other.send(many)


async def lists(port, ends):
    """Questions for the list of many runs, whose answers are not read, between runs that come anew."""
    runs = [await Attacker(port, f"{RUN}-{number:03}-{'x' * 900}").connect() for number in range(300)]
    for one in runs:
        await one.send(one.txn(Put("k", b"", 1), grants=[LeaseGrant(1, 1.0)]))
    opened = []
    for number in itertools.count():
        if time.monotonic() > ends:
            break
        burst = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(50)), return_exceptions=True)
        opened += [one[1] for one in burst if not isinstance(one, BaseException)]
        for writer in opened[-50:]:
            writer.transport.pause_reading()
            writer.write(PREAMBLE + encode(RunsWanted()))
        runs.append(await Attacker(port, f"{RUN}-{number}").connect())
        for writer in opened[:-800]:
            writer.transport.abort()
        del opened[:-800]
    for writer in [*opened, *(one.writer for one in runs)]:
        writer.transport.abort()


ATTACKS = {one.__name__: one for one in (answers, news, past, steps, requests, connections, half_open, deaf, hoard, lists)}


if __name__ == "__main__":
    name, port, seconds = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (2048 * MIB, 2048 * MIB))
    asyncio.run(ATTACKS[name](int(port), time.monotonic() + float(seconds)))
