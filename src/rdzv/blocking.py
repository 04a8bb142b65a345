"""The blocking API: one member of one run, for code without an event loop. This is `rdzv.Rendezvous`.

    with rdzv.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=4) as r:
        world = r.join()

Every call runs the asyncio API's call of the same name in the process's portal and waits for it. The only logic here is
what threads, forks and the end of the process need. Any thread may make any call.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from . import aio
from .aio import departure_of
from .config import arguments
from .config.endpoint import Endpoint
from .config.options import Options, Unpack
from .core.member_rules import Change, ChangeKind, left_change
from .core.status import Status
from .core.worker_messages import EndNotice
from .engines.port import Driver, NotNow
from .errors import ForkedChild, LeftAlready
from .member.member import CALL_S
from .member.notices import Observer
from .member.store import AsyncStore
from .member.store_calls import StoreOperation
from .member.world import AsyncWorld, Peer, RoundFacts
from .system.portal import Portal

T = TypeVar("T")

EXIT_S = 2.0
"""How long a process that ends waits for its members to leave. After that, the end of their leases tells the others."""

_Stay: TypeAlias = "weakref.finalize[[aio.AsyncRendezvous], _MemberHandle]"
"""Alive until its member has left."""
_present: dict[aio.AsyncRendezvous, _Stay] = {}
"""Members that have been used and have not left. Each of them keeps the portal open."""


class _MemberHandle:
    """A member in the portal, shared by its Rendezvous, worlds and stores. Once all are dropped, the member leaves.

    There is no lock: a signal handler may make a call, or leave, at any moment of another call of its thread. A call first
    makes its member present and then looks whether it has left; `leave` first says so and then looks whether it is present.
    """

    def __init__(self, member: aio.AsyncRendezvous) -> None:
        self._member = member
        self._pid = os.getpid()
        self._left = False
        self._stay: _Stay = weakref.finalize(self, _forsaken, member)
        self._stay.atexit = False

    @property
    def is_forked(self) -> bool:
        """Whether the member belongs to another process."""
        return self._pid != os.getpid()

    @property
    def left(self) -> bool:
        """Whether `leave` was called."""
        return self._left

    def run(self, coroutine: Coroutine[Any, Any, T], lasts: Callable[[], object] | None = None, call: str = "") -> T:
        """Run a call of the asyncio API in the portal. `call`: its name, if that is not the coroutine's."""
        try:
            portal = self._enter(coroutine, call or getattr(coroutine, "__name__", "this call"))
        except BaseException:
            coroutine.close()
            raise
        try:
            return portal.run(coroutine, lasts)
        finally:
            portal.close(coroutine)

    @property
    def asks_directly(self) -> bool:
        """Whether this thread may ask the member's engine by itself: in the portal's own it would wait for itself."""
        return not (self._left or self.is_forked or Portal.is_current_thread())

    def _enter(self, user: object, call: str) -> Portal:
        if self.is_forked:
            raise ForkedChild(self._member.run_id, call)
        self._check(call)
        portal = Portal.open(user)
        try:
            if Portal.kept_by(self._member) is None:
                Portal.open(self._member)
                _present[self._member] = self._stay
                if self._left:  # The `leave` may have found nobody present.
                    portal.start(self._leave(False, ""))
            self._check(call)
        except BaseException:
            portal.close(user)
            raise
        return portal

    def _check(self, call: str) -> None:
        if self._left or not self._stay.alive:
            raise LeftAlready(self._member.run_id, call)

    def leave(self, failed: bool, reason: str) -> bool:
        """End the member, and all calls that are under way. A forked child has nothing to leave."""
        if self.is_forked:
            return True
        self._left = True
        if not self._stay.alive or Portal.kept_by(self._member) is None:
            return True
        user = object()
        portal = Portal.open(user)
        try:
            # Not cancelled when the caller stops waiting: half a leave would be a member that nothing looks after.
            return portal.run(self._leave(failed, reason), cancel=False)
        finally:
            portal.close(user)

    async def _leave(self, failed: bool, reason: str) -> bool:
        told = not self._stay.alive or await self._member.leave(failed=failed, reason=reason)
        self._stay.detach()
        _gone(self._member)
        return told


def _gone(member: aio.AsyncRendezvous) -> None:
    """Take a member that has left out of the portal. Runs in the portal's thread."""
    _present.pop(member, None)
    portal = Portal.kept_by(member)
    if portal is not None:
        portal.close(member)


def _forsaken(member: aio.AsyncRendezvous) -> None:
    """Let a member leave that nothing refers to. The garbage collector calls this: it may neither wait nor lock."""

    async def leave() -> None:
        await member.leave(reason="its Rendezvous was dropped")
        _gone(member)

    portal = Portal.kept_by(member)
    if portal is not None:
        portal.start(leave())


