"""Servers that went mad, at the client: whatever they send, there is a sentence, and everything else goes on."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import time
from contextlib import asynccontextmanager, suppress

import pytest

from rdzv import aio
from rdzv.engines.embedded import frames
from rdzv.engines.embedded.connection import ClientConnection
from rdzv.engines.embedded.frames import FRAME_MAX, PREAMBLE, encode
from rdzv.engines.port import Batch, Gap, Get, LeaseGone, Outcome
from rdzv.errors import JoinTimeout, LimitExceeded, RdzvError, Unreachable
from support.certificates import trust as trusting
from support.embedded_server import FakeTransport, driver_to, feed, run, serving
from support.frame_mutations import ANSWERS, mutations

ASKED = [
    (lambda number: frames.Txn(number, (), (Get("k"),), ()), Outcome),
    (lambda number: frames.Renew(number, 1), type(None)),
]


def news(news):
    """News that a watch may get."""
    assert isinstance(news, Batch | Gap)


async def tease(count, seed):
    """Feed that many frames to clients that have asked something; each hears what it asked for, or a sentence."""
    rng = random.Random(seed)
    source = mutations(rng, ANSWERS)
    fed = 0
    while fed < count:
        link = ClientConnection("rdzv://x", 60.0, trusting("a secret of this test") if rng.random() < 0.3 else None)
        link.connection_made(FakeTransport())
        problems = []
        link.on_lost = problems.append
        link.on_news = lambda _watch, what: news(what)
        feed(link, PREAMBLE)
        calls = {}
        if rng.random() < 0.9:
            feed(link, encode(frames.Welcome("s", "i", "p", 1, 1)))
        if link._welcome.done() and link.is_open:
            calls = {asyncio.ensure_future(link.call(frame)): kind for frame, kind in rng.choices(ASKED, k=8)}
            await asyncio.sleep(0)
        while not link.transport.is_closing() and fed < count:
            feed(link, next(source))
            fed += 1
            assert link.kept <= FRAME_MAX + 4
        if link.violation:
            assert problems == [link.violation]
        link.lose("enough")
        for call, kind in calls.items():
            with suppress(Unreachable, LeaseGone, LimitExceeded, ValueError):
                assert isinstance(await call, kind)
        if link._welcome.done() and link._welcome.exception() is not None:
            assert str(link._welcome.exception())
    return fed


def rss_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("seed", range(2))
def test_rubbish_ends_the_connection_with_a_sentence(seed):
    assert run(lambda: tease(5_000, seed)) == 5_000


@pytest.mark.soak
def test_much_rubbish_ends_connections_with_sentences_and_takes_no_memory():
    run(lambda: tease(20_000, 1))
    before_kib = rss_kib()
    for seed in range(100, 110):
        assert run(lambda seed=seed: tease(25_000, seed)) == 25_000
    assert rss_kib() - before_kib < 64 * 1024


@pytest.mark.parametrize(
    ("frame", "answer"),
    [
        (ASKED[0][0], frames.Acknowledged(1)),
        (ASKED[0][0], frames.TxnDone(1, Outcome(True, 1, ()))),
        (ASKED[0][0], frames.TxnDone(1, Outcome(False, 1, ((), ())))),
        (ASKED[1][0], frames.TxnDone(1, Outcome(True, 1, ((),)))),
    ],
)
async def test_an_answer_to_another_question_is_none(frame, answer):
    link = ClientConnection("rdzv://x", 60.0)
    link.connection_made(FakeTransport())
    feed(link, PREAMBLE + encode(frames.Welcome("s", "i", "p", 1, 1)))
    call = asyncio.ensure_future(link.call(frame))
    await asyncio.sleep(0)
    feed(link, encode(answer))
    with pytest.raises(Unreachable, match="was asked for, and what came does not answer that"):
        await call
    assert link.transport.closed


@asynccontextmanager
async def answering(handle):
    """A server of that sort; its port."""
    under_way = set()

    async def answer(reader, writer):
        under_way.add(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await handle(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.wait(under_way)


async def mad(reader, writer, rng):
    """Greets like a server, and answers like none."""
    source = mutations(rng, ANSWERS)
    await reader.readexactly(len(PREAMBLE))
    writer.write(PREAMBLE)
    if rng.random() < 0.8:
        writer.write(encode(frames.Welcome("s", rng.choice("ij"), "p", 1000, 1000)))
    while await reader.read(4096):
        writer.write(b"".join(next(source) for _ in range(rng.randrange(1, 20))))
        await writer.drain()


def test_a_member_of_a_mad_server_times_out_with_a_reason_while_others_go_on(caplog):
    rng = random.Random(5)

    async def scenario():
        quick = {"last_call": 0.1, "min_nodes": 1, "max_nodes": 1, "read_timeout": 1.0}
        async with (
            answering(lambda reader, writer: mad(reader, writer, rng)) as port,
            serving() as sane,
            aio.AsyncRendezvous(f"127.0.0.1:{sane.port}", run_id="job", **quick) as well,
            aio.AsyncRendezvous(f"127.0.0.1:{port}", run_id="job", is_host=False, **quick) as ill,
        ):
            await well.join()
            with pytest.raises(JoinTimeout) as late:
                await ill.join(4.0)
            assert "the engine is away: " in str(late.value)
            assert well.changed is None
            assert (await well.status()).phase == "sealed"

    began_at = time.monotonic()
    with caplog.at_level(logging.WARNING):
        run(scenario)
    said = [record for record in caplog.records if record.name == "rdzv.remote"]
    assert 1 <= len(said) <= 1 + (time.monotonic() - began_at), "a reason, at most once per second"
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_session_says_why_it_left_a_mad_server(caplog):
    async def scenario():
        async def once(reader, writer):
            await reader.read(4096)  # The greeting.
            writer.write(PREAMBLE + encode(frames.Welcome("s", "i", "p", 1, 1)))
            await reader.read(4096)
            writer.write(encode(frames.Acknowledged(1)))
            await reader.read()

        async with answering(once) as port:
            session = await driver_to(port).connect()
            with pytest.raises(RdzvError, match="does not answer that"):
                await session.txn()
            await session.close()

    run(scenario)
    assert "answer 1, Acknowledged, cannot be read: a Txn was asked for" in caplog.text




EVIL = "evil\x1b[2J\nrdzv: all is well\x00\x9b"


async def test_what_a_server_says_is_printable_wherever_it_ends():
    """A rejection, a reason for a lease or a limit, a gap, and what it says about itself."""
    link = ClientConnection("rdzv://x", 60.0, None)
    link.connection_made(FakeTransport())
    feed(link, PREAMBLE + encode(frames.Welcome(EVIL, EVIL, EVIL, 1, 1, EVIL, True, EVIL)))
    welcome = link._welcome.result()
    assert all(text.isprintable() for text in (welcome.server, welcome.instance, welcome.place, welcome.reached_at))
    news = []
    link.on_news = lambda _watch, what: news.append(what)
    problems = []
    link.on_lost = problems.append
    answers = [frames.LeaseEnded(1, EVIL), frames.LimitReached(2, EVIL, 2, 1), frames.Refused(3, EVIL)]
    calls = [asyncio.ensure_future(link.call(lambda number: frames.Renew(number, 1))) for _ in answers]
    await asyncio.sleep(0)
    for answer in (*answers, frames.WatchGap(1, EVIL), frames.Rejected(EVIL * 200)):
        feed(link, encode(answer))
    said = [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
    for text in (*said, str(news[0]), *problems):
        assert "evil" in text
        assert text.isprintable()
        assert len(text) <= 2_000


def test_a_rejection_is_logged_and_raised_on_one_line(caplog):
    async def scenario():
        async def mad(reader, writer):
            writer.write(PREAMBLE + encode(frames.Rejected(EVIL)))
            await reader.read(1000)
            writer.close()

        server = await asyncio.start_server(mad, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(Unreachable) as caught:
                await driver_to(port).connect()
        return str(caught.value)

    with caplog.at_level(logging.DEBUG):
        assert run(scenario).isprintable()
    assert any("evil" in record.getMessage() for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)
