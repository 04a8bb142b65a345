"""The data of the page, and its stream to browsers. Each state is encoded once, however many browsers look.

A browser first gets all of a run, then only changes. One that reads too slowly misses changes and gets all again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from ..core.status import Status
from ..system.timers import in_time
from .history import counts, missing
from .observer import Defects, RunFollower, RunsObserver

logger = logging.getLogger("rdzv.web")

CLIENTS_MAX = 64
"""Browsers that may listen at once."""
STILL_HERE_S = 15.0
"""A stream that has nothing to say says so, for the proxies on its way."""
TICK_S = 1.0
"""How often a run that somebody looks at is described again, for its timers, and its renewals are read."""
OVERVIEW_S = 0.25
CHANGES_MAX = 32
"""Changes kept for browsers that are behind."""
SMALL = 200
"""Members of a run whose renewals are read at each tick. Those of larger runs are read at every third."""
INFO_MAX = 300

Row = tuple[str, str, str, str, int, str, str]
"""A member: id, name, host, state, rank (-1: none), info, and why it is unhealthy or quarantined."""


def _event(kind: str, data: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _rows(status: Status | None) -> dict[str, Row]:
    rows = {}
    for member in status.members if status is not None else ():
        info = " ".join(f"{name}={value}" for name, value in member.info.items())[:INFO_MAX]
        # An id can be there twice: lost in the round, and back as a waiting member.
        row = (member.id, member.name, member.host, member.state, member.rank, info, member.problem[:INFO_MAX])
        rows[f"{member.id}/{member.rank}"] = row
    return rows


def glance(follower: RunFollower, now: float) -> dict[str, Any]:
    """Return what is known of a run but for its members and its past."""
    model, status = follower.model, follower.model.status
    totals = model.counters
    return {
        "run": follower.run_id, "incarnation": model.run, "trouble": follower.trouble, "gone": follower.gone_at is not None,
        "phase": status.phase if status is not None else "none",
        "round": status.round if status is not None else 0,
        "size": status.size if status is not None else 0,
        "reason": status.reason if status is not None else "the engine keeps no such run any more",
        "leader": status.leader if status is not None else "",
        "leader_id": status.leader_id if status is not None else "",
        "min": status.min_nodes if status is not None else 0,
        "max": status.max_nodes if status is not None else 0,
        "ready": status.ready if status is not None else 0,
        "missing": missing(status) if status is not None else 0,
        "progress": _progress(status), "progress_age_s": status.progress.age_s if status and status.progress else None,
        "counts": counts(status, ()) if status is not None else {},
        "since_s": round(now - model.phase_at, 1), "since_exact": model.phase_is_exact,
        "now_s": round(model.at_s(now), 2),
        "sealed": totals.sealed, "broken": totals.broken, "lost_s": round(sum(totals.lost_s.values()), 3),
        "evictions": totals.evictions, "leader_changes": totals.leader_changes,
    }  # fmt: skip


def _progress(status: Status | None) -> dict[str, Any] | None:
    """Return how far the workers are. Their age is told beside it: it alone is no change."""
    told = status.progress if status is not None else None
    return None if told is None else msgspec.to_builtins(msgspec.structs.replace(told, age_s=None))


class RunFeed:
    """The stream of one run."""

    def __init__(self, follower: RunFollower, observer: RunsObserver) -> None:
        self.follower = follower
        self.listening = 0
        self.defects = Defects()
        self._observer = observer
        self._number = 0
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=CHANGES_MAX)
        self._rows: dict[str, Row] = {}
        self._glance: dict[str, Any] = {}
        self._version = (0, 0)
        """The model and the version of it that was published last."""
        self._changed = asyncio.Event()

    def full(self) -> dict[str, Any]:
        """Return everything."""
        rows, ages = list(_rows(self.follower.model.status).values()), self._ages()
        return {**glance(self.follower, self._observer.now()), "members": rows, "history": self._history(), "ages": ages}

    def _ages(self) -> dict[str, float]:
        return {id: round(age, 1) for id, age in self.follower.renewal_ages().items()}

    def _history(self) -> dict[str, Any]:
        model = self.follower.model
        lanes, more = model.lanes()
        rounds, hosts = msgspec.to_builtins(tuple(model.rounds)), msgspec.to_builtins(model.blame())
        return {"rounds": rounds, "lanes": msgspec.to_builtins(lanes), "more": more, "hosts": hosts, "lines": model.lines()}

    def publish(self, *, with_ages: bool = False) -> None:
        """Tell those who listen what has changed since the last time."""
        if not self.listening:
            return
        model = self.follower.model
        change: dict[str, Any] = {}
        now = glance(self.follower, self._observer.now())
        if any(now[name] != self._glance.get(name) for name in now if name not in ("since_s", "now_s", "progress_age_s")):
            self._glance = change["glance"] = now
        rows = _rows(model.status)
        if rows != self._rows:
            change["rows"] = [row for key, row in rows.items() if self._rows.get(key) != row]
            change["without"] = [[row[0], row[4]] for key, row in self._rows.items() if key not in rows]
            self._rows = rows
        if (id(model), model.version) != self._version:
            self._version = (id(model), model.version)
            change["history"] = self._history()
        if with_ages:
            change["ages"] = self._ages()
        if not change:
            return
        self._number += 1
        self._changes.append((self._number, _event("change", change)))
        self._changed.set()
        self._changed = asyncio.Event()

    async def stream(self, closing: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield events until the server closes."""
        if not self.listening:  # Nothing was published meanwhile.
            self._glance = glance(self.follower, self._observer.now())
            model = self.follower.model
            self._rows, self._version = _rows(model.status), (id(model), model.version)
        self.listening += 1
        try:
            seen = -1
            while not closing.is_set():
                changed = self._changed
                if seen < 0 or (self._changes and seen < self._changes[0][0] - 1):
                    seen = self._number
                    yield _event("all", self.full())
                    continue
                for number, data in tuple(self._changes):
                    if number > seen:
                        seen = number
                        yield data
                if changed is self._changed and not await _waited(changed):
                    yield b": still here\n\n"
        finally:
            self.listening -= 1


