"""A process that dies is noticed at once: its sentinel revokes its lease. Nothing else makes the sentinel do so."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.etcd import sentinel
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.sentinel_process import OUTAGE_S, Orders
from rdzv.engines.port import LeaseGone, Session
from rdzv.errors import Unreachable
from rdzv.testing.history import Changed
from rdzv.testing.progress_checkers import G7Cause
from support.certificates import ca_file, issue
from support.etcd_cluster import Cluster, until
from support.etcd_members import SAFETY, EtcdRun
from support.guarded_process import GuardedProcess, guards, is_running, pid_of_sentinel, shown_of
from support.processes import memory
from support.timing import within

LEASE_S = 60
"""Longer than every wait here: a lease that is gone was revoked."""
SOON_S = 30.0
CALM_S = 0.5
"""Twice as long as a sentinel needs to revoke a lease."""

SMALL = 20 * 1024 * 1024
"""More memory than a sentinel has before it imports gRPC, and less than after."""


@pytest.fixture(autouse=True)
def fresh_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without leases, whatever another one has left."""
    monkeypatch.setattr(sentinel, "_sentinels", [sentinel.Sentinel()])


def switches_of(pid: int) -> int:
    """Return how often a process has waited for something."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def run_id() -> str:
    return f"job-{secrets.token_hex(4)}"


def left_s(cluster: Cluster, lease: int) -> int:
    """Return the seconds that a lease has left; -1 if it has ended."""
    return int(cluster.call("lease/timetolive", {"ID": str(lease)})["TTL"])


def until_revoked(cluster: Cluster, lease: int) -> None:
    until(lambda: left_s(cluster, lease) < 0, f"lease {lease} is revoked", SOON_S)


def until_ended(pid: int) -> None:
    until(lambda: not is_running(pid), f"process {pid} has ended", SOON_S)


async def started() -> int:
    """Wait for the sentinel of this process, and return its process id."""
    own = sentinel.own()
    await asyncio.to_thread(until, lambda: own.pid, "the sentinel is started", SOON_S)
    return own.pid


def kill_sentinel(number: signal.Signals) -> int:
    """Send a signal to the sentinel of this process, and return its process id."""
    pid = sentinel.own().pid
    assert pid > 0, "0 would be the group of this process"
    os.kill(pid, number)
    return pid


async def session_of(cluster: Cluster, **settings: object) -> Session:
    made = Settings.make(cluster.endpoint(), run_id="job", min_nodes=1, max_nodes=1, **settings)
    return await open_driver(made).connect()


# ---- death


def test_a_killed_member_is_noticed_long_before_its_lease_ends(one):
    with EtcdRun(one, 1, 2, run_id=run_id(), lease=LEASE_S) as run:
        survivor, victim = run.start("a"), run.start("b")
        number = run.wait_world(survivor, victim)
        pid_of_sentinel(victim.pid)
        run.fault("crash", victim.name)
        killed_at = time.monotonic()
        victim.kill()
        assert run.wait_world(survivor, above=number, limit_s=SOON_S) == number + 1
        assert [one.reason for one in run.of(Changed) if one.at > killed_at] == ["b lost"]
        assert run.evicted() == []
        assert run.wrong() == []


def test_the_sentinel_survives_what_kills_the_process_group_and_then_ends(one):
    with GuardedProcess(one.endpoint()) as process:
        child, *_ = process.fork()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.sentinel, number)
        assert os.getpgid(child) == process.pid, "the child that would keep a pipe open is in the group"
        assert os.getsid(process.sentinel) == process.sentinel, "the sentinel has a session of its own"
        os.killpg(process.pid, signal.SIGKILL)
        until_revoked(one, process.lease)
        until_ended(process.sentinel)


def test_a_forked_child_that_lives_on_does_not_hide_the_death(one):
    with GuardedProcess(one.endpoint()) as process:
        child, *_ = process.fork()
        process.process.kill()
        until_revoked(one, process.lease)
        until_ended(process.sentinel)
        assert is_running(child)


def test_a_forked_child_that_joins_has_a_sentinel_of_its_own(one):
    with GuardedProcess(one.endpoint()) as process:
        child, lease, own = process.fork("join")
        assert own != process.sentinel
        os.kill(child, signal.SIGKILL)
        until_revoked(one, lease)
        until_ended(own)
        assert left_s(one, process.lease) > 0
        assert is_running(process.sentinel)
        process.process.kill()
        until_revoked(one, process.lease)


def test_without_a_pidfd_the_sentinel_looks_for_its_parent(one):
    with GuardedProcess(one.endpoint(), "no-pidfd") as process:
        assert shown_of(process.sentinel, "cmdline").split(b"\0")[-2] == b"-1"
        time.sleep(CALM_S)
        assert left_s(one, process.lease) > 0
        process.process.kill()
        until_revoked(one, process.lease)
        until_ended(process.sentinel)


def test_a_process_that_dies_while_one_of_etcds_members_is_frozen_and_another_dead_is_noticed(three):
    with GuardedProcess(three.endpoint()) as process:
        three.nodes[0].stop()
        process.process.kill()
        three.nodes[0].cont()
        until_revoked(three, process.lease)
    with GuardedProcess(three.endpoint()) as process:
        three.nodes[0].stop()
        three.nodes[1].kill()  # No quorum: the sentinel must try again.
        process.process.kill()
        time.sleep(2 * sentinel.ATTEMPT_S)
        assert is_running(process.sentinel)
        three.nodes[1].start()
        until_ended(process.sentinel)  # Still with a frozen member.
        three.nodes[0].cont()
        until_revoked(three, process.lease)
    three.heal()


def test_with_tls_and_a_password_the_sentinel_knows_them_by_its_pipe_only(tmp_path, monkeypatch):
    password = f"secret-{secrets.token_hex(8)}"
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", password)
    with Cluster(1, tls=True) as cluster:
        cluster.add_user("ann", password, "team/")
        cluster.enable_auth("secret of root")
        endpoint = cluster.endpoint("team", "user=ann")
        with GuardedProcess(endpoint, tls_ca=ca_file(), **issue()._asdict()) as process:
            shown = [shown_of(process.sentinel, file) for file in ("cmdline", "environ")]
            outputs = {str(Path(f"/proc/{process.sentinel}/fd/{number}").readlink()) for number in (1, 2)}
            assert outputs == {os.devnull}
            process.process.kill()
            until_revoked(cluster, process.lease)
            until_ended(process.sentinel)
    assert password.encode() not in b"".join(shown)


# ---- no death


def test_a_stopped_process_is_not_dead(one):
    with GuardedProcess(one.endpoint()) as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(CALM_S)
        assert left_s(one, process.lease) > 0
        os.kill(process.pid, signal.SIGCONT)
        process.order("leave")
        until_ended(process.sentinel)


def test_a_process_that_becomes_another_program_is_not_dead_until_that_ends(one):
    with GuardedProcess(one.endpoint()) as process:
        process.order("exec")
        before = switches_of(process.sentinel)
        # The sentinel has seen the end of its pipe, and looks for the process every 0.2 s.
        until(lambda: switches_of(process.sentinel) > before + 4, "the sentinel waits", SOON_S)
        assert memory(process.sentinel) < SMALL
        assert left_s(one, process.lease) > 0
        process.process.kill()
        until_revoked(one, process.lease)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_pidfd_that_lies_or_fails_is_not_believed(one, is_open):
    """The descriptor is a pipe's: readable while the parent lives, or closed."""
    lease = int(one.call("lease/grant", {"TTL": str(LEASE_S)})["ID"])
    readable, writable = os.pipe()
    os.write(writable, b"dead")
    access = sentinel.ClusterAccess(tuple((node.host, node.port) for node in one.nodes), Credentials())
    orders = [
        b"path %s" % "\0".join(sys.path).encode().hex().encode(),
        b"cluster 0 %s" % msgspec.msgpack.encode(access).hex().encode(),
        b"lease %d 0 %d" % (lease, LEASE_S),
    ]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(sentinel._PROGRAM), str(os.getpid()), str(readable)],
        pass_fds=[readable] if is_open else [], stdin=subprocess.PIPE,
    )  # fmt: skip
    process.communicate(b"\n".join([*orders, b""]), timeout=SOON_S)
    assert process.returncode == 0
    assert left_s(one, lease) > 0
    for number in (readable, writable):
        os.close(number)


