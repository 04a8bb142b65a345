"""The driver for etcd v3: the port on a cluster that outlives any one machine.

The port is a subset of etcd's own semantics, so this only translates. What etcd does not have is made here: a watch of several
keys in one order (`etcd_watch`), and the knowledge that the cluster is still the one it was. All sessions of one event loop
to one cluster share a client: its channels, one stream for their watches and one for their leases.

An etcd lease is a minimum, not a bound: after a change of etcd's leader it may last for several times its time. So nothing here
concludes from a clock that a lease has ended. That a member stops by its own clock, and that every write of a leader compares
its key's revision, is the member's affair.
"""

from __future__ import annotations

import asyncio
import math
import socket
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import structs

from ...config.endpoint import Endpoint
from ...errors import SettingsError, Unreachable
from ...system.addresses import can_be_told, outward_address, plain
from ...system.dial import DialFailed, Resolver
from ..port import (
    AllCreated,
    Case,
    Compare,
    Created,
    Delete,
    DeletePrefix,
    EngineReset,
    Equals,
    Get,
    Item,
    LeaseGone,
    List,
    Modified,
    Operation,
    Order,
    Outcome,
    Put,
)
from ..reference import refuse_double_writes
from .client.client import Client
from .client.credentials import Credentials
from .client.diagnose import diagnose, too_old
from .client.errors import Denied, EtcdError, LeaseNotFound, RequestRefused, Unanswered, WrongLogin
from .client.messages import (
    OPERATIONS_MAX,
    Header,
    KeyValue,
    RangeRequest,
    Request,
    Sort,
    Target,
    TxnResponse,
    prefix_end,
)
from .client.messages import Compare as EtcdCompare
from .client.messages import DeleteRequest as EtcdDelete
from .client.messages import PutRequest as EtcdPut
from .client.messages import TxnBranch as EtcdCase
from .watch import EtcdWatch

CONNECT_TIMEOUT_S = 5.0
"""An election takes a second or two; who has no answer after this long has trouble worth a sentence."""
DIAGNOSE_S = 2.0
NEVER = 1 << 62
"""A revision that no store reaches."""


