"""The blocking face: one member of one run, for code without an event loop. This is `rdzv.Rendezvous`.

    with rdzv.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=4) as r:
        world = r.join()

Every call is the asyncio face's call of the same name, run in the process's portal and waited for; no logic is here but
what threads, forks and the end of the process need. Any thread may make any call.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from . import aio
from .aio import departure_of
from .config.endpoint import Endpoint
from .core.member_rules import Change, ChangeKind
from .core.status import Status
from .engines.port import Driver
from .errors import ForkedChild, LeftAlready
from .member.notices import Observer
from .member.store import AsyncStore
from .member.world import AsyncWorld, Peer
from .system.portal import Portal

T = TypeVar("T")

EXIT_S = 2.0
"""How long a process that ends waits for its members to leave; what is not said by then, their leases will say."""

_Stay: TypeAlias = "weakref.finalize[[Portal, aio.AsyncRendezvous], _MemberHandle]"
"""Alive from a member's first use until it has left; meanwhile the portal has it for a user."""
_present: dict[aio.AsyncRendezvous, _Stay] = {}
"""Those that have been used and have not left."""


class _MemberHandle:
    """A member's way through the portal, shared by its Rendezvous, worlds and stores. Once all are dropped, it leaves."""

    def __init__(self, member: aio.AsyncRendezvous) -> None:
        self._member = member
        self._pid = os.getpid()
        self._left = False
        self._stay: _Stay | None = None

    @property
    def is_forked(self) -> bool:
        """The member is another process's."""
        return self._pid != os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, T], lasts: Callable[[], object] | None = None) -> T:
        """Have a call of the asyncio face run in the portal."""
        try:
            portal = self._enter(getattr(coroutine, "__name__", "this call"))
        except BaseException:
            coroutine.close()
            raise
        try:
            return portal.run(coroutine, lasts)
        finally:
            portal.close()

    def _enter(self, call: str) -> Portal:
        if self.is_forked:
            raise ForkedChild(self._member.run_id, call)
        with Portal.lock:
            if self._left or (self._stay is not None and not self._stay.alive):
                raise LeftAlready(self._member.run_id, call)
            portal = Portal.open()
            if self._stay is None:
                self._stay = weakref.finalize(self, _forsaken, Portal.open(), self._member)
                self._stay.atexit = False
                _present[self._member] = self._stay
            return portal

    def leave(self, failed: bool, reason: str) -> None:
        """End the member, and all calls that are under way. A forked child has nothing to leave."""
        if self.is_forked:
            return
        with Portal.lock:
            self._left = True
            if self._stay is None or not self._stay.alive:
                return
            portal = Portal.open()
        try:
            # An impatient caller may stop waiting, but half a leave would be a member that nobody looks after.
            portal.run(self._leave(self._stay, failed, reason), cancel=False)
        finally:
            portal.close()

    async def _leave(self, stay: _Stay, failed: bool, reason: str) -> None:
        await self._member.leave(failed=failed, reason=reason)
        held = stay.detach()  # Only one of several who leave at once gets it.
        if held is not None:
            _gone(*held[2])


def _gone(portal: Portal, member: aio.AsyncRendezvous) -> None:
    _present.pop(member, None)
    portal.close()


def _forsaken(portal: Portal, member: aio.AsyncRendezvous) -> None:
    """Nobody holds the line any more. Called by the garbage collector, anywhere: it may neither wait nor lock."""

    async def leave() -> None:
        await member.leave(reason="its Rendezvous was dropped")
        _gone(portal, member)

    if not portal.forked:
        portal.start(leave())


def _leave_all() -> None:
    """At the end of the process, so that the others see a leave now and not a loss after the lease."""
    with Portal.lock:
        members = dict(_present)
        if not members:
            return
        portal = Portal.open()
        for stay in members.values():
            stay.detach()

    async def leave() -> None:
        tasks = [asyncio.ensure_future(member.leave(reason="its process ended")) for member in members]
        await asyncio.wait(tasks, timeout=EXIT_S)

    # Waited for a little longer than it should take: the loop itself may be stuck, in an observer.
    if concurrent.futures.wait([portal.start(leave())], EXIT_S + 0.5).done:
        portal.stop()


atexit.register(_leave_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_present.clear)


