"""The end of a process, as the server sees it: by end-of-file from a dead one, never from one that lives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rdzv
from rdzv.aio import AsyncRendezvous
from rdzv.engines.embedded.server import Server
from rdzv.engines.port import Away, Get, Put
from support.certificates import full
from support.embedded_server import driver_to, run, serving, session_to, until
from support.member_processes import ProcessSet

MEMBER = """
import asyncio, os, sys
sys.path.insert(0, {source!r})
from rdzv.config.endpoint import Endpoint
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.port import Put

async def main():
    session = await RemoteDriver(Endpoint.parse(sys.argv[1]), run_id="job", linger_s=600.0).connect()
    await session.txn(then=[Put("members/x", b"", await session.grant(600.0, presence=True))])
    if "fork" in sys.argv and os.fork() == 0:
        os.read(0, 1)  # A worker that its parent's death does not end: it lives until the test closes its input.
        os._exit(0)
    print("in", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def is_away(session, key="members/x", s=0.0):
    return (await session.txn([Away(key, s)])).succeeded


def is_quiet(port):
    """Whether nothing is under way or unread in the connections of that server."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if f":{port:04X}" in (row[1][8:], row[2][8:]) and row[3] == "01"]
    return bool(mine) and all(row[4] == "00000000:00000000" for row in mine)


async def until_away(session, s):
    deadline = time.monotonic() + 20
    while not await is_away(session, s=s):
        assert time.monotonic() < deadline, "its end was not seen"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("children", ["none", "fork"])
def test_a_killed_process_is_away_even_if_a_forked_child_lives_on(children):
    """A DataLoader's workers, for instance, are forked: they let go of the connection at once."""

    async def scenario():
        async with serving() as server, session_to(server.port) as session:
            source = str(Path(rdzv.__file__).parent.parent)
            command = [sys.executable, "-W", "ignore", "-c", MEMBER.format(source=source), f"127.0.0.1:{server.port}", children]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as member:  # noqa: ASYNC220
                assert await asyncio.to_thread(member.stdout.readline) == "in\n"
                assert not await is_away(session)
                member.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.2)
                assert not await is_away(session), "one that is paused has not ended"
                os.kill(member.pid, signal.SIGKILL)
                killed_at = time.monotonic()
                await until_away(session, 0.5)
                assert time.monotonic() - killed_at >= 0.5, "not sooner than was asked for"
                assert not await is_away(session, s=3600.0)
                assert (await session.txn(then=[Get("members/x")])).item(0) is not None, "its lease goes on"
                member.stdin.close()

    run(scenario)


def test_after_a_restart_of_the_server_nothing_is_away():
    async def scenario():
        async with serving() as server:
            link = await driver_to(server.port, linger_s=600.0).connect()
            await link.txn(then=[Put("members/x", b"", await link.grant(600.0, presence=True))])
            link._link.transport.get_extra_info("socket").shutdown(2)  # As the kernel ends a dead process's connection.
            async with session_to(server.port) as session:
                await asyncio.sleep(0.3)  # It is back by then.
                assert not await is_away(session)
            await link.close()
            await server.stop()
            again = Server(("127.0.0.1", server.port))
            await again.start()
            async with session_to(again.port) as session:
                assert not await is_away(session)
            await again.stop()

    run(scenario)


@pytest.mark.parametrize("way", ["plain", "secured"])
def test_members_that_lose_their_connections_under_load_are_never_away(way):
    """Each gives up its connection again and again, with TLS and a secret or without, while others keep the server busy."""
    trust = full() if way == "secured" else None

    async def scenario():
        async with serving(trust=trust) as server, session_to(server.port, trust=trust) as asker:
            members = [await driver_to(server.port, trust=trust, linger_s=60.0).connect() for _ in range(6)]
            for number, member in enumerate(members):
                await member.txn(then=[Put(f"members/{number}", b"", await member.grant(60.0, presence=True))])
            ends = time.monotonic() + 1.5
            asked, lost = 0, 0

            async def lose(member):
                nonlocal lost
                while time.monotonic() < ends:
                    await until(lambda: member._link is not None, "the connection is back")
                    member._link.lose("the test gave it up")
                    lost += 1
                    await asyncio.sleep(0.01)

            async def ask():
                nonlocal asked
                while time.monotonic() < ends:
                    for number in range(len(members)):
                        assert not await is_away(asker, f"members/{number}"), "it lives"
                        asked += 1

            async def load():
                while time.monotonic() < ends:
                    await asker.txn(then=[Put("load", b"x" * 20_000)])

            await asyncio.gather(ask(), load(), *map(lose, members))
            assert lost >= 6
            assert asked >= 20
            for member in members:
                await member.close()

    run(scenario)


@pytest.mark.parametrize("role", ["follower", "leader"])
def test_survivors_that_stopped_do_not_wait_for_the_linger_of_a_killed_member(role):
    """T8.5, T8.6: the linger is long here, so that nothing but the end of the process can be the reason."""
    linger_s = 16.0
    times = {"lease": 120, "linger": linger_s, "last_call": 100, "settle": 0.3, "grow_every": 0}
    options = {"run_id": "job", "min_nodes": 2, "max_nodes": 3, **times}

    async def scenario():
        async with serving() as server:
            endpoint = f"127.0.0.1:{server.port}"
            with ProcessSet() as processes:
                first, second = (AsyncRendezvous(endpoint, **options, slot=slot) for slot in "ab")
                words = [f"{name}={value}" for name, value in times.items()]
                async with first as a, second as b:

                    def members():
                        items = server.runs["job"].engine.items() if "job" in server.runs else ()
                        return sum("/members/" in item.key for item in items)

                    if role == "leader":
                        killed = processes.member("c", endpoint, "2:3", *words)
                        await until(lambda: members() == 1, "it is in")
                    joining = [asyncio.create_task(one.join()) for one in (a, b)]
                    if role == "follower":
                        await until(lambda: members() == 2, "both are in")
                        killed = processes.member("c", endpoint, "2:3", *words)
                    worlds = await asyncio.gather(*joining)
                    assert [world.size for world in worlds] == [3, 3]
                    # With something unread, its kernel would reset the connection, and the linger would decide.
                    await asyncio.to_thread(killed.world, 3)
                    await until(lambda: is_quiet(server.port), "all is read")
                    at = killed.kill()
                    worlds = await asyncio.gather(a.join(), b.join())  # Their collectives failed.
                    assert [world.size for world in worlds] == [2, 2]
                    assert time.monotonic() - at < linger_s
                    assert worlds[0].round == 2

    asyncio.run(asyncio.wait_for(scenario(), 90.0))  # A process is started, which takes a busy machine long.
