"""A session on a server from inside its own process: no socket, no proof of a secret, no presence.

The metrics and the page of a server look at its runs this way. It costs a run one watch and keeps no run alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import Unreachable
from ..port import Case, Compares, EngineReset, Gap, List, Operations, Outcome, ServerLife
from ..watch_queue import WatchesAfterwards, WatchQueue
from .run import Run
from .server_core import ServerCore


class InsideSession(WatchesAfterwards):
    """A session with one run of a server, on the server's loop. It ends with EngineReset when the server drops the run."""

    durable = False
    stars = True
    sees_ends = True
    local_host = ""
    life: ServerLife | None = None

    def __init__(self, core: ServerCore, run: Run) -> None:
        self.instance = run.engine.instance
        self.place = core.place
        self.fence_floor: int | None = core.fence_floor()
        self.compares_max = self.writes_max = core.limits.operations
        self._core = core
        self._run = run
        self._watches: dict[InsideWatch, None] = {}
        self._closed = False

    async def txn(
        self, compares: Compares = (), then: Operations = (), otherwise: Operations = (), instead: Sequence[Case] = ()
    ) -> Outcome:
        return self._live().txn(tuple(compares), tuple(then), tuple(otherwise), instead)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:  # noqa: ARG002  No connection stands for it.
        return self._live().grant(ttl_s, None)

    async def renew(self, lease: int) -> None:
        self._live().engine.renew(lease)

    async def revoke(self, lease: int) -> None:
        self._live().engine.revoke(lease)

    def watch(self, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> InsideWatch:
        watch = InsideWatch(self._watches, since)
        try:
            watch.stop = self._live().engine.subscribe(targets, since, watch.deliver, ends)
            self._watches[watch] = None
        except (Gap, EngineReset, Unreachable) as problem:
            watch.end(problem)
        return watch

    async def close(self) -> None:
        """End the session and its watches."""
        self._closed = True
        self.end(Unreachable(f"server {self.place}", "the session is closed", applied=False))

    def end(self, problem: Exception) -> None:
        """End all watches."""
        for watch in tuple(self._watches):
            watch.end(problem)

    @property
    def is_over(self) -> bool:
        """Whether the session was closed, or the server has dropped the run."""
        return self._closed or self._core.runs.get(self._run.name) is not self._run

    def renewal_ages(self, prefix: str) -> dict[str, float]:
        """Return the seconds since the last renewal of the lease of each key with that prefix, by the rest of the key."""
        leases = self._run.engine.leases
        found = {}
        for item in self._run.engine.txn(then=[List(prefix)]).reads[0]:
            age_s = leases.age_s(item.lease)
            if age_s is not None:
                found[item.key[len(prefix) :]] = age_s
        return found

    def _live(self) -> Run:
        if self._closed:
            raise Unreachable(f"server {self.place}", "the session is closed", applied=False)
        if self.is_over:
            raise EngineReset(f"run {self._run.name!r} was dropped by the server at {self.place}")
        return self._run


class InsideWatch(WatchQueue):
    """A watch of such a session."""

    def __init__(self, known: dict[InsideWatch, None], since: int) -> None:
        super().__init__(since)
        self.stop: Callable[[], None] = lambda: None
        self._known = known

    def ended(self) -> None:
        self.stop()
        self._known.pop(self, None)
