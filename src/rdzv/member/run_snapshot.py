"""The whole run in one read, for `status` and for the last member to go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.settings import Settings
from ..core.keys import Keys
from ..core.view import View
from ..engines.port import EngineReset, List, Session
from ..errors import Unreachable
from .run_mirror import RunMirror

if TYPE_CHECKING:
    from .presence import Presence


async def read_run(session: Session, settings: Settings, presence: Presence | None) -> View:
    """Read what a leader would judge. O(n). Raises Unreachable.

    There is no key with a summary: the reader pays for it, and a summary would be one more write per change.
    """
    keys = Keys(settings.run_id)
    try:
        listed = await session.txn(then=[List(keys.group)])
    except EngineReset:
        raise Unreachable("of this run", "it was restarted a moment ago") from None
    mirror = RunMirror(keys, listed.reads[0], listed.revision)
    return mirror.view(
        settings=settings.agreed(),
        me=presence.id if presence is not None else "",
        durable=session.durable,
        known_s=presence.node.now() - presence.known_at if presence is not None else 0.0,
        ages=presence.tracker.ages() if presence is not None else (0.0, 0.0, 0.0),
        late=presence is None or presence.tracker.late,
    )