class EtcdDriver:
    """Reaches the cluster that an endpoint names. All keys are below the endpoint's path."""

    def __init__(
        self,
        endpoint: Endpoint,
        access: Credentials,
        *,
        read_timeout_s: float = 10.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.endpoint = str(endpoint)
        self.named = endpoint
        self.access = access
        self.read_timeout_s = read_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.prefix = f"{endpoint.path}/" if endpoint.path else ""

    async def connect(self) -> EtcdSession:
        """See the port. What only a person can mend is a SettingsError: trying again would not help."""
        shared = _SharedClient.of(self)
        shared.users += 1
        try:
            await shared.ready()
            return EtcdSession(self, shared)
        except BaseException:
            await shared.leave()
            raise

    async def close(self) -> None:
        """Nothing to give up: channels go with their last session."""


class _SharedClient:
    """A client with what all its sessions know."""

    def __init__(self, driver: EtcdDriver, key: object, others: dict[object, _SharedClient]) -> None:
        try:
            self.client = Client(driver.named.hosts, driver.access, driver.read_timeout_s)
        except Unanswered as fault:
            raise Unreachable(driver.endpoint, fault.problem, applied=False) from None
        self.users = 0
        self.cluster = 0
        self.revision = 0
        """The newest that was read; what is asked for from now on cannot be older, unless the store was emptied."""
        self.local_host = ""
        self.sessions: set[EtcdSession] = set()
        self._driver = driver
        self._key = key
        self._others = others
        self._looking: asyncio.Task[None] | None = None
        self.client.on_header(self.note)

    @classmethod
    def of(cls, driver: EtcdDriver) -> _SharedClient:
        """The one for this driver's cluster in the running loop."""
        others = _shared.setdefault(asyncio.get_running_loop(), {})
        named = driver.named
        key = (named.scheme, named.hosts, driver.prefix, driver.access, driver.read_timeout_s)
        found = others.get(key)
        if found is None or found.client.cluster.forked:
            found = others[key] = cls(driver, key, others)
        return found

    async def leave(self) -> None:
        """The last one takes the client down."""
        self.users -= 1
        if not self.users:
            self.retire()
            if self._looking is not None:
                self._looking.cancel()
            await self.client.close()

    def retire(self) -> None:
        """Nobody new."""
        if self._others.get(self._key) is self:
            del self._others[self._key]

    async def ready(self) -> None:
        """Until it is known that the cluster can be used. Raises Unreachable, SettingsError."""
        if self.cluster:
            return
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="rdzv looks at etcd")
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        if not task.cancelled():
            task.exception()  # Whoever waited for it has it.

    async def _look(self) -> None:
        driver, client, limit_s = self._driver, self.client, self._driver.connect_timeout_s
        try:
            status = await client.status(limit_s)
            old = too_old(status.version)
            if old:
                raise SettingsError(f"endpoint {driver.endpoint!r}: {old}")
            # It never does anything, but etcd says whether we might, and needs its quorum to say it.
            key = (driver.prefix + "rdzv/").encode()
            own = RangeRequest(key, prefix_end(key), limit=1, keys_only=True)
            never = EtcdCompare(key, Target.CREATED, NEVER)
            await client.txn([never], [EtcdPut(key, b"")], [own], limit_s, repeat=True)
        except WrongLogin:
            problem = f"etcd refuses the name {driver.access.user!r} with that password"
            if not driver.access.user:
                problem = "etcd wants a name and a password; see user and token_file"
            raise SettingsError(f"endpoint {driver.endpoint!r}: {problem}") from None
        except Denied:
            raise SettingsError(self._denied()) from None
        except EtcdError as fault:
            raise await self._why(fault) from None
        self.local_host = await own_address(driver.named, client.cluster.current.address)
        self.cluster = status.header.cluster

    def _denied(self) -> str:
        driver = self._driver
        who = f"user {driver.access.user!r}" if driver.access.user else "the one our certificate names"
        return (
            f"endpoint {driver.endpoint!r}: {who} may not read and write below {driver.prefix + 'rdzv/'!r} in etcd; "
            "grant that, or name a path that may be written"
        )

    async def _why(self, fault: EtcdError) -> Exception:
        """The sentence for a cluster of which no member could be used."""
        driver = self._driver
        judged = [
            diagnose(host, port, driver.access, min(DIAGNOSE_S, driver.connect_timeout_s))
            for host, port in driver.named.hosts[:8]
        ]
        found = await asyncio.gather(*judged)
        remedy = ""
        if not all(found):
            remedy = "bring a majority of its members back (`etcdctl endpoint status` shows them)"
            answering = sum(not problem for problem in found)
            problem = (
                f"{answering} of {len(driver.named.hosts)} members answer, but they have no leader, so no quorum "
                f"({fault.problem})"
            )
        else:
            names = [member.name for member in self.client.cluster.members]
            problem = "; ".join(f"{name}: {problem}" for name, problem in zip(names, found, strict=False))
        return Unreachable(driver.endpoint, problem, driver.connect_timeout_s, applied=False, remedy=remedy)

    def note(self, header: Header) -> None:
        """Every answer names its cluster."""
        if self.cluster and header.cluster != self.cluster:
            self.reset()

    def reset(self) -> None:
        """Another cluster answers, or one that was emptied."""
        self.retire()
        for session in tuple(self.sessions):
            session.end(EngineReset)


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, _SharedClient]] = weakref.WeakKeyDictionary()


