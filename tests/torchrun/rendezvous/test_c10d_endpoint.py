"""Stock torchrun agents whose run is kept in a register: torch's TCPStore, and a file."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from rdzv.config.settings import Settings
from rdzv.errors import Unreachable
from rdzv.torchrun.rendezvous.c10d_rendezvous_backend import open_driver
from support.ports import free_port


def test_where_nobody_serves_a_store_it_is_said_at_once_and_without_torchs_frames(capfd):
    place = f"127.0.0.1:{free_port()}"

    async def connect():
        driver = open_driver(Settings.make(f"c10d://{place}", run_id="t", min_nodes=1, max_nodes=1, is_host=False))
        with pytest.raises(Unreachable, match=rf"nobody serves a store at {place} \(connection refused\); start the node"):
            await driver.connect()
        await driver.close()

    asyncio.run(asyncio.wait_for(connect(), 5))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("scheme", ["c10d", "file"])
def test_torchrun_forms_loses_an_agent_and_finishes_on_a_register(scheme, job, tmp_path):
    endpoint = f"c10d://127.0.0.1:{free_port()}" if scheme == "c10d" else f"file://{tmp_path}/state"
    training = job("1:3", endpoint=endpoint, lease=2, last_call=1, settle=0.5, grow_every=0)
    # The agent that serves the TCPStore is the first, and must live.
    training.agent("a")
    training.world("a", 1)
    for node in "bc":
        training.agent(node)
    training.world("abc", 3)
    killed_at = training.agents["c"].kill()
    training.world("ab", 2, after=killed_at)
    training.finish_all("ab")
