"""The driver port: the operations that a member needs of the engine that keeps its run.

The semantics are a small subset of etcd v3's, which are proven and fit the protocol:

- One *revision* counts all writes of an engine; it only grows. A transaction that changes anything raises it by exactly
  one, whatever the number of its writes; one that only reads, or deletes what is not there, leaves it as it is.
- Every key remembers the revision that *created* it (since it last did not exist) and the one that *modified* it.
- A *transaction* is the only way to read or write. Its compares are judged and its operations applied at one revision,
  in order: a read sees the writes before it in the same transaction. It writes a key at most once, and no prefix that
  it deletes may hold a key that it writes.
- A *lease* is a promise to renew. When it ends, by revoke or by silence, every key put under it is deleted, all at one
  revision. It lasts at least its time to live. The engine decides how much longer, so a member must not conclude from
  its own clock that another member's lease has ended.
- A *watch* delivers every change of its targets after a revision, once each and in the order of revisions; the changes
  of one transaction come in one batch, and no batch is empty. A reader that is cancelled while it waits loses nothing.
  A session answers a call before its watches show what happened after it. An engine that has forgotten the revisions in
  between ends the watch with `Gap`, and the caller lists again. A watch may begin with a transaction, at its revision, and
  watch a key that the transaction found.

A run keeps everything that its leader must see under one prefix. One watch then shows the run in the order of
revisions, so every view is the run at one revision, on every engine.

A `Session` is bound to one engine *instance*: one life of an engine's memory. An engine that comes back empty is
another instance, and every call and watch of the old session fails with `EngineReset`, for good: revisions of two
instances must never be compared. A lost connection to the same instance is the driver's to restore: calls under way
fail with `Unreachable`; watches stay silent meanwhile and then go on.

A call that fails with `Unreachable` may or may not have taken effect, unless the error says `applied=False`. It must
not be repeated blindly: read first, or let a compare decide.

Every driver must pass the contract suite, `tests/engines/test_contract*.py`, unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeAlias, final, runtime_checkable

import msgspec

STORED = "/kv/"
"""A key with this in it holds what a program keeps in a round's store. An engine that limits what a run keeps refuses these
first: a store that is full must not keep its run from sealing the next round."""


class _Data(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Plain values, which cannot be part of a cycle.

    Hence `gc=False`: the garbage collector skips them. It took a third of the time of a thousand members in one
    process. Code that tells operations apart compares `type(one) is Put`: `isinstance` takes six times as long to
    return False.
    """


class Item(_Data, frozen=True):
    """A key with its value as it was at one revision."""

    key: str
    value: bytes
    created: int
    modified: int
    lease: int = 0


class Event(_Data, frozen=True):
    """One key changed: `item` is what it became, None if it was deleted."""

    key: str
    revision: int
    item: Item | None


class Batch(_Data, frozen=True):
    """All changes of a watch's targets up to and including `revision`."""

    revision: int
    events: tuple[Event, ...]


# ---- compares: a transaction takes its `then` branch only if all hold


@final
class Created(_Data, frozen=True, tag="created"):
    """The key was created at that revision; 0: it does not exist."""

    key: str
    revision: int


@final
class Modified(_Data, frozen=True, tag="modified"):
    """The key was last written at that revision; 0: it does not exist."""

    key: str
    revision: int


@final
class Equals(_Data, frozen=True, tag="equals"):
    """The key exists and has that value."""

    key: str
    value: bytes


@final
class AllCreated(_Data, frozen=True, tag="all_created"):
    """Each of the keys was created at the revision beside it. At most `Session.compares_max` keys."""

    revisions: Mapping[str, int]


@final
class Empty(_Data, frozen=True, tag="empty"):
    """No key with that prefix exists that was created after revision `since`; 0: none at all."""

    prefix: str
    since: int = 0


@final
class Away(_Data, frozen=True, tag="away"):
    """The key is under a presence whose process has ended, as far as its connection shows, at least `s` seconds ago.

    The connection ended by end-of-file without a goodbye, it has not come back, and not many went together. A live client
    that gives a connection up resets it. An engine that sees no connections (`Session.sees_ends`) never says so.
    """

    key: str
    s: float


Compare = Created | Modified | Equals | AllCreated | Empty | Away


# ---- operations


