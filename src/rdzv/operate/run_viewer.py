"""A run seen from outside, by somebody who is no member of it: `rdzv status`, `rdzv watch`.

An onlooker writes nothing and leads nothing. It takes the settings from the run itself, and what it does not know, because it
came after it began, it does not guess: a timer that runs already is shown with "at most".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from ..core import wire
from ..core.keys import Keys
from ..core.model import CauseKind, RunSettings
from ..core.status import Status, describe
from ..engines.port import Gap, List, Session
from ..member.head_tracker import HeadTracker
from ..member.run_mirror import RunMirror

GONE = "nobody is here: the run was closed, or all have left"


class RunViewer:
    """On one engine instance. `now` is the onlooker's own monotonic clock."""

    def __init__(self, session: Session, run_id: str, now: Callable[[], float]) -> None:
        self._session = session
        self._keys = Keys(run_id)
        self._run_id = run_id
        self._sight = HeadTracker(now)
        self._mirror: RunMirror | None = None

    async def look(self) -> Status | None:
        """The run as it is now; None: the engine keeps none of that id. O(n). Raises Unreachable, EngineReset."""
        listed = await self._session.txn(then=[List(self._keys.group)])
        self._mirror = RunMirror(self._keys, listed.reads[0], listed.revision)
        self._sight.show(self._mirror.head_item, listed.revision)
        return self.status()

    async def follow(self) -> AsyncIterator[Status | None]:
        """The run as it is now, then after every change. Raises EngineReset, or Unreachable once the session is closed."""
        while True:
            yield await self.look()
            mirror = self._mirror
            assert mirror is not None, "we have just looked"
            watch = self._session.watch([self._keys.group], mirror.revision)
            try:
                async for batch in watch:
                    mirror.apply(batch)
                    self._sight.show(mirror.head_item, batch.revision)
                    yield self.status()
            except Gap:
                pass
            finally:
                await watch.aclose()

    def status(self) -> Status | None:
        """Of what was seen last, with the ages of now."""
        mirror = self._mirror
        if mirror is None or mirror.settings is None:
            return None
        view = mirror.view(
            settings=wire.decode(RunSettings, mirror.settings.value),
            me="",
            durable=True,  # Whether its memory was lost a moment ago is for those to judge who know since when they know it.
            known_s=0.0,
            ages=self._sight.ages(),
            late=self._sight.late,
        )
        status = describe(self._run_id, view)
        if view.head is None and not view.members:
            return msgspec.structs.replace(status, reason=GONE)
        return status

    @property
    def succeeded(self) -> bool:
        """The run was closed because all were done."""
        head = self._sight.head
        return head is not None and head.cause is not None and head.cause.kind is CauseKind.SUCCESS
