"""The driver for etcd v3: the engine port on a cluster that survives the loss of any one node.

The port is a subset of etcd's own semantics, so this module only translates. Two things etcd does not have: a watch of
several keys in one order (`watch`), and a check that the cluster is still the same one. All sessions of one event loop
to one cluster share a client: its channels, one stream for their watches and one for their leases.

An etcd lease is a minimum, not a bound: after a change of etcd's leader it may last several times its time. So nothing
here concludes from a clock that a lease has ended. The member stops by its own clock, and every write of a leader
compares the revision of its key.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ...config.endpoint import Endpoint
from ...errors import SettingsError, Unreachable
from ...system.addresses import can_be_told, outward_address, source_of
from ...system.dial import DialFailed, Resolver
from .. import port
from ..port import Case, EngineReset, Item, LeaseGone, Outcome, ServerLife
from ..reference import refuse_double_writes
from ..watch_queue import WatchesAfterwards
from . import sentinel
from .client import messages
from .client.client import Client
from .client.counting import read_all
from .client.credentials import Credentials
from .client.diagnose import diagnose, too_old
from .client.errors import Denied, EtcdError, LeaseNotFound, RequestRefused, Unanswered, WrongLogin
from .client.messages import Target
from .watch import EtcdWatch

CONNECT_TIMEOUT_S = 5.0  # An election of etcd takes a second or two. No reply after this long needs an explanation.
DIAGNOSE_S = 2.0
NEVER = 1 << 62  # A revision that no store reaches.
T = TypeVar("T")


class EtcdDriver:
    """Connects to the cluster of an endpoint. All keys are below the endpoint's path."""

    def __init__(
        self, endpoint: Endpoint, credentials: Credentials, *, read_timeout_s: float = 10.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S, sentinel: bool = False,
    ) -> None:  # fmt: skip
        """`sentinel`: have the leases of members revoked when this process dies."""
        self.endpoint = str(endpoint)
        self.parsed_endpoint = endpoint
        self.credentials = credentials
        self.read_timeout_s = read_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.sentinel = sentinel
        self.prefix = f"{endpoint.path}/" if endpoint.path else ""

    async def connect(self) -> EtcdSession:
        """Open a session. Raises Unreachable, or SettingsError if a retry cannot help and a person must act."""
        shared = SharedClient.of(self)
        shared.users += 1
        try:
            await shared.ready()
            return self.make_session(shared)
        except BaseException:
            await shared.release()
            raise

    def make_session(self, shared: SharedClient) -> EtcdSession:
        return EtcdSession(self, shared)

    async def close(self) -> None:
        """Do nothing: the client closes with its last session."""


