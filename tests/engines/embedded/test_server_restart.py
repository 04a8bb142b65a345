"""Members of a running round while their server goes away and comes back empty: real members, real sockets."""

from __future__ import annotations

import asyncio
import time

from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.core.keys import Keys
from rdzv.core.member import away_s
from rdzv.core.member_rules import ChangeKind
from rdzv.engines.embedded.server import Server
from rdzv.engines.port import List
from rdzv.member.member import Member
from rdzv.system.node import LocalNode
from support.embedded_server import Proxy, driver_to, serving, until
from support.timing import within

QUICK = {"last_call": 0.2, "settle": 0.1, "drain_settle": 0.1, "grow_every": 0, "lease": 2, "closed_for": 5}


class Group:
    """Members that reach their server through ports of their own choice."""

    def __init__(self, port, min_nodes, max_nodes, **options):
        self.port = port
        self.options = {"run_id": "job", "min_nodes": min_nodes, "max_nodes": max_nodes, **QUICK, **options}
        self.members = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.gather(*(member.leave() for member in self.members))

    def member(self, host, port=None):
        settings = Settings.make(Endpoint.parse(f"127.0.0.1:{port or self.port}"), **self.options)
        driver = driver_to(port or self.port, linger_s=settings.linger, read_timeout_s=2.0)
        member = Member(driver, settings, LocalNode(host))
        self.members.append(member)
        return member

    async def form(self, *hosts):
        members = [self.member(host) for host in hosts]
        return members, await asyncio.gather(*(member.join() for member in members))

    def moved_to(self, instance):
        """All of them are present on that instance."""
        presences = [member.presence for member in self.members]
        return all(one is not None and one.session.instance == instance and one.created > 0 for one in presences)


async def restarted(server, away_s=0.0):
    port = server.port
    await server.stop()
    await asyncio.sleep(away_s)
    again = Server(("127.0.0.1", port))
    await again.start()
    return again


def instance_of(server):
    return server.runs["job"].engine.instance if "job" in server.runs else ""


async def test_members_of_a_running_round_go_on_undisturbed_after_an_empty_restart():
    async with serving() as server, Group(server.port, 3, 3) as group:
        members, worlds = await group.form("n0", "n1", "n2")
        ranks = {member: world.rank for member, world in zip(members, worlds, strict=True)}
        for away_s in (0.0, 1.0):
            server = await restarted(server, away_s)  # noqa: PLW2901
            await until(lambda: group.moved_to(instance_of(server)), "re-telling")  # noqa: B023
            await until_sealed(members[0])
            status = await members[0].status()
            assert (status.phase, status.round) == ("sealed", 1)
            await worlds[0].store.set("k", b"still works")
            assert await worlds[2].store.get("k") == b"still works"
            assert [member.changed for member in members] == [None] * 3
        assert ranks == {member: member.world.rank for member in members}
        await server.stop()


async def test_what_the_server_forgot_is_told_again_and_nobody_is_disturbed():
    """A server that is short of room forgets a run whose members are away for a minute."""
    async with serving() as server, Proxy(server.port) as proxy, Group(proxy.port, 2, 2) as group:
        members, worlds = await group.form("n0", "n1")
        former = instance_of(server)
        proxy.accepts = False
        proxy.cut()
        await until(lambda: not server.runs["job"].sessions)
        server._forget(server.runs["job"])
        proxy.accepts = True
        await until(lambda: instance_of(server) not in ("", former) and group.moved_to(instance_of(server)), "re-telling")
        await until_sealed(members[0])
        await worlds[0].store.set("k", b"still works")
        assert [member.changed for member in members] == [None] * 2


async def until_sealed(member):
    while (await member.status()).phase != "sealed":  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_member_lost_while_the_server_was_away_is_noticed():
    async with serving() as server, Group(server.port, 2, 3) as group:
        members, _ = await group.form("n0", "n1", "n2")
        gone = members[2]
        port = server.port
        await server.stop()
        gone.task.cancel()
        await asyncio.wait([gone.task])
        async with serving(port=port):
            changes = await asyncio.gather(*(member.wait_changed(20) for member in members[:2]))
            assert {change.kind for change in changes} == {ChangeKind.ROUND}
            worlds = await asyncio.gather(*(member.join() for member in members[:2]))
            assert [world.round for world in worlds] == [2, 2]
            assert {world.size for world in worlds} == {2}
            await asyncio.gather(*(member.leave() for member in members))


async def test_a_server_that_is_away_for_a_while_disturbs_nobody():
    async with serving() as server, Proxy(server.port) as proxy, Group(proxy.port, 2, 2) as group:
        members, _ = await group.form("n0", "n1")
        proxy.accepts = False
        proxy.cut()
        await asyncio.sleep(5.0)  # Longer than the lease: the server hears nobody and judges nobody.
        proxy.accepts = True
        await until(lambda: all(not away_s(member.state, time.monotonic()) for member in members), "being back")
        assert [member.changed for member in members] == [None, None]
        assert (await members[0].status()).round == 1


async def test_a_killed_member_is_noticed_after_the_linger_and_long_before_its_lease_ends():
    async with serving() as server, Group(server.port, 2, 3, lease=30) as group, Proxy(server.port) as proxy:
        members = [group.member("n0"), group.member("n1"), group.member("n2", proxy.port)]
        await asyncio.gather(*(member.join() for member in members))
        proxy.accepts = False
        proxy.cut()
        died_at = time.monotonic()
        changes = await asyncio.gather(*(member.wait_changed(20) for member in members[:2]))
        assert all(changes)
        took_s = time.monotonic() - died_at
        assert took_s >= 1.0
        within(took_s, 3 * 1.5)
        proxy.accepts = True


async def test_all_that_a_run_left_is_gone_in_the_end():
    async with serving() as server:
        async with Group(server.port, 2, 2) as group:
            members, _ = await group.form("n0", "n1")
            await asyncio.gather(*(member.done() for member in members))
        session = await driver_to(server.port).connect()
        listed = await session.txn(then=[List(Keys("job").members)])
        assert listed.reads[0] == ()
        await session.close()
        await until(lambda: not server.peers)
        assert server.runs["job"].presences == 0


async def test_fences_grow_over_restarts_and_over_lives_of_the_run_id():
    """One run whose server restarts empty; then the run id is used again, by members that know nothing."""
    async with serving() as server:
        async with Group(server.port, 2, 2) as group:
            (a, b), worlds = await group.form("a", "b")
            fences = [worlds]
            server = await restarted(server)  # noqa: PLW2901
            await until(lambda: group.moved_to(instance_of(server)), "re-telling")
            fences.append(await asyncio.gather(a.join(), b.join()))
        server = await restarted(server)  # noqa: PLW2901
        await asyncio.sleep(1.0)  # Nobody tells, so the clock decides, which shows whole seconds.
        async with Group(server.port, 2, 2) as group:
            fences.append((await group.form("c", "d"))[1])
        await server.stop()
    assert [[world.round for world in worlds] for worlds in fences] == [[1, 1], [2, 2], [1, 1]]
    first, second, third = ({world.fence for world in worlds} for worlds in fences)
    assert len(first) == len(second) == len(third) == 1
    assert max(first) < max(second) < max(third)