class Order(Enum):
    """The order of a `List`'s items. `limit` cuts after sorting. Keys created at one revision come in any order.

    `ANY` serves callers that only ask whether there is any key: etcd reads all keys before it sorts and cuts.
    """

    ANY = "any"
    KEY = "key"
    OLDEST = "oldest"
    NEWEST = "newest"


@final
class Put(_Data, frozen=True, tag="put"):
    """Write a key. It belongs to exactly the lease named here afterwards; 0: to none."""

    key: str
    value: bytes
    lease: int = 0


@final
class Delete(_Data, frozen=True, tag="delete"):
    """Delete a key if it exists."""

    key: str


@final
class DeletePrefix(_Data, frozen=True, tag="delete_prefix"):
    """Delete every key with that prefix."""

    prefix: str


@final
class Get(_Data, frozen=True, tag="get"):
    """Read one key."""

    key: str


@final
class List(_Data, frozen=True, tag="list"):
    """Read every key with that prefix.

    `created_below` leaves out keys created at or after that revision (0: none). `after` leaves out keys up to and
    including that key; it costs nothing on an engine that keeps its keys sorted, as etcd does.
    """

    prefix: str
    order: Order = Order.KEY
    limit: int = 0
    created_below: int = 0
    after: str = ""


Operation = Put | Delete | DeletePrefix | Get | List


class Case(_Data, frozen=True):
    """An alternative branch of a transaction: taken if these compares hold and no earlier branch's did."""

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]


Compares: TypeAlias = Iterable[Compare]
Operations: TypeAlias = Iterable[Operation]


class Outcome(_Data, frozen=True):
    """The result of a transaction: its branch, its revision, and the items that each operation read (writes: none)."""

    succeeded: bool
    """The transaction's compares held, or those of one of its other cases."""
    revision: int
    reads: tuple[tuple[Item, ...], ...] = ()
    case: int = 0
    """The branch taken: 0 for `then`, n for the n-th of `instead`."""

    def item(self, index: int) -> Item | None:
        """Return the item that operation `index`, a `Get`, found."""
        found = self.reads[index]
        return found[0] if found else None


class WatchPlan(_Data, frozen=True):
    """A watch that begins with a transaction, if that succeeds. `targets` and `ends`: as for `Session.watch`."""

    targets: tuple[str, ...]
    ends: tuple[str, ...] = ()
    first_of: tuple[int, ...] = ()
    """Operations of the branch: the end of the first key that one of them finds is watched, too."""

    def found(self, outcome: Outcome) -> tuple[str, ...]:
        """Return that key; nothing, if none was found."""
        reads = outcome.reads
        for index in self.first_of:
            if index < len(reads) and reads[index]:
                return (reads[index][0].key,)
        return ()


def leases_of(branches: Iterable[Sequence[Operation]]) -> set[int]:
    """Return the leases under which the branches put keys."""
    return {one.lease for branch in branches for one in branch if type(one) is Put}


# ---- exceptions of a session beside Unreachable; the member handles them, callers of the API never see them


class EngineReset(Exception):
    """The engine is another instance now: everything known of the old one is void."""


class LeaseGone(Exception):
    """The lease ended, so the keys put under it are gone."""


class Gap(Exception):
    """The engine no longer knows the changes since the watch's revision: list again, then watch from there."""


class NotNow(Exception):
    """The calling thread cannot bring this to its end by itself: a task of the session's loop must."""


class Watch(Protocol):
    """A stream of changes. It ends with Gap or EngineReset, or with Unreachable once its session is closed."""

    def __aiter__(self) -> AsyncIterator[Batch]: ...

    def listen(self, listener: Callable[[Batch | Exception], None]) -> None:
        """Call the listener with each batch, and with the exception at the end, instead of being iterated: it needs no task."""

    async def aclose(self) -> None:
        """End the watch. Harmless when it has ended."""


class ServerLife(Protocol):
    """One life of a server that the platform gave a name, as a client sees it: the facts for T16.4."""

    name: str
    began_at: float
    """When the server was started, by the client's clock; not later than it really was."""
    address: str

    async def answers(self, since: float) -> bool:
        """Whether this server may still be at its address: it answers there, or something there keeps silent.

        `since`: when the next one was started. If an attempt to connect has failed well after that, it is not asked again.
        """

    def follow(self) -> None:
        """Note that the client follows this server, so that an older one of the name hears of it (T16.7)."""


