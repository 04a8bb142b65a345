"""A forked child keeps nothing of its parent's connections, nor its address."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from stand import driver_to, run, serving, session_to

from rdzv.drivers.base import Put
from rdzv.server.server import Server


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at the descriptors in /proc")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_keeps_no_socket_of_server_or_driver():
    async def scenario():
        async with serving() as server, session_to(server.port) as session:
            await session.txn()
            stuck = await driver_to(server.port).connect()
            stuck._link.transport.pause_reading()  # Not in the selector's list, and yet open.
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, b"%d" % len(open_sockets()))
                os._exit(0)
            os.close(writing)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222  It is about to end.
            # What is left are the two ends of the event loop's own pair.
            assert os.read(reading, 100) == b"2"
            os.close(reading)
            await session.txn(then=[Put("k", b"")])
            stuck._link.transport.resume_reading()
            await stuck.txn()
            await stuck.close()

    run(scenario)


def open_sockets():
    found = []
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The one by which we look.
            found.append(str(name.readlink()))
    return [name for name in found if name.startswith("socket")]


def test_the_address_is_free_again_although_a_child_lives_on():
    async def scenario():
        async with serving() as server:
            (reading, writing), (ready, told) = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.write(told, b"x")
                os.read(reading, 1)  # Until the parent is done.
                os._exit(0)
            os.read(ready, 1)
            port = server.port
            await server.stop()
            again = Server(("127.0.0.1", port))
            await again.start()
            await again.stop()
            for descriptor in (writing, reading, ready, told):
                os.close(descriptor)
            os.waitpid(child, 0)  # noqa: ASYNC222

    run(scenario)