async def test_members_of_a_process_share_a_sentinel_that_ends_with_the_last_lease(one):
    own = sentinel.own()
    assert own.pid == 0
    first, second = await session_of(one), await session_of(one, read_timeout=5)
    leases = [await first.grant(LEASE_S, presence=True) for _ in range(2)]
    pid = await started()
    leases.append(await second.grant(LEASE_S, presence=True))
    assert is_running(pid)
    assert memory(pid) < SMALL
    await first.revoke(leases[0])
    await second.revoke(leases[2])
    assert own.pid == pid
    await first.revoke(leases[1])
    assert own.pid == 0
    with pytest.raises(ProcessLookupError):  # Not even a zombie is left.
        os.kill(pid, 0)
    again = await second.grant(LEASE_S, presence=True)
    assert await started() != pid
    await second.revoke(again)
    for session in (first, second):
        await session.close()


async def test_leases_of_other_kinds_and_members_that_want_none_have_no_sentinel(one):
    session, without = await session_of(one), await session_of(one, sentinel=False)
    await session.revoke(await session.grant(LEASE_S))
    lease = await without.grant(LEASE_S, presence=True)
    await without.renew(lease)
    assert sentinel.own().pid == 0
    await without.revoke(lease)
    for each in (session, without):
        await each.close()


