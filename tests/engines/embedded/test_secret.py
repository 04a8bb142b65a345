"""The shared secret between driver and server: who is refused, with which sentence, and what is never said."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time

import msgspec
import pytest

from rdzv.config.secret import Secret
from rdzv.engines.embedded.connection import ClientConnection
from rdzv.engines.embedded.frames import CHALLENGE_MAX, PREAMBLE, Challenge, Hello, Proof, Rejected, Welcome, encode
from rdzv.engines.embedded.hosting import HostingDriver
from rdzv.engines.embedded.limits import Limits
from rdzv.engines.embedded.trust import DRIVER, SERVER, Handshake, Trust, new_nonce
from rdzv.engines.port import Get, Put
from rdzv.errors import Unreachable, Untrusted
from support.certificates import TOKEN, full, trust
from support.embedded_server import FakeTransport, Proxy, Raw, driver_to, feed, run, serving, session_to, until
from support.ports import free_port
from support.timing import within

DIFFERENT = "the two sides have different secrets: give the member the server's token"
ONLY_SERVER = (
    "the server has a secret and the member has none: give the member the same, "
    "by RDZV_TOKEN, token_file or the setting token"
)
ONLY_MEMBER = (
    "the member has a secret and the server has none: give the server the same, "
    "by RDZV_TOKEN, token_file or the setting token"
)


async def frame(raw, kind):
    """The next frame, which must be of that kind."""
    size = int.from_bytes(await raw.read(4), "big")
    return msgspec.msgpack.decode(await raw.read(size), type=kind)


async def challenged(port, nonce=None):
    """A stranger that knows how to begin, and the server's number."""
    raw = await Raw.connect(port)
    raw.write(PREAMBLE, Challenge(nonce or new_nonce()))
    assert await raw.read(len(PREAMBLE)) == PREAMBLE
    return raw, (await frame(raw, Challenge)).nonce


async def test_with_the_same_secret_everything_works_as_without():
    async with (
        serving(trust=trust(TOKEN)) as server,
        session_to(server.port, trust=trust(TOKEN)) as one,
        session_to(server.port, trust=trust(TOKEN)) as other,
    ):
        await one.txn(then=[Put("k", b"v")])
        assert (await other.txn(then=[Get("k")])).item(0).value == b"v"


@pytest.mark.parametrize(
    ("of_server", "of_member", "sentence"),
    [(TOKEN, "another", DIFFERENT), (TOKEN, "", ONLY_SERVER), ("", TOKEN, ONLY_MEMBER)],
)
def test_a_refusal_says_the_same_at_both_ends_and_is_final(of_server, of_member, sentence, caplog):
    async def scenario():
        async with serving(trust=trust(of_server)) as server:
            with pytest.raises(Untrusted) as refused:
                await driver_to(server.port, trust=trust(of_member)).connect()
            assert server.runs == {}
            return server.port, refused.value.sentence

    port, said = run(scenario)
    where = f"127.0.0.1:{port}"
    assert said == f"engine rdzv://{where} and this side do not trust each other: {where}: {sentence}"
    assert [record.message for record in caplog.records if record.name == "rdzv.server"] == [f"peer 127.0.0.1: {sentence}"]


def test_a_server_that_cannot_prove_itself_is_not_believed():
    """The false server takes our proof, and then says welcome."""

    async def scenario(*answer):
        async def pretend(reader, writer):
            await reader.read(4096)
            writer.write(PREAMBLE + encode(Challenge(new_nonce())))
            await reader.read(4096)
            writer.write(b"".join(encode(one) for one in answer))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        try:
            with pytest.raises((Untrusted, Unreachable)) as refused:
                await driver_to(server.sockets[0].getsockname()[1], trust=trust(TOKEN)).connect()
        finally:
            server.close()
        return refused.value

    welcome = Welcome("s", "i", "p", 1, 1)
    wrong = run(lambda: scenario(Proof(new_nonce()), welcome))
    assert isinstance(wrong, Untrusted)
    assert wrong.problem.partition(": ")[2] == (
        "it did not prove that it knows our secret: it is not the server that is meant, or somebody is in between"
    )
    assert "cannot be read" in run(lambda: scenario(welcome)).problem, "a proof cannot be left out"