async def _waited(event: asyncio.Event) -> bool:
    try:
        await in_time(STILL_HERE_S, event.wait())
    except asyncio.TimeoutError:
        return False
    return True


class Feeds:
    """All streams."""

    def __init__(self, observer: RunsObserver, *, are_actions_allowed: bool) -> None:
        self.closing = asyncio.Event()
        self.clients = 0
        self._observer = observer
        self._are_actions_allowed = are_actions_allowed
        self._runs: dict[str, RunFeed] = {}
        self._overview_changed = asyncio.Event()
        observer.listeners.append(self._changed)
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="rdzv page")

    def feed(self, run_id: str) -> RunFeed | None:
        """Return the stream of a run; None if there is no such run."""
        follower = self._observer.runs.get(run_id)
        if follower is None:
            return None
        feed = self._runs.get(run_id)
        if feed is None:
            feed = self._runs[run_id] = RunFeed(follower, self._observer)
        return feed

    def overview(self) -> dict[str, Any]:
        """Return all runs at a glance."""
        now, observer = self._observer.now(), self._observer
        return {
            "endpoint": observer.source.endpoint, "up": observer.is_up, "trouble": observer.trouble,
            "unwatched": max(0, observer.unwatched), "actions": self._are_actions_allowed,
            "runs": [glance(follower, now) for follower in observer.runs.values()],
        }  # fmt: skip

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the overview whenever it changes."""
        while not self.closing.is_set():
            changed = self._overview_changed
            yield _event("overview", self.overview())
            while not await _waited(changed):
                yield b": still here\n\n"
            await asyncio.sleep(OVERVIEW_S)  # Changes come in swarms.

    async def stop(self) -> None:
        self.closing.set()
        self._overview_changed.set()
        for feed in self._runs.values():
            self._publish(feed, with_ages=True)
        self._ticking.cancel()
        await asyncio.wait([self._ticking])

    def _changed(self, follower: RunFollower | None) -> None:
        self._overview_changed.set()
        self._overview_changed = asyncio.Event()
        if follower is not None and (feed := self._runs.get(follower.run_id)) is not None:
            feed.follower = follower  # Another one, if the run was gone and is back.
            self._publish(feed)

    def _publish(self, feed: RunFeed, *, looks: bool = False, with_ages: bool = False) -> None:
        """Publish a run. If that fails as nobody foresaw, it ends neither the pages of other runs nor the watch of this one."""
        try:
            if looks:
                feed.follower.look()
            feed.publish(with_ages=with_ages)
        except Exception as error:
            if feed.defects.is_new(error):
                logger.exception("a defect in the page of run %r", feed.follower.run_id)

    async def _tick(self) -> None:
        beat = 0
        while True:
            await asyncio.sleep(TICK_S)
            beat += 1
            for run_id, feed in tuple(self._runs.items()):
                if run_id not in self._observer.runs and not feed.listening:
                    del self._runs[run_id]
                elif feed.listening:
                    status = feed.follower.model.status
                    looks = status is not None and (status.phase != "sealed" or status.call != "none")
                    is_large = status is not None and len(status.members) > SMALL
                    self._publish(feed, looks=looks, with_ages=not is_large or beat % 3 == 0)
