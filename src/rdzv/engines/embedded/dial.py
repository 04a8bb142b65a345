"""Connect to a server and greet it, at whichever of its addresses answers.

All addresses are tried: the next one as soon as the one before has failed or has taken too long.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from ...system.dial import Address, DialFailed, connect, show_address
from .connection import ClientConnection
from .frames import Hello, Welcome

TLS_PATIENCE = 10
"""How many times longer a server may take to greet under TLS. Ten thousand handshakes at once keep it busy for half a minute:
800 clients that gave up after 3 s made it begin again and again."""
STAGGER_S = 0.25
"""How long to wait for one address before the next one is tried, too."""


async def dial(
    addresses: Sequence[Address], hello: Callable[[], Hello], new_link: Callable[[], ClientConnection], timeout_s: float
) -> tuple[ClientConnection, Welcome]:
    """Return a connection to the first address where a server welcomes us. Raise DialFailed with the problem at each.

    Only one connection is greeted at a time, because a greeting moves the session's leases to its connection.
    """
    loop = asyncio.get_running_loop()
    connecting: list[asyncio.Task[socket.socket]] = []
    for address in addresses:
        former = connecting[-1] if connecting else None
        connecting.append(loop.create_task(_connect(address, former, timeout_s), name="rdzv dials"))
    problems: dict[str, None] = {}
    remedies: dict[str, None] = {}
    answered, passing, untrusted = False, True, True
    taken: socket.socket | None = None
    try:
        for connected in asyncio.as_completed(connecting):
            try:
                taken = await connected
                return await greet(taken, hello(), new_link, timeout_s)
            except DialFailed as failed:
                problems[failed.problem] = None
                if failed.remedy:
                    remedies[failed.remedy] = None
                answered = answered or failed.answered
                passing = passing and (failed.passing or not failed.answered)
                untrusted = untrusted and (failed.untrusted or not failed.answered)
    finally:
        for task in connecting:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None and task.result() is not taken:
                task.result().close()
    problem = "; ".join(problems) or "its name has no address"
    remedy = "; ".join(remedies)
    raise DialFailed(problem, answered=answered, passing=passing, untrusted=answered and untrusted, remedy=remedy)


async def greet(
    sock: socket.socket, hello: Hello, new_link: Callable[[], ClientConnection], timeout_s: float
) -> tuple[ClientConnection, Welcome]:
    """Say hello on a fresh connection. Raise DialFailed if that fails; the connection is closed then."""
    link = new_link()
    if link.is_encrypted:
        timeout_s *= TLS_PATIENCE
    await asyncio.get_running_loop().create_connection(link.carrier, sock=sock)
    try:
        return link, await link.greet(hello, timeout_s)
    except DialFailed as failed:
        failed.problem = f"{show_address(link.transport.get_extra_info('peername'))}: {failed.problem}"
        raise


async def _connect(address: Address, former: asyncio.Task[socket.socket] | None, timeout_s: float) -> socket.socket:
    if former is not None:
        await asyncio.wait([former], timeout=STAGGER_S)
    return await connect(address, timeout_s)
