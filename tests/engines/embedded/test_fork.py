"""A forked child keeps nothing of its parent's connections, nor its address."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import rdzv
from rdzv.engines.embedded.server import Server
from rdzv.engines.port import Put
from support.embedded_server import driver_to, run, serving, session_to
from support.ports import free_port


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at the descriptors in /proc")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_keeps_no_socket_of_server_or_driver():
    async def scenario():
        others = len(open_sockets())  # The event loop's own pair, and what other tests of this process have left open.
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
            assert os.read(reading, 100) == b"%d" % others
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


FORKED = """
import gc, logging, os, sys, threading
import rdzv

logging.getLogger("rdzv").setLevel(logging.ERROR)
QUICK = dict(run_id="job", last_call=0.2, lease=1, min_nodes=2, max_nodes=2)
members = [rdzv.Rendezvous(sys.argv[1], **QUICK) for _ in range(2)]
threads = [threading.Thread(target=member.join) for member in members]
for thread in threads: thread.start()
for thread in threads: thread.join()

def sockets():
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(name) for name in names if os.path.lexists(name)]
    return len([target for target in targets if target.startswith(("socket", "anon_inode"))])

def say(*words):
    print(*words, flush=True)

say("parent serves", sockets() > 4)
child = os.fork()
if child == 0:
    say("child", sockets())
    with rdzv.Rendezvous(sys.argv[1], **QUICK) as own:
        say("child sees", len(own.status().members))
    del members, threads, own
    gc.collect()
    say("child at its end", sockets())
    sys.exit(0)
say("child ended", os.waitpid(child, 0)[1])
say("undisturbed", members[0].wait_changed(1.5), members[1].changed, members[0].status().phase)
for member in members:
    member.leave()
say("parent at its end", sockets())
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at the descriptors in /proc")
def test_a_child_of_the_process_that_serves_can_reach_it_like_any_other(tmp_path):
    file = tmp_path / "forked.py"
    file.write_text(FORKED)
    command = [
        sys.executable, "-X", "dev", "-W", "error", "-W", "ignore:.*multi-threaded:DeprecationWarning", str(file),
        f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    assert done.stdout.splitlines() == [
        "parent serves True",
        "child 0",
        "child sees 2",
        "child at its end 0",
        "child ended 0",
        "undisturbed None None sealed",
        "parent at its end 0",
    ]
