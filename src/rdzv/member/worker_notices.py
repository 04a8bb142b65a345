"""Passes the notice that a round will end on to the workers of this agent, and their answers to the leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.worker_messages import EndNotice, NoticeSent
from .worker_channel import ConnectedWorker, WorkerChannel

if TYPE_CHECKING:
    from .world import AsyncWorld


class WorkerNotices:
    """Tells the workers of the end of their round, and finds out whether all of them have saved."""

    def __init__(self, channel: WorkerChannel, now: Callable[[], float]) -> None:
        self._channel = channel
        self._now = now

    def look(self, world: AsyncWorld | None, notice: EndNotice | None, workers: int) -> bool:
        """Tell the workers of the round; return whether all have answered. `workers`: how many there are; 0: not known."""
        until = 0.0 if notice is None else self._now() + notice.seconds
        sent = NoticeSent(0) if notice is None else NoticeSent(notice.id, notice.reason, until)
        mine = [one for one in self._channel.workers.values() if world is not None and one.round == world.round]
        for worker in mine:
            worker.tell(sent)
        return notice is not None and self._have_saved(mine, notice.id, workers)

    def _have_saved(self, mine: list[ConnectedWorker], id: int, workers: int) -> bool:
        return len(mine) >= max(workers, 1) and all(worker.saved == id for worker in mine)