async def test_a_lease_that_has_ended_is_forgotten(one):
    session = await session_of(one)
    lease = await session.grant(LEASE_S, presence=True)
    await started()
    await asyncio.to_thread(one.call, "lease/revoke", {"ID": str(lease)})
    with pytest.raises(LeaseGone):
        await session.renew(lease)
    assert sentinel.own().pid == 0
    await session.close()


async def test_a_session_that_closes_while_etcd_is_away_leaves_no_sentinel():
    """The lease could not be revoked, so the sentinel stayed as long as the process."""
    with Cluster(1) as cluster:
        session = await session_of(cluster, read_timeout=1)
        lease = await session.grant(LEASE_S, presence=True)
        pid = await started()
        await asyncio.to_thread(cluster.nodes[0].kill)
        with pytest.raises(Unreachable):
            await session.revoke(lease)
        assert sentinel.own().pid == pid, "the lease is there still"
        await session.close()
        assert sentinel.own().pid == 0
        assert not is_running(pid)


async def test_a_member_that_leaves_at_once_costs_no_process(one, monkeypatch):
    starts = []
    monkeypatch.setattr(sentinel, "_start_process", lambda: starts.append(1))
    session = await session_of(one)
    await session.revoke(await session.grant(LEASE_S, presence=True))
    await asyncio.sleep(2 * sentinel.START_AFTER_S)
    assert starts == []
    await session.close()


# ---- a sentinel that fails


async def test_a_sentinel_that_was_killed_is_replaced_at_the_next_renewal_a_few_times(one, caplog):
    own = sentinel.own()
    session = await session_of(one)
    lease = await session.grant(LEASE_S, presence=True)
    pids = [await started()]
    for _ in range(sentinel.STARTS_MAX):
        await asyncio.to_thread(until_ended, kill_sentinel(signal.SIGKILL))
        await session.renew(lease)
        pids.append(own.pid)
    assert len(set(pids)) == sentinel.STARTS_MAX + 1
    assert pids[-1] == 0
    await session.renew(lease)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "3 sentinels of this process have ended: if this process is killed, the others notice it when its lease ends"
    ]
    await session.revoke(lease)
    await session.close()


async def test_a_sentinel_that_reads_nothing_is_given_up_and_the_process_does_not_wait(one):
    own = sentinel.own()
    session = await session_of(one)
    lease = await session.grant(LEASE_S, presence=True)
    await started()
    pid = kill_sentinel(signal.SIGSTOP)
    where = sentinel.ClusterAccess((("127.0.0.1", 1),), Credentials())
    began_at = time.monotonic()
    for _ in range(5000):  # More orders than a pipe holds.
        own.add(1, LEASE_S, where)
        await own.forget(1)
    within(time.monotonic() - began_at, SOON_S)
    await asyncio.to_thread(until_ended, pid)
    own.check()
    assert own.pid not in (0, pid)
    await session.revoke(lease)
    assert own.pid == 0
    await session.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has larger pipes")
async def test_a_search_path_that_is_longer_than_a_pipe_reaches_the_sentinel(one, monkeypatch):
    """Every sentinel was killed because it had not read its orders, and after three there was none."""
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/nowhere/{'x' * 100}/{number}" for number in range(1000))])
    session = await session_of(one)
    lease = await session.grant(LEASE_S, presence=True)
    pid = await started()
    await asyncio.to_thread(until, lambda: guards(pid), "the sentinel has read its orders", SOON_S)
    await session.revoke(lease)
    await session.close()


@pytest.mark.parametrize(("broken", "problem"), [
    (("executable", "/nowhere/python"), "[Errno 2] No such file or directory: '/nowhere/python'"),
    (("frozen", True), "this is a frozen program, which has no Python interpreter"),
])  # fmt: skip
async def test_without_a_sentinel_a_member_comes_all_the_same(one, monkeypatch, caplog, broken, problem):
    monkeypatch.setattr(sys, *broken, raising=False)
    session = await session_of(one)
    with caplog.at_level(logging.WARNING, "rdzv.etcd"):
        lease = await session.grant(LEASE_S, presence=True)
        await session.renew(lease)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"no sentinel could be started ({problem}): if this process is killed, the others notice it when its lease ends"
    ]
    await session.revoke(lease)
    await session.close()