class EtcdSession:
    """See the port. Used from the loop it was made on."""

    durable = True
    compares_max = OPERATIONS_MAX
    writes_max = OPERATIONS_MAX
    stars = False

    def __init__(self, driver: EtcdDriver, shared: _SharedClient) -> None:
        self.instance = f"{shared.cluster:016x}"
        self.place = f"etcd/{self.instance}"
        self.local_host = shared.local_host
        self.client = shared.client
        self.prefix = driver.prefix
        self._anything = RangeRequest(self._key("rdzv/"), count_only=True)
        """A read for the revision's sake, of what we may read."""
        self._driver = driver
        self._shared = shared
        self._ended: type[Exception] | None = None
        self._watches: set[EtcdWatch] = set()
        self._closed = False
        shared.sessions.add(self)

    async def txn(
        self,
        compares: Iterable[Compare] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        instead: Sequence[Case] = (),
    ) -> Outcome:
        """See the port."""
        cases = (Case(tuple(compares), tuple(then)), *instead)
        branches = (*(case.then for case in cases), tuple(otherwise))
        for branch in branches:
            refuse_double_writes(branch)
        (asked, yes), *others = map(self._case, cases)
        no = [self._request(one) for one in branches[-1]]
        self._check()
        before = self._shared.revision
        try:
            done = await self._txn(asked, yes, no, [EtcdCase(*other) for other in others])
        except EtcdError as fault:
            raise self._translated(fault) from None
        self._check()
        if done.header.revision < before:
            self._shared.reset()
            self._check()
        self._shared.revision = max(self._shared.revision, done.header.revision)
        case = done.case if done.succeeded else 0
        wanted = len(branches[case if done.succeeded else -1])
        reads = tuple([tuple(map(self.item, found.items)) for found in done.found[:wanted]])
        return Outcome(done.succeeded, done.header.revision, reads, case)

    def _case(self, case: Case) -> tuple[list[EtcdCompare], list[Request]]:
        asked = [one for compare in case.compares for one in self._compares(compare)]
        return asked, [self._request(one) for one in case.then]

    async def _txn(
        self, compares: list[EtcdCompare], then: list[Request], otherwise: list[Request], instead: list[EtcdCase]
    ) -> TxnResponse:
        """By the cheapest request that etcd has for it."""
        reads = [one for one in then if isinstance(one, RangeRequest)]
        if compares or len(reads) < len(then):
            # A branch that does nothing would be answered by a member from what it happens to know.
            return await self.client.txn(
                compares, then or [self._anything], otherwise or [self._anything], instead=instead
            )
        if len(reads) <= 1:
            header, found = await self.client.range(reads[0] if reads else self._anything)
            return TxnResponse(header, True, (found,))
        # Any number of reads at one revision: that of the first, which is the present one.
        first = await self.client.txn((), reads[: OPERATIONS_MAX - 1])
        found_all = first.found
        for start in range(OPERATIONS_MAX - 1, len(reads), OPERATIONS_MAX - 1):
            some = [structs.replace(one, revision=first.header.revision) for one in reads[start:][: OPERATIONS_MAX - 1]]
            found_all += (await self.client.txn((), some)).found
        return TxnResponse(first.header, True, found_all)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:  # noqa: ARG002
        """Whole seconds, rounded up. etcd sees no connections, so a presence is a lease like any other."""
        self._check()
        try:
            lease = await self.client.grant(max(1, math.ceil(ttl_s)))
        except EtcdError as fault:
            raise self._translated(fault) from None
        self._check()
        return lease.id

    async def renew(self, lease: int) -> None:
        """See the port."""
        self._check()
        try:
            await self.client.renew(lease)
        except EtcdError as fault:
            raise self._translated(fault) from None
        self._check()

    async def revoke(self, lease: int) -> None:
        """See the port."""
        self._check()
        try:
            with suppress(LeaseNotFound):
                await self.client.revoke(lease)
        except EtcdError as fault:
            raise self._translated(fault) from None
        self._check()

    def watch(self, targets: Sequence[str], since: int) -> EtcdWatch:
        """Whatever is wrong is said by the watch."""
        watch = EtcdWatch(self, targets, since)
        try:
            self._check()
            self.client.cluster.check()
        except Unanswered as fault:
            watch.end(self._translated(fault))
        except (Unreachable, EngineReset) as problem:
            watch.end(problem)
        else:
            self._watches.add(watch)
            watch.begin()
        return watch

    async def close(self) -> None:
        """Closing twice is harmless. In a forked child all of it is the parent's."""
        if self._closed:
            return
        self._closed = True
        if self._ended is None:
            self.end(Unreachable)
        self._shared.sessions.discard(self)
        if not self.client.cluster.forked:
            await self._shared.leave()

    def end(self, how: type[Exception]) -> None:
        """For good: every call and watch fails from now on."""
        if self._ended is None:
            self._ended = how
            for watch in tuple(self._watches):
                watch.end(self._end())

    def forget(self, watch: EtcdWatch) -> None:
        """The watch has ended."""
        self._watches.discard(watch)

    def item(self, kv: KeyValue) -> Item:
        """As the port has it: named without the endpoint's path."""
        return Item(kv.key.decode()[len(self.prefix) :], kv.value, kv.created, kv.modified, kv.lease)

    def span(self, target: str) -> tuple[bytes, bytes]:
        """The first key of a watch's target, and the first behind it."""
        key = (self.prefix + target).encode()
        return key, prefix_end(key) if target.endswith("/") else b""

    # ---- translating

    def _check(self) -> None:
        if self._ended is not None:
            raise self._end()

    def _end(self) -> Exception:
        if self._ended is EngineReset:
            return EngineReset(f"cluster {self.instance} was replaced or emptied")
        return Unreachable(self._driver.endpoint, "the session is closed", applied=False)

    def _translated(self, fault: EtcdError) -> Exception:
        """Of etcd's refusals only those that the port knows; the others are trouble that may pass, with nothing done."""
        if isinstance(fault, LeaseNotFound):
            return LeaseGone(fault.problem)
        if self._ended is not None:
            return self._end()
        applied = fault.applied if isinstance(fault, Unanswered) else False
        problem = fault.problem if not isinstance(fault, RequestRefused) else f"etcd refuses: {fault.problem}"
        return Unreachable(self._driver.endpoint, problem, applied=applied)

    def _compares(self, compare: Compare) -> list[EtcdCompare]:
        if isinstance(compare, Created):
            return [EtcdCompare(self._key(compare.key), Target.CREATED, compare.revision)]
        if isinstance(compare, Modified):
            return [EtcdCompare(self._key(compare.key), Target.MODIFIED, compare.revision)]
        if isinstance(compare, Equals):
            return [EtcdCompare(self._key(compare.key), Target.VALUE, compare.value)]
        if isinstance(compare, AllCreated):
            return [EtcdCompare(self._key(key), Target.CREATED, made) for key, made in compare.revisions.items()]
        # Of an empty range etcd compares a key created at revision 0.
        key = self._key(compare.prefix)
        return [EtcdCompare(key, Target.CREATED, compare.since + 1, less=True, end=prefix_end(key))]

    def _request(self, operation: Operation) -> Request:
        if isinstance(operation, Put):
            return EtcdPut(self._key(operation.key), operation.value, operation.lease)
        if isinstance(operation, Get):
            return RangeRequest(self._key(operation.key))
        if isinstance(operation, Delete):
            return EtcdDelete(self._key(operation.key))
        if isinstance(operation, DeletePrefix):
            key = self._key(operation.prefix)
            return EtcdDelete(key, prefix_end(key))
        return self._list(operation)

    def _list(self, wanted: List) -> RangeRequest:
        key = self._key(wanted.prefix)
        below = wanted.created_below
        return RangeRequest(
            max(key, self._key(wanted.after) + b"\0") if wanted.after else key,
            prefix_end(key),
            limit=wanted.limit,
            sort=Sort.CREATED if wanted.order is Order.OLDEST or wanted.order is Order.NEWEST else Sort.KEY,
            descending=wanted.order is Order.NEWEST,
            created_max=max(below - 1, 0),
            created_min=NEVER if below == 1 else 0,  # etcd takes "at most 0" for "any".
        )

    def _key(self, key: str) -> bytes:
        return (self.prefix + key).encode()


async def own_address(endpoint: Endpoint, member: tuple[str, int]) -> str:
    """The address at which others reach this process: the one from which we reach etcd. Nothing is sent to find out."""
    host, port = member
    own = ""
    with suppress(DialFailed, OSError):
        family, where = (await Resolver().resolve(host, port, 1.0))[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            own = plain(probe.getsockname()[0])
    if can_be_told(own) or endpoint.is_loopback:
        return own
    return outward_address()
