"""Real processes that share one address: whoever serves is killed, and another takes its place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import rdzv
from support.embedded_server import LONG_S, run
from support.ports import free_port

SRC = Path(rdzv.__file__).parent.parent

MEMBER = """
import json, sys, threading
import rdzv

endpoint, slot = sys.argv[1:]
options = dict(last_call=0.3, settle=0.2, grow_every=0, lease=3, read_timeout=3)

def say(**words):
    print(json.dumps(words), flush=True)

with rdzv.Rendezvous(endpoint, run_id="job", min_nodes=2, max_nodes=3, slot=slot, **options) as r:
    threading.Thread(target=lambda: (sys.stdin.read(), r.leave()), daemon=True).start()
    while True:
        try:
            world = r.join()
            say(round=world.round, rank=world.rank, size=world.size, boot=str(world.bootstrap))
            change = r.wait_changed()
        except rdzv.errors.LeftAlready:
            break
        except rdzv.errors.Evicted as error:
            say(evicted=str(error))
            continue
        if change is None:
            break
        say(changed=change.reason)
"""


class Process:
    """A member of its own process."""

    def __init__(self, file, endpoint, slot, **environ):
        self.process = subprocess.Popen(
            [sys.executable, str(file), endpoint, slot], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(SRC), **environ},
        )  # fmt: skip

    async def world(self):
        """The next world that it prints; other words are passed over."""
        loop = asyncio.get_running_loop()
        while True:
            line = await asyncio.wait_for(loop.run_in_executor(None, self.process.stdout.readline), LONG_S)
            assert line, f"it ended with {self.process.wait(LONG_S)}"
            words = json.loads(line)
            if "round" in words:
                return words

    def serves(self, port):
        """Whether this process listens there."""
        inodes = {line.split()[9] for line in _listening() if line.split()[1].endswith(f":{port:04X}")}
        folder = Path(f"/proc/{self.process.pid}/fd")
        links = []
        for name in folder.iterdir():
            with suppress(OSError):
                links.append(str(name.readlink()))
        return any(f"socket:[{inode}]" in links for inode in inodes)

    def end(self):
        self.process.kill()
        self.process.wait(LONG_S)
        self.process.stdout.close()
        self.process.stdin.close()


def _listening():
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            if line.split()[3] == "0A":
                yield line


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for listeners in /proc")
@pytest.mark.parametrize("environ", [{}, {"RDZV_TOKEN": "the secret of all three"}], ids=["open", "with a secret"])
def test_when_the_serving_process_is_killed_another_one_takes_its_place(environ, tmp_path):
    file = tmp_path / "member.py"
    file.write_text(MEMBER)
    port = free_port()
    members = [Process(file, f"127.0.0.1:{port}", slot, **environ) for slot in "abc"]

    async def scenario():
        worlds = await asyncio.gather(*(member.world() for member in members))
        assert sorted(world["rank"] for world in worlds) == [0, 1, 2]
        assert {(world["round"], world["size"], world["boot"]) for world in worlds} == {(1, 3, worlds[0]["boot"])}
        (serving_one,) = [member for member in members if member.serves(port)]
        serving_one.process.send_signal(signal.SIGKILL)
        rest = [member for member in members if member is not serving_one]
        worlds = await asyncio.gather(*(member.world() for member in rest))
        assert sorted(world["rank"] for world in worlds) == [0, 1]
        assert {(world["round"], world["size"], world["boot"]) for world in worlds} == {(2, 2, worlds[0]["boot"])}
        assert [member.serves(port) for member in rest].count(True) == 1
        # And who serves now leaves last, however early it is told to.
        rest.sort(key=lambda member: not member.serves(port))
        rest[0].process.stdin.close()
        await asyncio.sleep(0.5)
        assert rest[0].process.poll() is None
        rest[1].process.stdin.close()
        for member in rest:
            assert member.process.wait(LONG_S) == 0

    try:
        run(scenario)
    finally:
        for member in members:
            member.end()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for listeners in /proc")
def test_from_a_serving_process_that_is_stopped_nobody_takes_over_before_it_is_dead(tmp_path):
    """It keeps its port, so the others wait and keep their round. Continued, it goes on; killed, it is replaced.

    A takeover while it may come back would split the run: tests/sim/test_interleavings_restart.py tells how.
    """
    file = tmp_path / "member.py"
    file.write_text(MEMBER)
    port = free_port()
    members = [Process(file, f"127.0.0.1:{port}", slot) for slot in "abc"]

    async def scenario():
        await asyncio.gather(*(member.world() for member in members))
        (serving_one,) = [member for member in members if member.serves(port)]
        rest = [member for member in members if member is not serving_one]
        serving_one.process.send_signal(signal.SIGSTOP)
        following = [asyncio.ensure_future(member.world()) for member in rest]
        await asyncio.sleep(8.0)  # Longer than lease, linger and read_timeout together.
        assert [member.serves(port) for member in members].count(True) == 1
        assert serving_one.serves(port)
        serving_one.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(3.0)
        assert not any(future.done() for future in following), "the round went on"
        serving_one.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        serving_one.process.send_signal(signal.SIGKILL)
        worlds = await asyncio.gather(*following)
        assert {(world["round"], world["size"]) for world in worlds} == {(2, 2)}
        assert [member.serves(port) for member in rest].count(True) == 1

    try:
        run(scenario)
    finally:
        for member in members:
            member.end()
