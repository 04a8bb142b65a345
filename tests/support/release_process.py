"""A server or a member of whichever release PYTHONPATH names: `python release_process.py serve | member ENDPOINT SIZE`.

It prints a line for each step and goes on at each line of input, so it imports only what every release has.
"""

import asyncio
import sys

from rdzv.aio import AsyncRendezvous
from rdzv.engines.embedded.server import Server


async def told() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def serve() -> None:
    server = Server(("127.0.0.1", 0))
    await server.start()
    print(f"127.0.0.1:{server.port}", flush=True)  # noqa: T201
    await told()
    await server.stop()


async def member(endpoint: str, size: str) -> None:
    """Take part in a round, set a key of its store and read another member's; again at each line of input."""
    settings = {"run_id": "both", "min_nodes": size, "max_nodes": size, "is_host": False}
    async with AsyncRendezvous(endpoint, **settings) as rendezvous:
        while True:
            world = await rendezvous.join(30)
            await world.store.set(f"of {world.rank}", b"%d" % world.rank)
            other = await world.store.get(f"of {(world.rank + 1) % world.size}")
            print(world.round, world.rank, world.size, int(other), flush=True)  # noqa: T201
            if not await told():
                return


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    asyncio.run({"serve": serve, "member": member}[what](*words))
