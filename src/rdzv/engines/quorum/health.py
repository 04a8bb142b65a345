"""How each member of a quorum is, asked one by one: etcd's own status of itself, or why a host runs none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..etcd.client.client import Client
from ..etcd.client.credentials import Credentials
from ..etcd.client.diagnose import diagnose
from ..etcd.client.errors import EtcdError
from ..port import MemberHealth
from .etcd_program import shown
from .exchange import Asker

ASK_S = 2.0


async def look_at_members(hosts: Sequence[tuple[str, int]], credentials: Credentials, asker: Asker) -> list[MemberHealth]:
    """Ask every host at once. `asker` knows them in the same order."""
    return await asyncio.gather(*(_look_at(index, host, port, credentials, asker) for index, (host, port) in enumerate(hosts)))


async def _look_at(index: int, host: str, port: int, credentials: Credentials, asker: Asker) -> MemberHealth:
    where = shown(host, port)
    client = Client([(host, port)], credentials, ASK_S)
    try:
        status = await client.status(ASK_S)
    except EtcdError as error:
        problem = await _why_no_etcd(index, asker) or await diagnose(host, port, credentials, ASK_S) or error.problem
        return MemberHealth(where, problem=problem)
    finally:
        await client.close()
    member = status.header.member
    if not status.leader:
        return MemberHealth(where, problem="it has no leader: too few members reach each other")
    return MemberHealth(where, status.leader == member, f"etcd {status.version}", status.size)


async def _why_no_etcd(index: int, asker: Asker) -> str:
    """Return what the agent of a host without etcd says of it; "" if none answers."""
    offer = await asker.ask_agent(index)
    if offer is None:
        return ""
    if offer.chosen:
        return "it came back without its data, and has no vote until the run is over"
    return "it waits for the first start, which needs all hosts"