def test_orders_are_obeyed_line_by_line_and_one_that_was_cut_off_is_not():
    orders = Orders()
    orders.take(b"path %s\ncluster 0 %s\nlea" % (os.fsencode("/a b\0/c").hex().encode(), b"where".hex().encode()))
    orders.take(b"se 7 0 10\nlease 8 0 30\ncluster 1 %s\nlease 9 1 5\nforget 7\nforget 8" % b"there".hex().encode())
    assert orders.path == ["/a b", "/c"]
    assert orders.by_cluster() == {b"where": [8], b"there": [9]}
    assert orders.limit_s == 30 + OUTAGE_S
    orders.take(b"\n")
    assert orders.by_cluster() == {b"there": [9]}
    assert orders.limit_s == 5 + OUTAGE_S
    orders.take(b"plain 1 %s\n" % b"n1\x002379\0::1\x002380".hex().encode())
    assert orders.plain == {b"1": [("n1", 2379), ("::1", 2380)]}


# ---- long


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_kills_are_noticed_within_a_second_each(three, record_property):
    """The median is promised. The lease is the default one, of 10 s."""
    took = []
    with EtcdRun(three, 2, 3, run_id=run_id(), lease=10) as run:
        survivors, victim = run.start("a", "b"), run.start("c")
        number = run.wait_world(survivors, victim)
        for turn in range(20):
            pid_of_sentinel(victim.pid)
            run.fault("crash", victim.name)
            killed_at = time.monotonic()
            victim.kill()
            number = run.wait_world(survivors, above=number)
            took.append(max(one.at for one in run.of(Changed) if one.at > killed_at) - killed_at)
            victim = run.start(f"c{turn}")  # One that comes back under its name would be waited for longer each time.
            number = run.wait_world(survivors, victim, above=number)
        shown = ", ".join(f"{one:.2f}" for one in sorted(took))
        median = statistics.median(took)
        record_property("explored", f"etcd: a killed process is noticed after {median:.2f} s (median of {shown})")
        assert median < 1.0, shown
        assert run.evicted() == []
        assert run.wrong() == []


@pytest.fixture
def calm_run(three: Cluster) -> Iterator[EtcdRun]:
    """A run whose members nobody kills: at the end none was disturbed, and each process still has its sentinel."""
    three.heal()
    with EtcdRun(three, 3, 3, run_id=run_id(), lease=10) as run:
        processes = [run.start("a", "b"), run.start("c")]
        assert run.wait_world(*processes) == 1
        sentinels = [pid_of_sentinel(process.pid) for process in processes]
        yield run
        three.heal()
        time.sleep(10.0)  # One lease: by then each member has renewed its own, or has been told.
        assert run.disturbed() == []
        assert [pid_of_sentinel(process.pid) for process in processes] == sentinels
        assert run.wrong() == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_elections_evict_nobody(three, calm_run):
    for _ in range(5):
        leader = three.leader()
        leader.kill()
        three.leader()
        leader.start()
        three.wait_healthy()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_twenty_seconds_without_a_quorum_evict_nobody(three, calm_run):
    for node in three.nodes[1:]:
        node.kill()
    time.sleep(20.0)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_follower_of_etcd_that_is_frozen_for_twenty_seconds_evicts_nobody(three, calm_run):
    leader = three.leader()
    frozen = next(node for node in three.nodes if node is not leader)
    frozen.stop()
    time.sleep(20.0)
    frozen.cont()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_leader_of_etcd_that_is_frozen_for_twenty_seconds_evicts_nobody_until_it_goes_on(three, record_property):
    """When it goes on, it may end the leases of others: etcd's own doing, with every version that was tried (docs/etcd.md).

    So members may be told then, and at no other time, and the run is whole again.
    """
    three.heal()
    with EtcdRun(three, 3, 3, run_id=run_id(), lease=10) as run:
        processes = [run.start("a", "b"), run.start("c")]
        run.wait_world(*processes)
        frozen = three.leader()
        frozen.stop()
        time.sleep(20.0)
        assert run.disturbed() == []
        thawed_at = time.monotonic()
        frozen.cont()
        time.sleep(10.0)  # One lease: by then each member has renewed its own, or has been told.
        told = run.disturbed()
        assert all(one.at < thawed_at + 5.0 for one in told), told
        record_property("explored", f"etcd's frozen leader went on, and {len(run.evicted())} of 3 members were evicted")
        run.wait_world(*processes)
        assert run.wrong(*(kind for kind in SAFETY if kind is not G7Cause)) == []
