"""A run as a non-member sees it: for `rdzv status` and `rdzv watch`.

A viewer writes nothing and never leads. It reads the settings from the run. It does not know when a running timer began, so it
shows the time left with "at most".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from ..core import wire
from ..core.keys import Keys
from ..core.model import CauseKind, RunSettings
from ..core.status import Status, describe
from ..engines.port import Gap, List, Session
from ..errors import Incompatible
from ..member.head_tracker import HeadTracker
from ..member.run_mirror import RunMirror

UNKNOWN = RunSettings(min_nodes=1, max_nodes=1)  # In place of settings that cannot be read.
GONE = "nobody is here: the run was closed, or all have left"


class RunViewer:
    """A view of one run on one engine instance. `now` is a monotonic clock of this process."""

    def __init__(self, session: Session, run_id: str, now: Callable[[], float]) -> None:
        self._session = session
        self._keys = Keys(run_id)
        self._run_id = run_id
        self._head = HeadTracker(now)
        self._mirror: RunMirror | None = None

    async def look(self) -> Status | None:
        """Read the run; return None if the engine keeps none of that id. O(n). Raises Unreachable, EngineReset."""
        listed = await self._session.txn(then=[List(self._keys.group)])
        self._mirror = RunMirror(self._keys, listed.reads[0], listed.revision, lenient=True)
        self._head.show(self._mirror.head_item, listed.revision)
        return self.status()

    async def follow(self) -> AsyncIterator[Status | None]:
        """Yield the run now and after every change. Raises EngineReset, or Unreachable once the session is closed."""
        while True:
            yield await self.look()
            mirror = self._mirror
            assert mirror is not None, "look() has set it"
            watch = self._session.watch([self._keys.group], mirror.revision)
            try:
                async for batch in watch:
                    mirror.apply(batch)
                    self._head.show(mirror.head_item, batch.revision)
                    yield self.status()
            except Gap:
                pass
            finally:
                await watch.aclose()

    def status(self) -> Status | None:
        """The run as it was read last, with current ages."""
        mirror = self._mirror
        if mirror is None or mirror.settings is None:
            return None
        settings, problem = _read_settings(mirror.settings.value)
        problem = problem or mirror.problem
        view = mirror.view(
            settings=settings,
            me="",
            durable=True,  # Only members can judge whether the engine lost its memory a moment ago.
            known_s=0.0,
            ages=self._head.ages(),
            late=self._head.late,
        )
        status = describe(self._run_id, view)
        if problem:
            return msgspec.structs.replace(status, reason=f"{problem}; members cannot go on with it")
        if view.head is None and not view.members:
            return msgspec.structs.replace(status, reason=GONE)
        return status

    @property
    def succeeded(self) -> bool:
        """Whether the run was closed because all members were done."""
        head = self._head.head
        return head is not None and head.cause is not None and head.cause.kind is CauseKind.SUCCESS


def _read_settings(data: bytes) -> tuple[RunSettings, str]:
    """Return the settings and no problem, or others and what is wrong with the run's."""
    try:
        settings = wire.decode(RunSettings, data)
    except Incompatible as error:
        return UNKNOWN, error.sentence
    if settings.unit >= 1 and 1 <= settings.min_nodes <= settings.max_nodes:
        return settings, ""
    return UNKNOWN, "the run's settings are impossible (min_nodes, max_nodes or unit)"