def test_a_challenge_that_comes_before_ours_ends_the_connection():
    async def scenario():
        link = ClientConnection("rdzv://x", 1.0, trust(TOKEN))
        link.connection_made(FakeTransport())
        problems = []
        link.on_lost = problems.append
        feed(link, PREAMBLE + encode(Challenge(new_nonce())))
        assert link.transport.sent == []
        assert link._welcome.exception().untrusted is False
        return problems

    assert run(scenario) == ["it sent what cannot be read: a challenge cannot be read: none was asked for yet"]


# ---- what a listener learns


class Tap(Proxy):
    """Writes down everything."""

    def __init__(self, target):
        super().__init__(target)
        self.heard = {"up": bytearray(), "down": bytearray()}

    async def _pump(self, way, source, sink):
        while data := await source.read(65536):
            self.heard[way] += data
            sink.write(data)


def test_the_secret_is_never_on_the_wire_nor_in_a_log(caplog):
    async def scenario():
        async with serving(trust=trust(TOKEN)) as server, Tap(server.port) as tap:
            async with session_to(tap.port, trust=trust(TOKEN)) as session:
                await session.txn(then=[Put("k", b"v")])
            with pytest.raises(Untrusted):
                await driver_to(tap.port, trust=trust("another secret")).connect()
            return bytes(tap.heard["up"] + tap.heard["down"])

    with caplog.at_level(logging.DEBUG):
        heard = run(scenario)
    assert b"job" in heard, "all was heard, as nothing is encrypted"
    digests = [hashlib.new(name, TOKEN.encode()).digest() for name in ("md5", "sha1", "sha256")]
    for hidden in (TOKEN.encode(), TOKEN.encode()[:10], TOKEN.encode().hex().encode(), *digests):
        assert hidden not in heard
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(trust(TOKEN).secret) + str(vars(trust(TOKEN)))


def test_the_run_is_named_only_after_the_server_asked_for_proof():
    """One that merely accepts connections hears a random number."""

    async def scenario():
        heard = asyncio.get_running_loop().create_future()

        async def listen(reader, writer):
            heard.set_result(await reader.read(4096))
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        with pytest.raises(Unreachable):
            await driver_to(server.sockets[0].getsockname()[1], trust=trust(TOKEN)).connect()
        server.close()
        return await heard

    heard = run(scenario)
    assert heard.startswith(PREAMBLE)
    assert len(heard) == len(PREAMBLE) + len(encode(Challenge(bytes(32))))


# ---- what a stranger can do


async def test_a_stranger_hears_a_random_number_and_the_sentence_and_nothing_else():
    async with serving(trust=trust(TOKEN)) as server, session_to(server.port, trust=trust(TOKEN)):
        raw, number = await challenged(server.port)
        other, another = await challenged(server.port)
        assert number != another
        await other.close()
        raw.write(Proof(new_nonce()), Hello("job", "s", 1))
        assert await frame(raw, Rejected) == Rejected(DIFFERENT, untrusted=True)
        assert await raw.rest() == b""
        await raw.close()
        assert server.runs["job"].presences == 0


@pytest.mark.parametrize("probe", [False, True])
async def test_a_hello_without_proof_is_told_nothing_even_as_a_probe(probe):
    async with serving(trust=trust(TOKEN)) as server:
        raw = await Raw.connect(server.port)
        raw.write(PREAMBLE, Hello("job", "s", 1, probe=probe))
        assert await raw.rest() == PREAMBLE + encode(Rejected(ONLY_SERVER, untrusted=True))
        await raw.close()


async def test_a_stopping_server_does_not_tell_strangers_where_it_is():
    async with serving(trust=trust(TOKEN)) as server:
        raw, _ = await challenged(server.port)
        stopping = asyncio.ensure_future(server.stop())
        assert await raw.rest() == encode(Rejected("the server has been stopped", passing=True))
        await raw.close()
        await stopping


def test_a_recorded_handshake_proves_nothing_a_second_time(caplog):
    async def scenario():
        async with serving(trust=trust(TOKEN)) as server, Tap(server.port) as tap:
            async with session_to(tap.port, trust=trust(TOKEN)):
                pass
            raw = await Raw.connect(server.port)
            raw.write(bytes(tap.heard["up"]))
            answer = await raw.rest()
            await raw.close()
            assert answer.endswith(encode(Rejected(DIFFERENT, untrusted=True)))
            assert len(answer) == len(PREAMBLE) + len(encode(Challenge(bytes(32)))) + len(
                encode(Rejected(DIFFERENT, untrusted=True))
            )

    run(scenario)
    assert DIFFERENT in caplog.text


