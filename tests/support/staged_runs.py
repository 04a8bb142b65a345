"""A run of any size, written straight into an engine: its records, and no members behind them."""

from __future__ import annotations

from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Call, Cause, Era, Head, JournalEntry, MemberRecord, Phase, RankEntry, RunSettings
from rdzv.engines.port import Get, List, Put, Session

ERA = Era(1, "e")


class StagedRun:
    """Writes the records of a run as a leader would."""

    def __init__(self, session: Session, run_id: str, size: int, **settings: int) -> None:
        self.session = session
        self.keys = Keys(run_id)
        self.names = [f"node-{index:04d}" for index in range(size)]
        self.settings = {"min_nodes": 2, "max_nodes": max(2, size), **settings}
        self.number = self.seq = 0

    async def begin(self) -> None:
        """Let all members come, and seal the first round."""
        lease = self.lease = await self.session.grant(3600.0)
        run = RunSettings(**self.settings)
        puts = [Put(self.keys.settings, wire.encode(run), lease)]
        for name in self.names:
            record = MemberRecord(name=name, host=name, addr="127.0.0.1", info={"gpu": "8"})
            puts.append(Put(self.keys.member(name), wire.encode(record), lease))
        await self.session.txn(then=puts)
        await self.seal()

    async def seal(self, lasted_s: float | None = None, gone: tuple[str, ...] = ()) -> None:
        self.number += 1
        table = f"t{self.number}"
        listed = await self.session.txn(then=[List(self.keys.members)])
        created = {item.key[len(self.keys.members) :]: item.created for item in listed.reads[0]}
        puts = []
        for rank, name in enumerate(self.names):
            entry = RankEntry(rank=rank, created=created[name], name=name, host=name, sealed_as=name)
            puts.append(Put(self.keys.entry(table, name), wire.encode(entry), self.lease))
        await self.session.txn(then=puts)
        await self.write(Phase.SEALED, f"{len(self.names)} nodes", None, lasted_s, gone)

    async def write(
        self, phase: Phase, reason: str, cause: Cause | None, lasted_s: float | None = None, gone: tuple[str, ...] = ()
    ) -> None:
        """Write a head and its journal entry."""
        self.seq += 1
        shared = {"run": "r", "era": ERA, "number": self.number, "phase": phase, "size": len(self.names), "cause": cause}
        head = Head(**shared, table=f"t{self.number}", seq=self.seq, next_era=ERA, boot="127.0.0.1:1")
        line = JournalEntry(
            **shared, seq=self.seq, call=Call.NONE, by="node-0000", reason=reason, lasted_s=lasted_s, gone=gone,
            stamp="2026-11-17T03:12:45Z",
        )  # fmt: skip
        await self.session.txn(
            then=[
                Put(self.keys.head, wire.encode(head), self.lease),
                Put(self.keys.journal_entry(self.seq), wire.encode(line), self.lease),
            ]
        )

    async def head(self) -> Head:
        item = (await self.session.txn(then=[Get(self.keys.head)])).item(0)
        assert item is not None
        return wire.decode(Head, item.value)