class SharedClient:
    """A client, and the state that all its sessions share."""

    def __init__(self, driver: EtcdDriver, key: object, others: dict[object, SharedClient]) -> None:
        try:
            self.client = Client(driver.parsed_endpoint.hosts, driver.credentials, driver.read_timeout_s)
        except Unanswered as fault:
            raise Unreachable(driver.endpoint, fault.problem, applied=False) from None
        self.users = 0
        self.cluster = 0
        self.revision = 0
        """The newest revision that was read. A later reply with an older one means that the store was emptied."""
        self.local_host = ""
        self.sessions: set[EtcdSession] = set()
        self._driver = driver
        self._key = key
        self._others = others
        self._checking: asyncio.Task[None] | None = None
        self.client.cluster.on_header.append(self._check_header)

    @classmethod
    def of(cls, driver: EtcdDriver) -> SharedClient:
        """Return the client for this driver's cluster in the running loop."""
        others = _shared.setdefault(asyncio.get_running_loop(), {})
        endpoint = driver.parsed_endpoint
        key = (endpoint.scheme, endpoint.hosts, driver.prefix, driver.credentials, driver.read_timeout_s)
        found = others.get(key)
        if found is None or found.client.cluster.forked:
            found = others[key] = cls(driver, key, others)
        return found

    async def release(self) -> None:
        """Give up one use. The last one closes the client."""
        self.users -= 1
        if not self.users:
            self._stop_sharing()
            if self._checking is not None:
                self._checking.cancel()
            await self.client.close()

    def _stop_sharing(self) -> None:
        """Let the next session get a new client."""
        if self._others.get(self._key) is self:
            del self._others[self._key]

    async def ready(self) -> None:
        """Wait until the cluster has been checked, once for all sessions. Raises Unreachable, SettingsError."""
        if self.cluster:
            return
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check_cluster(), name="rdzv checks etcd")
            self._checking.add_done_callback(self._check_done)
        await asyncio.shield(self._checking)

    def _check_done(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        if not task.cancelled():
            task.exception()  # Mark it as retrieved: the callers that still wait have it.

    async def _check_cluster(self) -> None:
        driver, client, limit_s = self._driver, self.client, self._driver.connect_timeout_s
        user = driver.credentials.user
        try:
            status = await client.status(limit_s)
            if old := too_old(status.version):
                raise SettingsError(f"endpoint {driver.endpoint!r}: {old}")
            # This transaction never writes, because its compare cannot hold. But etcd needs its quorum to apply it, and
            # refuses it if the user lacks the permission to write.
            key = (driver.prefix + "rdzv/").encode()
            own = messages.RangeRequest(key, messages.prefix_end(key), limit=1, keys_only=True)
            never = messages.Compare(key, Target.CREATED, NEVER)
            asked = await client.txn([never], [messages.PutRequest(key, b"")], [own], limit_s, retry=True)
        except WrongLogin:
            refused = f"etcd refuses the name {user!r} with that password"
            problem = refused if user else "etcd wants a name and a password; see user and token_file"
            raise SettingsError(f"endpoint {driver.endpoint!r}: {problem}") from None
        except Denied:
            who = f"user {user!r}" if user else "the user named by our certificate"
            raise SettingsError(
                f"endpoint {driver.endpoint!r}: {who} may not read and write below {driver.prefix + 'rdzv/'!r} in etcd; "
                "grant that, or name a path that may be written"
            ) from None
        except EtcdError as fault:
            raise await self._diagnosed(fault) from None
        self.local_host = await own_address(driver.parsed_endpoint, client.cluster.current.address)
        # The transaction's reply has a majority behind it. A single member may have been left in a cluster of its own.
        self.cluster = asked.header.cluster

    async def _diagnosed(self, fault: EtcdError) -> Unreachable:
        """Return the error for a cluster of which no member could be used."""
        driver = self._driver
        hosts = driver.parsed_endpoint.hosts
        limit_s = min(DIAGNOSE_S, driver.connect_timeout_s)
        problems = await asyncio.gather(*(diagnose(*host, driver.credentials, limit_s) for host in hosts[:8]))
        remedy = ""
        if not all(problems):
            remedy = "bring a majority of its members back (`etcdctl endpoint status` shows them)"
            answering = sum(not problem for problem in problems)
            problem = f"{answering} of {len(hosts)} members answer, but they have no leader, so no quorum ({fault.problem})"
        else:
            names = [member.name for member in self.client.cluster.members]
            problem = "; ".join(f"{name}: {problem}" for name, problem in zip(names, problems, strict=False))
        return Unreachable(driver.endpoint, problem, driver.connect_timeout_s, applied=False, remedy=remedy)

    def _check_header(self, header: messages.Header) -> None:
        if self.cluster and header.cluster != self.cluster:
            self.reset()

    def reset(self) -> None:
        """End all sessions: another cluster replies, or this one was emptied."""
        self._stop_sharing()
        for session in tuple(self.sessions):
            session.end(EngineReset)


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, SharedClient]] = weakref.WeakKeyDictionary()