async def test_a_proof_sent_back_to_where_it_came_from_proves_nothing():
    """The server's own words, and those of another connection to it, open no door."""
    secret, a, b = Secret(TOKEN), new_nonce(), new_nonce()
    shaken = Handshake(secret, a, b, b"")
    proofs = {
        shaken.proof(DRIVER),
        shaken.proof(SERVER),
        Handshake(secret, b, a, b"").proof(DRIVER),
        Handshake(secret, b, a, b"").proof(SERVER),
        Handshake(secret, a, b, b"channel").proof(DRIVER),
        Handshake(Secret("another"), a, b, b"").proof(DRIVER),
    }
    assert len(proofs) == 6
    assert sum(shaken.holds(DRIVER, proof) for proof in proofs) == 1

    """A stranger has a member prove itself for the server's number, and tries with the server's role, or none."""
    async with serving(trust=trust(TOKEN)) as server:
        first, number = await challenged(server.port, a)
        second, _ = await challenged(server.port, number)  # The server is asked for its own number.
        for raw, proof in ((first, Handshake(secret, a, number, b"").proof(SERVER)), (second, number)):
            raw.write(Proof(proof), Hello("job", "s", 1))
            assert (await frame(raw, Rejected)).text == DIFFERENT
            await raw.close()


def test_a_proof_is_for_the_two_numbers_the_role_and_the_version():
    """As documented, so that another implementation can be written."""
    a, b, channel = bytes(32), bytes([1]) * 32, b"c" * 32
    words = (b"rdzv 2", b"driver", a, b, channel)
    text = b"".join(len(word).to_bytes(4, "big") + word for word in words)
    salt = b"shared secret of rdzv, handshake 2"
    key = hashlib.scrypt(TOKEN.encode(), salt=salt, n=32768, r=8, p=1, maxmem=2**26, dklen=32)
    expected = hmac.new(key, text, "sha256").digest()
    assert Handshake(Secret(TOKEN), a, b, channel).proof(DRIVER) == expected


async def test_a_stranger_may_send_little_and_stays_no_longer_for_talking():
    async with serving(trust=trust(TOKEN), limits=Limits(greeting_s=1.0)) as server:
        big = await Raw.connect(server.port)
        big.write(PREAMBLE, (CHALLENGE_MAX + 1).to_bytes(4, "big"))
        assert f"at most {CHALLENGE_MAX} are allowed".encode() in await big.rest()
        await big.close()
        began_at = time.monotonic()
        silent = await Raw.connect(server.port)
        talking, _ = await challenged(server.port)
        half, _ = await challenged(server.port)
        half.write(encode(Proof(bytes(32)))[:20])
        for raw in (silent, talking, half):
            assert b"did not say hello within 1 s" in await raw.rest()
            await raw.close()
        within(time.monotonic() - began_at, 3 * 3.0)
        await until(lambda: not server.peers)
        assert not server._strangers
        assert not server._owing


async def test_the_words_of_a_stranger_do_not_prolong_its_time():
    async with serving(trust=trust(TOKEN)) as server:
        raw = await Raw.connect(server.port)
        await until(lambda: server.peers)
        (peer,) = server.peers
        arrived_s = peer.heard_s
        server.awake_s += 1.0
        raw.write(PREAMBLE, Challenge(new_nonce()))
        await raw.read(len(PREAMBLE))
        await frame(raw, Challenge)
        assert peer.heard_s == arrived_s
        await raw.close()


def test_strangers_do_not_keep_members_out_by_their_number(caplog):
    async def scenario():
        async with serving(trust=trust(TOKEN), limits=Limits(connections=10)) as server:
            strangers = [await Raw.connect(server.port) for _ in range(30)]
            await until(lambda: len(server.peers) == 10)
            sessions = [await driver_to(server.port, trust=trust(TOKEN)).connect() for _ in range(10)]
            for session in sessions:
                await session.txn()
            assert len(server.peers) == 10
            with pytest.raises(Unreachable, match="this server has 10 connections, which is all it can have"):
                await driver_to(server.port, trust=trust(TOKEN)).connect()
            for session in sessions:
                await session.close()
            for raw in strangers:
                await raw.close()

    run(scenario)
    assert "it connected and did not say hello before this server was full" in caplog.text