class Session(Protocol):
    """A driver's connection to one engine instance. The module's docstring is its contract."""

    instance: str
    """Random id of this life of the engine's memory."""
    place: str
    """The place where the engine runs; two instances at one place cannot live at the same time."""
    life: ServerLife | None
    """The life of the server, if both sides declared its place (setting `place`); None on all other engines."""
    fence_floor: int | None
    """Fences count from above this (`core/fence.py`). It is above all that was sealed at the engine's place before this
    session began; 0: the engine cannot tell; None: its revisions never begin again, so they are fences themselves."""
    durable: bool
    """Whether the engine keeps its data over a restart: a run unknown to it then never existed."""
    compares_max: int
    """Most keys that one transaction can compare."""
    writes_max: int
    """Most operations of one transaction."""
    stars: bool
    """Whether watches take targets with a star: `a/*/b` is every key `b` in a directory right below `a`."""
    sees_ends: bool
    """Whether the engine sees the end of a client's process, so that `Away` can hold."""
    local_host: str
    """The address at which others reach this process; empty: the driver cannot tell."""

    async def txn(
        self, compares: Compares = (), then: Operations = (), otherwise: Operations = (), instead: Sequence[Case] = ()
    ) -> Outcome:
        """Judge and apply at one revision: `then`, or the first of `instead` whose compares hold, or `otherwise`.

        Raises Unreachable, EngineReset, LeaseGone (a put under a lease that ended).
        """

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """Make a lease; the engine may round its time to live up, never down.

        `presence`: the lease stands for this process. An engine that sees connections may end it soon after this one's.
        """

    async def renew(self, lease: int) -> None:
        """Restart the lease's time; LeaseGone if it has ended."""

    async def revoke(self, lease: int) -> None:
        """End the lease now. One that has ended already is no error."""

    def watch(self, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> Watch:
        """Deliver the changes after revision `since` of each target: a key, a prefix ending with '/', or a star target.

        `ends`: keys of which only the deletion is delivered, unless they are among the targets, too.
        """

    async def txn_then_watch(
        self, plan: WatchPlan, compares: Compares = (), then: Operations = (), otherwise: Operations = (),
        instead: Sequence[Case] = (),
    ) -> tuple[Outcome, Watch | None]:  # fmt: skip
        """Make a transaction and, if it succeeds, begin a watch at its revision: one request, where the engine can."""

    async def close(self) -> None:
        """Close the connection. Leases live on: revoke first those that should end now."""


class TxnNow(Protocol):
    """The method `txn_now` of a session that a thread beside its loop's can ask without a task, in a fifth of the time.

    It does as `txn`, and blocks the calling thread for at most `limit_s`. Raises NotNow if nothing was sent, and Unreachable
    too when the time is up. On one session, what was sent first takes effect first, whichever thread sent it.
    """

    def __call__(self, compares: Compares, then: Operations, otherwise: Operations, limit_s: float) -> Outcome: ...


class MemberHealth(msgspec.Struct, frozen=True):
    """One member of an engine that has several. `problem` is empty if it works."""

    host: str
    leads: bool = False
    version: str = ""
    size: int = 0  # Bytes that it keeps.
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.host}: {self.problem}"
        return f"{self.host}: {'leads' if self.leads else 'follows'}, {self.version}, {self.size / 1e6:.1f} MB"


@runtime_checkable
class Replicated(Protocol):
    """A session on an engine whose members the job runs by itself, and which can be asked one by one."""

    async def health(self) -> list[MemberHealth]:
        """Return how each member is, in the order of the endpoint."""


@runtime_checkable
class RunsProgram(Protocol):
    """A driver that runs a program on the hosts of its endpoint."""

    async def program(self) -> str:
        """Return the program and its version; "" if this machine is no such host. Raises SettingsError: what to install."""


class Driver(Protocol):
    """The way to an engine."""

    endpoint: str
    """The endpoint as shown to people, without secrets."""

    async def connect(self) -> Session:
        """Make one attempt. Raises Unreachable (the caller may retry) or Untrusted (retrying is useless)."""

    async def close(self) -> None:
        """Release what the driver itself holds, such as a server it hosts."""
