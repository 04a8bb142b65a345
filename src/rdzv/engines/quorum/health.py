"""How each member of a quorum is, asked one by one: etcd's own status of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..etcd.client.client import Client
from ..etcd.client.credentials import Credentials
from ..etcd.client.diagnose import diagnose
from ..etcd.client.errors import EtcdError
from ..port import MemberHealth
from .etcd_program import shown

ASK_S = 2.0


async def look_at_members(hosts: Sequence[tuple[str, int]], credentials: Credentials) -> list[MemberHealth]:
    """Ask every host at once."""
    return await asyncio.gather(*(_look_at(host, port, credentials) for host, port in hosts))


async def _look_at(host: str, port: int, credentials: Credentials) -> MemberHealth:
    where = shown(host, port)
    client = Client([(host, port)], credentials, ASK_S)
    try:
        status = await client.status(ASK_S)
    except EtcdError as error:
        return MemberHealth(where, problem=await diagnose(host, port, credentials, ASK_S) or error.problem)
    finally:
        await client.close()
    member = status.header.member
    if not status.leader:
        return MemberHealth(where, problem="it has no leader: too few members reach each other")
    return MemberHealth(where, status.leader == member, f"etcd {status.version}", status.size)