def _leave_all() -> None:
    """Let all members leave at the end of the process, so that the others see a leave now, and not a loss later."""
    members = dict(_present)
    if not members:
        return
    portal = Portal.open(_leave_all)
    for stay in members.values():
        stay.detach()

    async def leave() -> None:
        tasks = [asyncio.ensure_future(member.leave(reason="its process ended")) for member in members]
        await asyncio.wait(tasks, timeout=EXIT_S)

    # Waited for a little longer than it should take: the loop itself may be stuck, in an observer.
    if portal.start(leave()).wait(EXIT_S + 0.5):
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
        self, endpoint: str | Endpoint, *, run_id: str, min_nodes: int | str, max_nodes: int | str,
        observer: Observer | None = None, driver: Driver | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        self._aio = aio.AsyncRendezvous(
            endpoint, run_id=run_id, min_nodes=min_nodes, max_nodes=max_nodes,
            observer=observer, driver=driver, **options,
        )  # fmt: skip
        self._handle = _MemberHandle(self._aio)
        self.run_id = self._aio.run_id
        """The name of the run."""

    def __repr__(self) -> str:
        if self._handle.left:
            return f"<Rendezvous {self.run_id!r}: has left>"
        if self._handle.is_forked:
            return f"<Rendezvous {self.run_id!r}: of the parent process>"
        return repr(self._aio)

    def __enter__(self) -> Rendezvous:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed, reason = departure_of(error)
        self.leave(failed=failed, reason=reason)

    def prepare(self) -> None:
        """Connect already, and serve if that is this node's to do, without taking part: `join` is quicker then.

        It does not wait for that. Whatever comes of it, `join` will say.
        """
        self._handle.run(self._aio.prepare())

    def join(
        self, timeout_s: float | None = None, *,
        workers: int = 0, role: str = "", lasts: Callable[[], object] | None = None,
    ) -> World:  # fmt: skip
        """Wait until a round is sealed with this member in it. The call says that no worker of an earlier round runs.

        The time (default: `join_timeout`) counts only while the run has no sealed round: a spare waits as long as it
        must. While the engine is away the time counts, too; finding out the reason takes at most two seconds more.
        `workers`: how many workers this member will start, in that role; `world.worker_ranks` then says which ranks they
        have. `lasts` is called in this thread about once a second while it waits, for progress output.
        Raises JoinTimeout, Closed, Evicted (join again), Drained, Banned, SettingsError, Untrusted, EngineMoved.
        """
        arguments.function("join", "lasts", lasts)
        return World(self._handle, self._handle.run(self._aio.join(timeout_s, workers=workers, role=role), lasts))

    @property
    def changed(self) -> Change | None:
        """Why the world that is held no longer stands, or None while it does.

        A local read: cheap enough for every step of a training loop, and it never raises. Reading an eviction
        acknowledges it: the next `join` does not raise Evicted. After `leave` its kind is LEFT. A forked child is told
        that it is one.
        """
        if self._handle.is_forked:
            return Change(ChangeKind.REFUSED, str(ForkedChild(self.run_id, "changed")))
        return left_change(self.run_id) if self._handle.left else self._aio.changed

    def wait_changed(self, timeout_s: float | None = None) -> Change | None:
        """Wait for a change and return it; None: the time ran out first.

        If another thread calls `leave`, that is the change. A call after `leave` raises LeftAlready.
        """
        return self._handle.run(self._aio.wait_changed(timeout_s))

    def status(self) -> Status:
        """Return the state of the whole run, with the reason for what it waits for. Remote.

        Raises Unreachable after `read_timeout`; a member that has not joined may need ten seconds more, to connect.
        """
        return self._handle.run(self._aio.status())

    def serve_workers(self) -> str:
        """Open the channel for this member's workers, and return the path for their variable `RDZV_WORKER`.

        It stays open until the member leaves. The path is empty if no socket could be made; the log says why.
        """
        return self._handle.run(self._aio.serve_workers())

    def done(self, timeout_s: float | None = None) -> None:
        """Say that the work here succeeded, and stay. When all of the round are done, the run closes with success.

        Raises Unreachable if the engine is away for `timeout_s` (default: `outage_grace`).
        """
        self._handle.run(self._aio.done(timeout_s))

    def drain(self, reason: str = "asked to go", timeout_s: float = CALL_S, *, grace_s: float | None = None) -> None:
        """Say that this member is about to go, so that the others re-form without waiting for it to be gone.

        Raises Unreachable if the engine is away for `timeout_s`.
        `grace_s` (default: `drain_grace`): how long the workers have to save, if the run has a `drain_notice` and this is less.
        Call `wait_drained` before the workers of this member are stopped.
        """
        self._handle.run(self._aio.drain(reason, timeout_s, grace_s=grace_s))

    @property
    def drain_left_s(self) -> float:
        """How long a member that drains should still keep its workers, because they are saving; 0: stop them. A local read."""
        return 0.0 if self._handle.is_forked else self._aio.drain_left_s

    def wait_drained(self) -> None:
        """Wait, after `drain`, until the workers of the run have saved or have had their time: at once without a notice."""
        self._handle.run(self._aio.wait_drained())

    @property
    def notice(self) -> EndNotice | None:
        """The notice that the round held will end, until `saved` answers it. A local read: cheap enough for every step."""
        return None if self._handle.is_forked else self._aio.notice

    def saved(self) -> None:
        """Answer the notice: what this member would lose with the round is saved. Without a notice it does nothing.

        Raises Unreachable if the engine is away for as long as the notice lasts.
        """
        self._handle.run(self._aio.saved())

    def close_run(self, reason: str = "finished", timeout_s: float = CALL_S) -> None:
        """End the run for everybody. Raises RoundOver if the others have gone on without this member.

        Raises Unreachable if the engine is away for `timeout_s`. The run may be closed all the same.
        """
        self._handle.run(self._aio.close_run(reason, timeout_s))

    def leave(self, *, failed: bool = False, reason: str = "") -> bool:
        """Go, for good. The run goes on for the others. Takes a few seconds at most, and raises only WrongArgument.

        Returns False if the engine is away, so that the others learn of it by the end of the lease only. A process that
        serves the run stays for up to `serve_on` seconds.

        `failed` says that the work cannot be done here: if quorum is then out of reach, the run is closed with this
        reason (unless on_failure=wait). Calls under way in other threads end with LeftAlready. In a forked child it
        does nothing.
        """
        # Checked here too: without a member in the portal there would be no call that checks.
        failed, reason = arguments.flag("leave", "failed", failed), arguments.text("leave", "reason", reason)
        return self._handle.leave(failed, reason)


