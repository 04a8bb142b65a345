"""Programs that a type checker accepts. They are checked, not run: tests/test_typing.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import rdzv
from rdzv import aio, worker
from rdzv.errors import Closed, JoinTimeout


def observe(notice: rdzv.Notice) -> None:
    totals: rdzv.Totals | None = notice.totals
    print(notice.kind, notice.reason, totals)


def every_option(place: rdzv.Endpoint, driver: rdzv.Driver) -> rdzv.Rendezvous:
    return rdzv.Rendezvous(
        place, run_id="job", min_nodes=2, max_nodes="4", observer=observe, driver=driver,
        last_call=3, lease=10.0, grow="unit=4", on_failure="wait", unit=2, slot=1, order="7", info={"gpu": "8"},
        token_file=Path("secret"), token=rdzv.Secret("word"), bootstrap_port=(29500, 29600), tls=None, sentinel=False,
    )  # fmt: skip


def train(options: rdzv.Options) -> int:
    with rdzv.Rendezvous("auto", run_id="", min_nodes=1, max_nodes=1, **options) as r:
        try:
            world: rdzv.World = r.join(timeout_s=60, workers=8, role="trainer")
        except JoinTimeout as error:
            raise SystemExit(error.sentence) from error
        except Closed as closed:
            return 0 if closed.success else 1
        store: rdzv.Store = world.store
        store.set("key", "text")
        value: bytes = store.get("key", timeout_s=1)
        peers: list[rdzv.Peer] = world.members()
        ranks: rdzv.WorkerRanks | None = world.worker_ranks
        bootstrap: rdzv.Bootstrap = world.bootstrap
        era: rdzv.Era = world.era
        print(peers[0].addr, value, ranks, bootstrap.host, bootstrap.port, era.level, world.fence)
        change: rdzv.Change | None = r.wait_changed(1.0)
        if change is not None and change.kind is rdzv.ChangeKind.ROUND:
            print(change.reason, change.newcomers)
        status: rdzv.Status = r.status()
        member: rdzv.MemberStatus = status.members[0]
        report: rdzv.ProgressReport | None = member.progress
        events: rdzv.RunEvents | None = status.events
        if events is not None:
            last: rdzv.RunChange = events.last
            cause: rdzv.CauseKind | None = last.cause
            print(last, cause)
        progress: rdzv.RunProgress | None = status.progress
        print(report, progress)
        worker.progress(1)
        r.done()
    return 0


async def with_a_loop() -> None:
    async with aio.Rendezvous("memory://", run_id="job", min_nodes=1, max_nodes=1, last_call=0.1) as r:
        world: aio.World = await r.join()
        store: aio.Store = world.store
        await store.multi_set({"a": b"1"})
        peers: list[aio.Peer] = await world.members()
        print(peers)


def main() -> None:
    asyncio.run(with_a_loop())
    train({"last_call": 0.1})
    train(cast("rdzv.Options", {"last_call": "3"}))  # Texts, as from a command line, need a cast.