# ---- the cost


@pytest.mark.parametrize(("token", "round_trips"), [("", 1), (TOKEN, 2)])
def test_a_secret_costs_one_round_trip_and_no_secret_none(token, round_trips):
    async def scenario():
        async with serving(trust=trust(token)) as server:
            turns = []

            async def carry(reader, writer):
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)

                async def pump(way, source, sink):
                    while data := await source.read(65536):
                        if turns[-1:] != [way]:
                            turns.append(way)
                        sink.write(data)
                    sink.close()

                await asyncio.gather(pump("up", reader, up_writer), pump("down", up_reader, writer))

            proxy = await asyncio.start_server(carry, "127.0.0.1", 0)
            session = await driver_to(proxy.sockets[0].getsockname()[1], trust=trust(token)).connect()
            greeted = list(turns)
            await session.close()
            await until(lambda: not server.peers)
            proxy.close()
            return greeted

    assert run(scenario) == ["up", "down"] * round_trips


# ---- who serves


def hosting(endpoint, of, **options):
    from rdzv.config.endpoint import Endpoint

    return HostingDriver(Endpoint.parse(endpoint), run_id="job", trust=of, stay_s=0.1, **options)


@pytest.mark.parametrize("of", [trust(TOKEN), full()], ids=["secret", "secret and TLS"])
async def test_who_hosts_asks_others_for_the_same_proof(of):
    port = free_port()
    first, second, stranger = (hosting(f"127.0.0.1:{port}", one) for one in (of, of, Trust()))
    one, other = await first.connect(), await second.connect()
    assert first.server is not None
    assert second.server is None
    assert one.instance == other.instance
    with pytest.raises(Untrusted):
        await stranger.connect()
    for session in (one, other):
        await session.close()
    for driver in (first, second, stranger):
        await driver.close()


def test_a_session_goes_on_if_the_server_is_for_a_while_one_with_another_secret(caplog):
    """A member that has been in is not thrown out by another's mistake."""

    async def scenario():
        port = free_port()
        async with serving(port=port, trust=trust(TOKEN)):
            session = await driver_to(port, trust=trust(TOKEN)).connect()
        async with serving(port=port, trust=trust("another")) as wrong:
            await until(lambda: session._link is None)
            with pytest.raises(Untrusted):
                await driver_to(port, trust=trust(TOKEN)).connect()
            assert session._ended is None
            assert wrong.runs == {}
            await until(lambda: "rdzv.remote" in {record.name for record in caplog.records}, "a word of the session")
        await session.close()

    run(scenario)
    told = [record.message.partition(": ")[2].partition(": ")[2] for record in caplog.records if record.name == "rdzv.remote"]
    assert told == [DIFFERENT], "once, however often it is tried"


@pytest.mark.parametrize(
    ("host", "of", "warned"),
    [("", Trust(), 1), ("", trust(TOKEN), 0), ("", full(), 0), ("127.0.0.1", Trust(), 0), ("localhost", Trust(), 0)],
)
def test_without_a_secret_where_others_can_reach_it_there_is_one_warning(host, of, warned, caplog):
    async def scenario():
        async with serving(host=host, trust=of) as server:
            return server.port

    port = run(scenario)
    assert [record.message for record in caplog.records] == warned * [
        (f"anybody who reaches port {port} of this machine can take part in its runs: give server and members a secret "
        "(RDZV_TOKEN or token_file)")
    ]


def test_a_node_that_hosts_without_a_secret_warns_once_when_it_serves(caplog):
    async def scenario():
        driver = hosting(f"localhost.localdomain:{free_port()}", Trust(), is_host=True)
        driver.addresses = lambda: asyncio.sleep(0, [(2, ("127.0.0.1", driver.named.hosts[0][1]))])
        for _ in range(3):
            await (await driver.connect()).close()
        await driver.close()

    run(scenario)
    assert [record.message[:25] for record in caplog.records] == ["anybody who reaches port "]