class World(RoundFacts):
    """A member's rank in a round. Its store and bootstrap socket end with the round; everything else is constant."""

    def __init__(self, handle: _MemberHandle, world: AsyncWorld) -> None:
        super().__init__(*world._facts)  # noqa: SLF001  The same facts.
        self._store = Store(handle, world.store)
        self._handle = handle
        self._world = world

    @property
    def store(self) -> Store:
        """The round's key-value store. It ends with the round."""
        return self._store

    def take_bootstrap_socket(self) -> socket.socket:
        """Take rank 0's listening socket, to serve at `bootstrap` with it: once, before the member joins again or leaves."""
        return self.bootstrap.take_socket()

    def members(self) -> list[Peer]:
        """List all members of the round in rank order. Remote; raises RoundOver, and Unreachable after `read_timeout`."""
        return self._handle.run(self._world.members())


class Store:
    """The round's key-value store, for trainers and agents. It begins empty and ends with its round.

    Values are bytes; text is encoded as UTF-8. A key has at most 1,024 bytes and a value 1 MiB (LimitExceeded). All members
    of the round see the same keys. A write has taken effect, exactly once, when the call returns.

    Every call raises RoundOver once the round is broken or over, and calls that wait end with it. Calls that wait raise
    StoreTimeout, and all calls raise Unreachable if the engine stays away for `timeout_s` (but at least a second). An
    argument of a wrong type raises WrongArgument. Any thread may make any call.
    """

    def __init__(self, handle: _MemberHandle, store: AsyncStore) -> None:
        self._handle = handle
        self._store = store
        self._calls = store.calls

    @property
    def timeout_s(self) -> float:
        """How long a call waits if it does not say: 300 s at first."""
        return self._store.timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long later calls wait if they do not say."""
        self._store.set_timeout(timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        self._run(self._calls.set(key, value))

    def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys in one transaction: a reader that sees one of them sees all.

        Raises ValueError if there are more keys than the engine writes at once; the message says how many it does.
        """
        self._run(self._calls.multi_set(values))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value, and wait for it if it is not set yet."""
        return self._run(self._calls.get(key, timeout_s))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Return the values, and wait for those that are not set yet."""
        return self._run(self._calls.multi_get(keys, timeout_s))

    def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        """Wait until all of the keys are set."""
        self._run(self._calls.wait(keys, timeout_s))

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all of the keys are set now."""
        return self._run(self._calls.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return the sum. Exactly once, even if an answer was lost.

        The value is the number as text. Raises ValueError if the key has another value.
        """
        return self._run(self._calls.add(key, amount))

    def append(self, key: str, value: bytes | str) -> None:
        """Append bytes to a value, which starts empty."""
        self._run(self._calls.append(key, value))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards."""
        return self._run(self._calls.compare_set(key, expected, desired))

    def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._run(self._calls.delete(key))

    def num_keys(self) -> int:
        """Return how many keys this round has.

        Values of more than 16 MiB in all may be read in several steps. A key that is set or deleted meanwhile may count or not.
        """
        return self._run(self._calls.num_keys())

    def list_keys(self) -> list[str]:
        """Return the names of this round's keys, sorted. Large stores are read in steps, as by `num_keys`."""
        return self._run(self._calls.list_keys())

    def _run(self, call: StoreOperation[T]) -> T:
        """Carry the call out in this thread, if it can; in the portal, if it has to wait or to be tried again."""
        if self._handle.asks_directly:
            try:
                result = self._store.try_now(call)
            except NotNow:
                pass
            except BaseException:
                call.end()
                raise
            else:
                call.end()
                return result
        return self._handle.run(self._store.finish(call), call=call.name)