class EtcdSession(WatchesAfterwards):
    """A session of the port. Used from the loop it was made on."""

    durable = True
    life: ServerLife | None = None
    fence_floor: int | None = None
    compares_max = messages.OPERATIONS_MAX
    writes_max = messages.OPERATIONS_MAX
    stars = False
    sees_ends = False

    def __init__(self, driver: EtcdDriver, shared: SharedClient) -> None:
        self.instance = f"{shared.cluster:016x}"
        self.place = f"etcd/{self.instance}"
        self.local_host = shared.local_host
        self.client = shared.client
        self.prefix = driver.prefix
        self.watches: set[EtcdWatch] = set()
        self._cheap_read = messages.RangeRequest(self._key("rdzv/"), count_only=True)
        """A read for the sake of its revision, of a key that the user may read."""
        self._driver = driver
        self._shared = shared
        self._ended: type[Exception] | None = None
        self._closed = False
        self._guarded: set[int] = set()
        """The leases that a sentinel has got."""
        shared.sessions.add(self)

    async def txn(
        self, compares: port.Compares = (), then: port.Operations = (), otherwise: port.Operations = (),
        instead: Sequence[Case] = (),
    ) -> Outcome:  # fmt: skip
        cases = (Case(tuple(compares), tuple(then)), *instead)
        branches = (*(case.then for case in cases), tuple(otherwise))
        for branch in branches:
            refuse_double_writes(branch)
        first, *others = map(self._case, cases)
        last = [self._request(one) for one in branches[-1]]
        before = self._shared.revision
        done = await self._call(self._txn(first, last, others))
        if done.header.revision < before:
            self._shared.reset()
            self._raise_if_ended()
        self._shared.revision = max(self._shared.revision, done.header.revision)
        case = done.case if done.succeeded else 0
        wanted = len(branches[case if done.succeeded else -1])  # `_txn` and the client may have added operations.
        reads = tuple([tuple(filter(None, map(self.item, found.items))) for found in done.found[:wanted]])
        return Outcome(done.succeeded, done.header.revision, reads, case)

    def _case(self, case: Case) -> messages.TxnBranch:
        compares = [one for compare in case.compares for one in self._compares(compare)]
        return messages.TxnBranch(compares, [self._request(one) for one in case.then])

    async def _txn(
        self, first: messages.TxnBranch, otherwise: list[messages.Request], others: list[messages.TxnBranch]
    ) -> messages.TxnResponse:
        """Apply a transaction by the cheapest request that etcd has for it."""
        reads = [one for one in first.then if isinstance(one, messages.RangeRequest)]
        if first.compares or len(reads) < len(first.then):
            # A transaction is linearizable only if the branch taken reads something. A member would answer an empty
            # branch from its own, possibly old, state. So an empty branch gets a read.
            return await self.client.txn(
                first.compares, first.then or [self._cheap_read], otherwise or [self._cheap_read], instead=others
            )
        if len(reads) <= 1:
            header, found = await self.client.range(reads[0] if reads else self._cheap_read)
            return messages.TxnResponse(header, True, (found,))
        header, found_all = await read_all(self.client.read, reads)
        return messages.TxnResponse(header, True, tuple(found_all))

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """Grant a lease of whole seconds, rounded up. etcd sees no connections, so a sentinel gets that of a presence."""
        granted = await self._call(self.client.grant(max(1, math.ceil(ttl_s))))
        if presence and self._driver.sentinel:
            cluster = sentinel.ClusterAccess(self._driver.parsed_endpoint.hosts, self._driver.credentials.outliving())
            sentinel.own().add(granted.id, granted.ttl_s, cluster)
            self._guarded.add(granted.id)
        return granted.id

    async def renew(self, lease: int) -> None:
        try:
            await self._call(self.client.renew(lease))
        except LeaseGone:
            await sentinel.own().forget(lease)
            raise
        sentinel.own().check()

    async def revoke(self, lease: int) -> None:
        """End a lease. Harmless when it has ended."""
        with suppress(LeaseGone):
            await self._call(self.client.revoke(lease))
        await sentinel.own().forget(lease)
        self._raise_if_ended()

    def watch(self, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> EtcdWatch:
        """Watch keys and prefixes. The watch itself raises the error if it cannot begin."""
        watch = EtcdWatch(self, targets, since, ends)
        try:
            self._raise_if_ended()
            self.client.cluster.check_usable()
        except Unanswered as fault:
            watch.end(self._translated(fault))
        except (Unreachable, EngineReset) as problem:
            watch.end(problem)
        else:
            self.watches.add(watch)
            watch.begin()
        return watch

    async def close(self) -> None:
        """Close the session. Closing twice is harmless. In a forked child the client belongs to the parent and stays open."""
        if self._closed:
            return
        self._closed = True
        self.end(Unreachable)
        self._shared.sessions.discard(self)
        try:
            # A lease that etcd could not be asked to revoke ends by itself: nobody renews it after this session.
            for lease in tuple(self._guarded):
                await sentinel.own().forget(lease)
        finally:
            if not self.client.cluster.forked:
                await self._shared.release()

    def end(self, how: type[Exception]) -> None:
        """Make every call and watch fail from now on. The first reason stands."""
        if self._ended is None:
            self._ended = how
            for watch in tuple(self.watches):
                watch.end(self._end_error())

    def item(self, kv: messages.KeyValue) -> Item | None:
        """Translate a key and its value. Its name is relative to the endpoint's path. None: it is no text, so not ours."""
        try:
            name = kv.key.decode()
        except UnicodeDecodeError:
            return None
        return Item(name[len(self.prefix) :], kv.value, kv.created, kv.modified, kv.lease)

    def span(self, target: str) -> tuple[bytes, bytes]:
        """Return the range of keys of a watch's target."""
        return self._range(target) if target.endswith("/") else (self._key(target), b"")

    # ---- errors

    async def _call(self, request: Coroutine[Any, Any, T]) -> T:
        """Await a request of the client and translate its errors. A session that has ended raises its reason instead."""
        if self._ended is not None:
            request.close()
            raise self._end_error()
        try:
            reply = await request
        except EtcdError as fault:
            raise self._translated(fault) from None
        self._raise_if_ended()
        return reply

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._end_error()

    def _end_error(self) -> Exception:
        if self._ended is EngineReset:
            return EngineReset(f"cluster {self.instance} was replaced or emptied")
        return Unreachable(self._driver.endpoint, "the session is closed", applied=False)

    def _translated(self, fault: EtcdError) -> Exception:
        """Return the port's error. A refusal that the port does not know is trouble that may pass, with no effect."""
        if isinstance(fault, LeaseNotFound):
            return LeaseGone(fault.problem)
        if self._ended is not None:
            return self._end_error()
        applied = fault.applied if isinstance(fault, Unanswered) else False
        problem = f"etcd refuses: {fault.problem}" if isinstance(fault, RequestRefused) else fault.problem
        return Unreachable(self._driver.endpoint, problem, applied=applied)

    # ---- requests

    def _compares(self, compare: port.Compare) -> list[messages.Compare]:
        if isinstance(compare, port.AllCreated):
            return [messages.Compare(self._key(key), Target.CREATED, made) for key, made in compare.revisions.items()]
        if isinstance(compare, port.Created):
            return [messages.Compare(self._key(compare.key), Target.CREATED, compare.revision)]
        if isinstance(compare, port.Modified):
            return [messages.Compare(self._key(compare.key), Target.MODIFIED, compare.revision)]
        if isinstance(compare, port.Equals):
            return [messages.Compare(self._key(compare.key), Target.VALUE, compare.value)]
        if isinstance(compare, port.Away):  # etcd knows leases, not the processes behind them.
            return [messages.Compare(self._key(compare.key), Target.CREATED, NEVER)]
        # An empty range compares in etcd like a key created at revision 0.
        key, end = self._range(compare.prefix)
        return [messages.Compare(key, Target.CREATED, compare.since + 1, less=True, end=end)]

    def _request(self, operation: port.Operation) -> messages.Request:
        if isinstance(operation, port.Put):
            return messages.PutRequest(self._key(operation.key), operation.value, operation.lease)
        if isinstance(operation, port.Get):
            return messages.RangeRequest(self._key(operation.key))
        if isinstance(operation, port.Delete):
            return messages.DeleteRequest(self._key(operation.key))
        key, end = self._range(operation.prefix)
        if isinstance(operation, port.DeletePrefix):
            return messages.DeleteRequest(key, end)
        # A sorted range makes etcd read all its keys before the limit cuts: with 1,000 members, a join that asked for its
        # exact predecessor cost n reads each, 1.8 s of etcd's CPU; 0.9 s for everything now that it asks for the next
        # member by key. So `Order.ANY` must stay unsorted.
        below, order = operation.created_below, operation.order
        return messages.RangeRequest(
            max(key, self._key(operation.after) + b"\0") if operation.after else key,
            end,
            limit=operation.limit,
            sort=messages.Sort.CREATED if order in (port.Order.OLDEST, port.Order.NEWEST) else messages.Sort.KEY,
            descending=order is port.Order.NEWEST,
            created_max=max(below - 1, 0),
            created_min=NEVER if below == 1 else 0,  # etcd reads "at most 0" as "no limit".
        )

    def _key(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _range(self, prefix: str) -> tuple[bytes, bytes]:
        key = self._key(prefix)
        return key, messages.prefix_end(key)


async def own_address(endpoint: Endpoint, member: tuple[str, int]) -> str:
    """Return the address at which others reach this process: the source address of connections to etcd."""
    own = ""
    with suppress(DialFailed):
        own = source_of(*(await Resolver().resolve(*member, 1.0))[0])
    return own if can_be_told(own) or endpoint.is_loopback else outward_address()
