"""Programs with one mistake each. A type checker must report each at its line, with the text that is named there."""

from __future__ import annotations

import rdzv
from rdzv import aio, worker

rdzv.Rendezvous("h", run_id="job", min_nodes=1, max_nodes=1, last_cal=3)  # E: "last_cal"
rdzv.Rendezvous("h", run_id="job", min_nodes=1, max_nodes=1, last_call="3")  # E: "last_call"
rdzv.Rendezvous("h", run_id="job", min_nodes=1, max_nodes=1, on_failure="clos")  # E: "on_failure"
rdzv.Rendezvous("h", run_id="job", min_nodes=1, max_nodes=1, info={"gpus": 8})  # E: dict-item
rdzv.Rendezvous("h", run_id="job", min_nodes=1, max_nodes=1, sentinel="no")  # E: "sentinel"
rdzv.Rendezvous("h", run_id="job", min_nodes=1)  # E: "max_nodes"
rdzv.Rendezvous("h", "job", min_nodes=1, max_nodes=1)  # E: positional
aio.Rendezvous("h", run_id="job", min_nodes=1, max_nodes=1, leese=3)  # E: "leese"
options: rdzv.Options = {"linger": 1, "segmnt": 2}  # E: "segmnt"


def use(r: rdzv.Rendezvous, world: rdzv.World) -> None:
    r.join(timeout=60)  # E: "timeout"
    r.leave(True)  # E: positional
    world.rank = 1  # E: read-only
    world.ranks  # E: "ranks"
    world.store.get(7)  # E: "get"
    world.store.add("key", "1")  # E: "add"
    text: str = world.store.get("key")  # E: "bytes"
    r.changed.kind  # E: "None"
    if r.status().phase == rdzv.ChangeKind.LOST:  # E: "LOST"
        print(text)
    worker.progress("1")  # E: "progress"


async def wait(r: aio.Rendezvous) -> int:
    world = await r.join()
    world.store.set("key", b"1")  # E: Coroutine
    return world.members()  # E: Coroutine
