"""Observes all runs of a source: one watch per run, folded into one model per run. It writes nothing and never joins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from ..core import wire
from ..core.keys import Keys
from ..core.model import JournalEntry, Phase
from ..core.status import Status
from ..core.view import LiveMember
from ..engines.port import Batch, EngineReset, Get, Item, List, Operation, Session
from ..errors import Incompatible, RdzvError
from ..operate.run_viewer import RunViewer
from .history import Histogram, Line, RunModel
from .sources import Source

logger = logging.getLogger("rdzv.web")

RUNS_MAX = 500
"""Runs that are watched at once. Each has a watch and a copy of its records here."""
KEPT_S = 600.0
"""How long a run that is gone is still shown."""
LOOK_S = 0.2
"""Least time between two descriptions of a run: each costs a step per member, and members come by the hundred."""
LOOK_AGAIN_S = 2.0
"""How often a run that waits for something is described again: its reason counts seconds."""
RETRY_S = (0.25, 5.0)
SEQS_MAX = 32
"""Journal lines that are read one by one. More are read by a list."""
DEFECT = "the observer failed, which is a defect of it; its log says more"
OPERATIONS = ("list_runs", "connect", "read")
REQUEST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Defects:
    """Remembers the last exception that nobody foresaw, so that one that comes every second is logged once."""

    def __init__(self) -> None:
        self._last = ""

    def is_new(self, error: Exception) -> bool:
        before, self._last = self._last, repr(error)
        return self._last != before


class RunFollower:
    """Follows one run for as long as it is there."""

    def __init__(self, observer: RunsObserver, run_id: str, *, is_new: bool) -> None:
        self.run_id = run_id
        self.model = RunModel(run_id)
        self.session: Session | None = None
        self.trouble = ""
        """Why the run cannot be seen at the moment."""
        self.gone_at: float | None = None
        self._observer = observer
        self._defects = Defects()
        self._keys = Keys(run_id)
        self._viewer: RunViewer | None = None
        self._known: dict[str, LiveMember] = {}
        self._leader = ""
        self._read = (0, "", 0)
        """Revision, run and seq of the head whose journal lines were read last."""
        self._looking: asyncio.TimerHandle | None = None
        self._looked_at = -LOOK_S
        self._reading = asyncio.Lock()
        if is_new:
            self.model.appeared(observer.now())
        self.task = asyncio.get_running_loop().create_task(self._follow(), name=f"rdzv observes {run_id}")

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def renewal_ages(self) -> dict[str, float]:
        """Return the age of each member's last renewal by member id; empty: this engine does not tell."""
        ages = getattr(self.session, "renewal_ages", None)
        try:
            return cast("dict[str, float]", ages(self._keys.members)) if ages is not None else {}
        except EngineReset:
            return {}

    async def refresh(self) -> None:
        """Read the journal again, after a request that changed no head."""
        if self.session is not None and self._viewer is not None:
            await self._read_lines(self.session, self._viewer)
            self.look()

    async def _follow(self) -> None:
        wait_s = RETRY_S[0]
        while True:
            began = self._observer.now()
            try:
                await self._follow_session(await self._observer.timed("connect", self._observer.source.connect(self.run_id)))
            except (RdzvError, EngineReset) as error:
                self.trouble = error.sentence if isinstance(error, RdzvError) else f"the engine was restarted: {error}"
            except Exception as error:  # A record that nobody foresaw must not end the metrics of its run for good.
                if self._defects.is_new(error):
                    logger.exception("a defect in the observer of run %r", self.run_id)
                self.trouble = DEFECT
            self._observer.changed(self)
            wait_s = RETRY_S[0] if self._observer.now() - began > RETRY_S[1] else min(RETRY_S[1], 2 * wait_s)
            await asyncio.sleep(wait_s)

    async def _follow_session(self, session: Session) -> None:
        self._viewer = viewer = RunViewer(session, self.run_id, self._observer.now)
        self.session = session
        is_live = False
        try:
            async for batch in viewer.changes():
                self.trouble = ""
                if batch is None:
                    self._known = dict(viewer.mirror.members)
                    await self._read_lines(session, viewer, is_live=is_live)
                    is_live = True
                    self._note_leader(viewer)
                    self.look()
                    continue
                self._note_members(viewer, batch)
                if self._is_head_or_request(batch):
                    await self._read_lines(session, viewer)
                    self.look()
                else:
                    self._look_later()
        finally:
            self.session = self._viewer = None
            with suppress(RdzvError):
                await session.close()

    # ---- facts that only a watch shows

    def _note_members(self, viewer: RunViewer, batch: Batch) -> None:
        mirror, start = viewer.mirror, self._keys.members
        evicted = 0
        for event in batch.events:
            if event.key.startswith(start):
                id = event.key[len(start) :]
                live = mirror.members.get(id)
                if live is not None:
                    self._known[id] = live
                elif (former := self._known.pop(id, None)) is not None and event.item is None:
                    evicted += _is_eviction(viewer, former)
        if evicted:
            self.model.evicted(evicted)
        if self._leader not in mirror.members:
            self._note_leader(viewer)

    def _note_leader(self, viewer: RunViewer) -> None:
        oldest = min(viewer.mirror.members.values(), key=lambda live: live.created, default=None)
        self._leader = oldest.id if oldest is not None else ""
        self.model.leader_is(self._leader)

    def _is_head_or_request(self, batch: Batch) -> bool:
        keys = self._keys
        return any(event.key == keys.head or event.key.startswith((keys.asks, keys.bans)) for event in batch.events)

    # ---- lines

    async def _read_lines(self, session: Session, viewer: RunViewer, *, is_live: bool = True) -> None:
        """Read the journal lines since the last read: they lie beside the keys that are watched."""
        async with self._reading:
            keys, head, item = self._keys, viewer.mirror.head, viewer.mirror.head_item
            seqs: Iterable[int] = ()
            revision, run, seq = self._read
            are_few = head is not None and is_live and run == head.run and 0 <= head.seq - seq <= SEQS_MAX
            if head is not None and are_few:
                seqs = range(seq + 1, head.seq + 1)
            reads: list[Operation] = [*(Get(keys.journal_entry(one)) for one in seqs), List(keys.notes)]
            if not are_few:
                reads = [List(keys.journal)]
            outcome = await self._observer.timed("read", session.txn(then=reads))
            if head is not None and item is not None:
                self._read = (max(revision, item.modified), head.run, head.seq)
            lines = _decode(one for some in outcome.reads for one in some)
            self.model.tell(session.instance, lines, self._observer.now(), live=is_live)

    # ---- looks

    def look(self) -> None:
        """Describe the run now."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if self._viewer is not None:
            self._looked_at = self._observer.now()
            self._see(self._viewer.status())

    def look_again(self) -> None:
        """Describe the run again if a timer may have changed the reason, or the age of its progress is shown."""
        status = self.model.status
        waits = status is not None and (
            status.phase in ("none", "open", "broken") or status.call != "none" or status.progress is not None
        )
        if waits and self._observer.now() - self._looked_at >= LOOK_AGAIN_S:
            self.look()

    def end(self) -> None:
        """Note that the engine has no such run any more."""
        self.gone_at = self._observer.now()
        self._see(None)

    def _see(self, status: Status | None) -> None:
        before = self.model.status
        if status is not None or before is None or before.phase != Phase.CLOSED.value:  # How it ended stays to be seen.
            self.model.look(status, self._observer.now())
        self._observer.changed(self)

    def _look_later(self) -> None:
        if self._looking is None:
            wait_s = max(0.0, self._looked_at + LOOK_S - self._observer.now())
            self._looking = asyncio.get_running_loop().call_later(wait_s, self.look)


def _is_eviction(viewer: RunViewer, former: LiveMember) -> bool:
    """Whether a record went without a goodbye: its lease ended, the leader deleted it, or its host is banned."""
    mirror = viewer.mirror
    if mirror.head is not None and mirror.head.phase is Phase.CLOSED:
        return False
    if former.record.host in mirror.banned:
        return True
    entries = [table[former.id] for table in mirror.tables.values() if former.id in table]
    # A member that was in no round marks nothing when it goes, so its end cannot be told from a goodbye.
    return bool(entries) and not any(one.done or one.gave_up or one.went for one in entries)


def _decode(items: Iterable[Item]) -> list[Line]:
    lines = []
    for item in items:
        with suppress(Incompatible):
            lines.append(Line(item.modified, wire.decode(JournalEntry, item.value)))
    return lines


class RunsObserver:
    """All runs of a source, with what is known of the engine itself. `start` begins, `stop` ends."""

    def __init__(self, source: Source, now: Callable[[], float] | None = None) -> None:
        self.source = source
        self.now = now or asyncio.get_running_loop().time
        self.runs: dict[str, RunFollower] = {}
        self.unwatched = 0
        """Runs that are there and not watched, because there are too many."""
        self.is_up = False
        self.trouble = "it has not been asked yet"
        self.requests = {name: Histogram(REQUEST_BUCKETS_S) for name in OPERATIONS}
        self.listeners: list[Callable[[RunFollower | None], None]] = []
        """Called with a run that changed, or with None if the list of runs or the engine's state did."""
        self._task: asyncio.Task[None] | None = None
        self._defects = Defects()
        self._warned = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._poll(), name="rdzv observes runs")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(one.stop() for one in self.runs.values()))
        await self.source.close()

    def changed(self, follower: RunFollower | None) -> None:
        for listener in tuple(self.listeners):
            listener(follower)

    async def timed(self, operation: str, call: Any) -> Any:
        """Await a call to the engine and note its duration. A call that fails takes its time, too."""
        begin = self.now()
        try:
            return await call
        finally:
            self.requests[operation].observe(self.now() - begin)

    async def _poll(self) -> None:
        is_first, retry_s = True, RETRY_S[0]
        while True:
            is_up, trouble = False, DEFECT
            try:
                await self._set_runs(await self.timed("list_runs", self.source.runs()), is_first=is_first)
                for follower in self.runs.values():
                    follower.look_again()
                is_up, trouble, is_first = True, "", False
            except (RdzvError, EngineReset) as error:
                trouble = error.sentence if isinstance(error, RdzvError) else str(error)
            except Exception as error:  # A look that fails as nobody foresaw must not end the metrics of all runs for good.
                if self._defects.is_new(error):
                    logger.exception("a defect in the observer of %s", self.source.endpoint)
            self._set_engine(is_up=is_up, trouble=trouble)
            await asyncio.sleep(self.source.poll_s if is_up else retry_s)
            retry_s = RETRY_S[0] if is_up else min(RETRY_S[1], 2 * retry_s)

    def _set_engine(self, *, is_up: bool, trouble: str) -> None:
        if (is_up, trouble) != (self.is_up, self.trouble):
            self.is_up, self.trouble = is_up, trouble
            self.changed(None)

    async def _set_runs(self, names: Iterable[str], *, is_first: bool) -> None:
        found, now, before = dict.fromkeys(names), self.now(), (set(self.runs), self.unwatched)
        for name, follower in tuple(self.runs.items()):
            if name not in found and follower.gone_at is None:
                await follower.stop()
                follower.end()
            elif name in found and follower.gone_at is not None:  # The id is in use again; its counters go on.
                self.runs[name] = RunFollower(self, name, is_new=False)
                self.runs[name].model = follower.model
            elif follower.gone_at is not None and (now - follower.gone_at > KEPT_S or len(self.runs) > 2 * RUNS_MAX):
                del self.runs[name]
        watched = sum(follower.gone_at is None for follower in self.runs.values())
        for name in found:
            if name not in self.runs and watched < RUNS_MAX:
                self.runs[name] = RunFollower(self, name, is_new=not is_first)
                watched += 1
        self.unwatched = len(found) - watched
        if self.unwatched > 0 and not self._warned:
            self._warned = True
            logger.warning("%s of %s runs are not shown: at most %s are watched", self.unwatched, len(found), RUNS_MAX)
        if (set(self.runs), self.unwatched) != before:
            self.changed(None)
