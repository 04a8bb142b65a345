"""Attacks on a live `rdzv serve`, with fifty honest members in another run: they must hardly notice.

Each attack of `support.attacks` runs in a process of its own. Meanwhile fifty members form a round, and then renew their
leases all the time. A short attack shows that memory stays within its limits and that nobody's lease ends; a longer one, in
`make soak`, that answers come in time. Memory is read from /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import rdzv
from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.embedded.limits import Limits
from rdzv.engines.embedded.trust import Trust
from rdzv.member.member import Member
from rdzv.system.node import LocalNode
from support.attacks import ATTACKS, LIMITS
from support.certificates import ca_file, issue, trust
from support.processes import memory, starved_s
from support.timing import within

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

MEMBERS = 50
SHORT_S, LONG_S = 1.5, 4.0
PROMISED_S = 1.0
SLACK = 3
"""Test machines are busy."""
MIB = 1024 * 1024
SRC, TESTS = Path(rdzv.__file__).parent.parent, Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{SRC}:{TESTS}"}
ENVIRONMENT.pop("RDZV_TOKEN", None)


@contextmanager
def server(tmp_path, *options, files=4096, limits=None):
    """Start `rdzv serve` with so many descriptors, and other limits if given; yield process, port and log."""
    log = tmp_path / "log"
    program = ["support.limited_server", json.dumps(limits)] if limits else ["rdzv", "serve"]

    limited = ("sh", "-c", f'ulimit -n {files}; ulimit -v {4096 * 1024}; exec "$@"', "sh")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*limited, sys.executable, "-m", *program, "--bind", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE, stderr=errors, env=ENVIRONMENT, text=True,
        )  # fmt: skip
        try:
            yield process, int(process.stdout.readline().rpartition(":")[2]), log
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


class Honest:
    """Fifty members of one run. Their times are without those in which the server, or they, had no CPU to run on."""

    def __init__(self, server_pid, port, of_members, run_id="honest"):
        self._pids = server_pid, os.getpid()
        endpoint = Endpoint.parse(f"127.0.0.1:{port}")
        settings = Settings.make(endpoint, run_id=run_id, min_nodes=MEMBERS, max_nodes=MEMBERS)
        self.members = [
            Member(RemoteDriver(endpoint, run_id=run_id, trust=of_members), settings, LocalNode(f"node{number:02}"))
            for number in range(MEMBERS)
        ]
        self.longest_s = {"join": 0.0, "renewal": 0.0}

    async def timed(self, what, waiting):
        began_at, starved = time.monotonic(), [starved_s(pid) for pid in self._pids]
        result = await asyncio.wait_for(waiting, 30.0)
        took_s = time.monotonic() - began_at
        took_s -= max(starved_s(pid) - before for pid, before in zip(self._pids, starved, strict=True))
        self.longest_s[what] = max(self.longest_s[what], took_s)
        return result

    async def join(self):
        worlds = await asyncio.gather(*(self.timed("join", member.join()) for member in self.members))
        assert sorted(world.rank for world in worlds) == list(range(MEMBERS))

    async def renew(self, going_on):
        async def one(member):
            presence = member.presence
            while going_on():
                await self.timed("renewal", presence.session.renew(presence.lease))
                await asyncio.sleep(0.1)

        await asyncio.gather(*(one(member) for member in self.members))

    async def leave(self):
        await asyncio.gather(*(member.leave() for member in self.members))


async def under(attack, pid, port, lasts_s, of_members):
    """Form and renew under the attack; return the longest times."""
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.attacks", attack, str(port), str(lasts_s), env=ENVIRONMENT
    )
    try:
        await asyncio.sleep(0.5)
        honest = Honest(pid, port, of_members)
        await honest.join()
        await honest.renew(lambda: attacker.returncode is None)
        assert await asyncio.wait_for(attacker.wait(), 20.0) == 0
    finally:
        if attacker.returncode is None:
            attacker.kill()
            await attacker.wait()
    await honest.leave()
    return honest.longest_s


@pytest.mark.parametrize("lasts_s", [SHORT_S, pytest.param(LONG_S, marks=pytest.mark.soak)])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_hardly_noticed_by_others(attack, lasts_s, tmp_path):
    tls = issue()
    options, of_members = (), Trust()
    if attack == "half_open":
        options = ("--tls-cert", tls.tls_cert, "--tls-key", tls.tls_key)
        of_members = trust(pem=None, ca=ca_file() and "ours")
    limits = LIMITS.get(attack, {})
    of_server = Limits(**limits)
    budget = of_server.stored + of_server.unread
    with server(tmp_path, *options, files=512 if attack == "connections" else 4096, limits=limits) as (process, port, log):
        warm = Honest(process.pid, port, of_members, "warm")
        asyncio.run(asyncio.wait_for(form_once(warm), 30))
        before = memory(process.pid)
        began_at = time.monotonic()
        longest_s = asyncio.run(asyncio.wait_for(under(attack, process.pid, port, lasts_s, of_members), 60))
        took_s = time.monotonic() - began_at
        peak = memory(process.pid, "VmHWM")
        deadline = time.monotonic() + 20
        while memory(process.pid) > before + 32 * MIB and time.monotonic() < deadline:
            time.sleep(0.1)
        after = memory(process.pid)
        assert process.poll() is None
    said = log.read_text()
    lines = len(said.splitlines())
    shown = f"{longest_s}, {before // MIB} MiB before, {peak // MIB} at most, {after // MIB} after, {lines} lines"
    sys.stdout.write(f"{attack} {shown}\n")
    assert "Traceback" not in said, said[-3000:]
    assert lines <= took_s + 5, said[-3000:]
    within(max(longest_s.values()), SLACK * PROMISED_S, shown)
    assert peak < before + budget + 64 * MIB, shown
    assert after < before + 32 * MIB, shown


async def form_once(honest):
    await honest.join()
    await honest.leave()
