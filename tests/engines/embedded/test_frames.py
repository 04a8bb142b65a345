"""The wire: whatever comes, in whatever pieces, is a frame or a sentence."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.engines.embedded import features, frames
from rdzv.engines.embedded.frames import PREAMBLE, describe, encode, encode_news, encoder
from rdzv.engines.embedded.limits import Limits
from rdzv.engines.embedded.server import Server, ServerConnection
from rdzv.engines.embedded.stream import FramedProtocol
from rdzv.engines.port import (
    Batch,
    Event,
    Get,
    Put,
)
from rdzv.errors import Incompatible, LimitExceeded
from support.certificates import trust as trusting
from support.embedded_server import FakeTransport, Raw, feed, run, serving, session_to
from support.frame_mutations import ANSWERS, ITEM, REQUESTS, mutations
from support.processes import memory


class Ear(FramedProtocol):
    """Hears frames as bytes."""

    def __init__(self, frame_max=1000):
        super().__init__(frame_max)
        self.frames = []
        self.problem = ""
        self.connection_made(FakeTransport())

    def heard(self):
        pass

    def frame_received(self, payload):
        self.frames.append(bytes(payload))

    def violated(self, problem, start=b""):
        self.problem = problem
        self.transport.close()

    def in_the_clear(self, transport, start):
        raise AssertionError("there is no TLS here")

    def insecure(self, problem, untrusted):
        raise AssertionError("there is no TLS here")


@pytest.mark.parametrize("frame", REQUESTS, ids=lambda frame: type(frame).__name__)
def test_every_request_arrives_as_it_was_sent(frame):
    assert frames.decode(features.request_decoder, memoryview(encode(frame))[4:]) == frame


@pytest.mark.parametrize("frame", ANSWERS, ids=lambda frame: type(frame).__name__)
def test_every_answer_arrives_as_it_was_sent(frame):
    assert frames.decode(frames.answer_decoder, memoryview(encode(frame))[4:]) == frame


def test_news_from_a_shared_batch_are_the_same_bytes():
    batch = Batch(9, (Event("k", 9, ITEM),))
    for number in (0, 1, 127, 128, 70_000, 2**40):
        assert encode_news(number, encoder.encode(batch)) == encode(frames.WatchNews(number, batch))


@given(st.lists(st.binary(max_size=300), max_size=10), st.integers(1, 700))
def test_frames_arrive_whole_however_they_are_cut(payloads, step):
    ear = Ear()
    feed(ear, PREAMBLE + b"".join(len(one).to_bytes(4, "big") + one for one in payloads), step)
    assert (ear.frames, ear.problem) == (payloads, "")
    assert ear.kept == 0


@given(st.lists(st.binary(max_size=50), min_size=2, max_size=10), st.data())
def test_one_that_is_held_hears_the_rest_later(payloads, data):
    ear = Ear()
    after = data.draw(st.integers(1, len(payloads)))

    def receive(payload):
        ear.frames.append(bytes(payload))
        if len(ear.frames) == after:
            ear.hold()

    ear.frame_received = receive
    feed(ear, PREAMBLE + b"".join(len(one).to_bytes(4, "big") + one for one in payloads))
    assert ear.frames == payloads[:after]
    ear.go_on()
    assert ear.frames == payloads
    assert ear.transport.reading


def test_a_frame_that_is_too_large_is_refused_before_it_has_come():
    ear = Ear(frame_max=100)
    feed(ear, PREAMBLE + (101).to_bytes(4, "big"))
    assert ear.problem == "it sent a frame of 101 bytes, at most 100 are allowed"
    with pytest.raises(LimitExceeded, match=r"a frame 'Txn' has .* bytes, at most 1000 are allowed"):
        encode(frames.Txn(1, (), (Put("k", bytes(2000)),), ()), 1000)


@given(st.binary(min_size=1, max_size=100), st.integers(1, 40))
def test_whatever_else_comes_first_is_named(data, step):
    ear = Ear()
    feed(ear, data, step)
    if PREAMBLE.startswith(data) or data.startswith(PREAMBLE):
        return
    waits_for_a_version = data.startswith(b"RDZV ") and len(data) < len(PREAMBLE)
    assert bool(ear.problem) is not waits_for_a_version
    assert ear.frames == []


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "a web server answers there"),
        (b"<!DOCTYPE HTML>", "a web server answers there"),
        (b"GET / HTTP/1.1\r\n", "it speaks HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH server answers there"),
        (b"\x16\x03\x01\x02\x00", "it speaks TLS"),
        (b"\x15\x03\x03\x00\x02", "it speaks TLS"),
        (b"RDZV 0001\r\n\r\n", "version 1 of rdzv, this is version 2"),
        (b"RDZV abcd\r\n\r\n", "version 'abcd' of rdzv"),
        (b"\x00\x01\x02", r"its first bytes are b'\x00\x01\x02'"),
    ],
)
def test_strangers_are_named_by_their_first_bytes(start, shown):
    assert shown in describe(start)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused_with_a_reason(data):
    for decoder in (value for name, value in vars(frames).items() if name.endswith("_decoder")):
        with suppress(Incompatible):
            frames.decode(decoder, memoryview(data))


def test_nesting_without_end_is_refused():
    for deep in (b"\x91" * 100_000, b"\x93\x02\x01" + b"\x91" * 100_000, b"\x81\x01" * 50_000):
        with pytest.raises(Incompatible):
            frames.decode(frames.request_decoder, memoryview(deep))


# ---- at a live server


def pester(count, seed, trust=None):
    """Feed them to the server's ends of connections, and see to it that another run is as it was."""
    rng = random.Random(seed)
    source = mutations(rng)

    async def scenario():
        async with (
            serving(trust=trust, limits=Limits(turn=1 << 60)) as server,  # No frame waits for its turn.
            session_to(server.port, "other", trust=trust) as session,
        ):
            before = await session.txn(then=[Put("k", b"v")])
            peer = None
            for n in range(count):
                if peer is None or peer.transport.is_closing():
                    if peer is not None:
                        peer.connection_lost(None)
                    peer = ServerConnection(server)
                    peer.connection_made(FakeTransport())
                    first = frames.Hello("job", f"s{n}", 1) if trust is None else frames.Challenge(bytes(32))
                    feed(peer, PREAMBLE + (encode(first) if n % 3 else b""))
                feed(peer, next(source))
                peer.transport.sent.clear()
                if n % 1000 == 0:
                    await asyncio.sleep(0)
            peer.connection_lost(None)
            after = await session.txn(then=[Get("k")])
            assert (after.revision, after.item(0).value) == (before.revision, b"v")
            assert len(server.peers) == 1
            assert set(server.runs) == {"other"} | ({"job"} if trust is None else set())

    run(scenario)


@pytest.mark.parametrize("seed", range(2))
def test_rubbish_hurts_neither_the_server_nor_other_runs(seed, caplog):
    pester(10_000, seed)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_rubbish_proves_nothing_and_a_stranger_makes_no_run(caplog):
    pester(5_000, 5, trusting("a secret of this test"))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.soak
def test_a_million_mutated_frames_hurt_neither_the_server_nor_other_runs_and_nothing_grows(caplog):
    pester(25_000, 99)
    before = memory()
    for seed in range(100, 140):
        pester(25_000, seed)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        caplog.clear()
    assert memory() < before + 32 * 1024 * 1024


def test_rubbish_over_a_socket_gets_a_sentence_and_the_others_go_on():
    async def scenario():
        source = mutations(random.Random(7))
        async with serving() as server, session_to(server.port) as session:
            for n in range(200):
                raw = await Raw.member(server.port, "rubbish", session=f"s{n}")
                raw.write(*(next(source) for _ in range(20)))
                raw.writer.write_eof()
                await raw.rest()
                await raw.close()
            assert (await session.txn(then=[Put("k", b"")])).succeeded

    run(scenario)


def test_a_server_that_never_started_can_be_dropped():
    assert Server().port == 0
