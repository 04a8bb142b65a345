"""The runs on a real etcd are found with one small read each, below the endpoint's path."""

from __future__ import annotations

from rdzv.config.settings import Settings
from rdzv.core.keys import Keys
from rdzv.drivers import open_driver
from rdzv.engines.etcd.driver import EtcdSession
from rdzv.engines.port import Put
from rdzv.operate.runs import list_runs, look_at_runs


async def test_runs_are_listed_with_one_read_each_however_large_they_are(one, monkeypatch):
    settings = Settings.make(one.endpoint("jobs"), run_id="any", min_nodes=1, max_nodes=1)
    driver = open_driver(settings)
    session = await driver.connect()
    names = sorted(f"train {number}/a" for number in range(20))
    for name in names:
        await session.txn(then=[Put(f"{Keys(name).group}{number}", b"x") for number in range(100)])
    await session.txn(then=[Put("rdzv/stray", b""), Put("rdzv/%1b%5b31m/group/x", b""), Put("other/job/group/x", b"")])
    reads, txn = [], EtcdSession.txn

    async def counted(self, *args, **kwargs):
        outcome = await txn(self, *args, **kwargs)
        reads.append(sum(len(items) for items in outcome.reads))
        return outcome

    monkeypatch.setattr(EtcdSession, "txn", counted)
    listed = await list_runs(settings)
    assert ([run.run_id for run in listed.runs], listed.more) == (names, False)
    assert reads == [1] * (len(names) + 2) + [0]
    reads.clear()
    some = await list_runs(settings, limit=5)
    assert ([run.run_id for run in some.runs], some.more) == (names[:5], True)
    seen = await look_at_runs(settings, some.runs)
    assert [(one.status, one.problem) for one in seen] == [(None, "")] * 5, "their keys are not those of a run"
    await session.close()