class Rendezvous:
    """One member of one run. Nothing happens before the first call.

    The settings are checked here (SettingsError). `observer` is called with every notice, in a background thread; it
    should be quick, and must not call back. `driver` is for an engine that no endpoint names. A forked child must make
    its own Rendezvous: this one stays the parent's.
    """

    def __init__(
        self,
        endpoint: str | Endpoint,
        *,
        run_id: str,
        min_nodes: int | str,
        max_nodes: int | str,
        observer: Observer | None = None,
        driver: Driver | None = None,
        **options: object,
    ) -> None:
        self._aio = aio.AsyncRendezvous(
            endpoint,
            run_id=run_id,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            observer=observer,
            driver=driver,
            **options,
        )
        self._line = _MemberHandle(self._aio)
        self.run_id = self._aio.run_id

    def __enter__(self) -> Rendezvous:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed, reason = departure_of(error)
        self.leave(failed=failed, reason=reason)

    def prepare(self) -> None:
        """Connect already, and serve if that is ours to do, without taking part: `join` is quicker then.

        It does not wait for that, and does not say what came of it: whoever joins is told.
        """
        self._line.run(self._aio.prepare())

    def join(self, timeout_s: float | None = None, *, lasts: Callable[[], object] | None = None) -> World:
        """Wait until a round is sealed with us in it. Calling it says that no worker of an earlier round runs any more.

        The time (default: `join_timeout`) counts only while the run has no sealed round: a spare waits as long as it
        must. `lasts` is called in this thread about once a second while we wait: for a word to whoever watches.
        Raises JoinTimeout, Closed, Evicted (join again), Drained, Banned, SettingsError, Untrusted, EngineMoved.
        """
        return World(self._line, self._line.run(self._aio.join(timeout_s), lasts))

    @property
    def changed(self) -> Change | None:
        """Why the world we hold no longer stands, or None while it does. Who reads an eviction has been told.

        A local read: cheap enough for every step of a training loop, and it never raises. In a forked child nothing
        could ever be heard, so it says that.
        """
        if self._line.is_forked:
            return Change(ChangeKind.REFUSED, str(ForkedChild(self.run_id, "changed")))
        return self._aio.changed

    def wait_changed(self, timeout_s: float | None = None) -> Change | None:
        """The change, as soon as there is one; None when the time ran out first, or we leave."""
        return self._line.run(self._aio.wait_changed(timeout_s))

    def status(self) -> Status:
        """The whole run, with the reason for what it waits for. Asks the engine; raises Unreachable."""
        return self._line.run(self._aio.status())

    def done(self) -> None:
        """Our work succeeded. We stay until we leave; when all of the round are done, the run closes with success."""
        self._line.run(self._aio.done())

    def drain(self, reason: str = "asked to go") -> None:
        """Say that we are about to go, so that the others re-form without waiting for us to be gone."""
        self._line.run(self._aio.drain(reason))

    def close_run(self, reason: str = "finished") -> None:
        """End the run for everybody. Raises RoundOver if the others have gone on without us."""
        self._line.run(self._aio.close_run(reason))

    def leave(self, *, failed: bool = False, reason: str = "") -> None:
        """Go, for good. The run goes on for the others. Never raises, and takes a few seconds at most.

        `failed` says that our work cannot be done here: if quorum is then out of reach, the run is closed with our
        reason (unless on_failure=wait). Calls under way in other threads end with LeftAlready. In a forked child it does
        nothing.
        """
        self._line.leave(failed, reason)


class World:
    """Who we are in a round. A value, but for its store and its bootstrap socket, which end with the round."""

    def __init__(self, line: _MemberHandle, world: AsyncWorld) -> None:
        self.run_id = world.run_id
        self.round = world.round
        self.rank = world.rank
        self.size = world.size
        self.bootstrap = world.bootstrap
        self.era = world.era
        self.digest = world.digest
        self.incarnation = world.incarnation
        self.table = world.table
        self.store = Store(line, world.store)
        self._line = line
        self._world = world

    def __repr__(self) -> str:
        return repr(self._world)

    def take_bootstrap_socket(self) -> socket.socket:
        """Rank 0's listening socket, for whoever serves at `bootstrap`. It can be taken once."""
        return self.bootstrap.take_socket()

    def members(self) -> list[Peer]:
        """All members of the round in rank order. Asks the engine; raises RoundOver, Unreachable."""
        return self._line.run(self._world.members())


class Store:
    """The round's key-value space, for trainers and agents. Values are bytes; text is encoded as UTF-8.

    Every call raises RoundOver once the round is broken or over, and the waiting ones end with it. Those that wait
    raise StoreTimeout, all of them Unreachable if the engine stays away for `timeout_s`.
    """

    def __init__(self, line: _MemberHandle, store: AsyncStore) -> None:
        self._line = line
        self._store = store

    @property
    def timeout_s(self) -> float:
        """How long a call waits if it does not say."""
        return self._store.timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """How long later calls wait if they do not say."""
        self._store.set_timeout(timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        self._line.run(self._store.set(key, value))

    def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys at once: whoever sees one of them sees all."""
        self._line.run(self._store.multi_set(values))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value, waited for if need be."""
        return self._line.run(self._store.get(key, timeout_s))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values, waited for if need be."""
        return self._line.run(self._store.multi_get(keys, timeout_s))

    def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        """Until all of the keys are set."""
        self._line.run(self._store.wait(keys, timeout_s))

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all of the keys are set now."""
        return self._line.run(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and say what it is now. Exactly once, even if an answer was lost."""
        return self._line.run(self._store.add(key, amount))

    def append(self, key: str, value: bytes | str) -> None:
        """Put more bytes behind a value, which starts empty."""
        self._line.run(self._store.append(key, value))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards."""
        return self._line.run(self._store.compare_set(key, expected, desired))

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._line.run(self._store.delete(key))

    def num_keys(self) -> int:
        """How many keys this round has."""
        return self._line.run(self._store.num_keys())

