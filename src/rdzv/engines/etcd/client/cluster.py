"""The members of an etcd cluster, and the one of them that we talk to.

One channel per member, and the choice is ours. gRPC's own choice stays with a member that was stopped and not killed, since its
connection looks well, and etcd allows no ping often enough to find out. So whoever is silent for PULSE_S while it is in use
gets a question that costs it nothing, and if it does not answer, everything moves to another member at once.

What is repeated: reads, and requests that say so themselves, on whatever member answers until their time is up. A write is
repeated only if it was surely never looked at; else its caller hears that the outcome is unknown.

A member hands writes on to the leader. If that dies, they are lost with it, and the member says so after seven seconds only.
But every answer names the leader's term: what was asked in an earlier one is given up soon after a later one is seen.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio

from .credentials import Credentials
from .errors import EtcdError, Forked, LeaderChanged, TokenInvalid, Unanswered, error_of
from .messages import Header, RangeRequest, decode_header, decode_login, encode_login

PULSE_S = 1.0
"""How long a member in use may be silent before it is asked for a sign of life."""
PULSE_TIMEOUT_S = 0.8
"""How long it has for that. Together they are below 2 s: a frozen member costs no more."""
TERM_S = 0.5
"""How long a request may still be answered after etcd's leader has changed."""
BACKOFF_S = (0.02, 0.5)
"""First and longest pause once all members have failed; each is jittered down to its half."""
ANSWER_MAX = 256 * 1024 * 1024
"""Bytes. A list of ten thousand members has 5 MB; what is larger than this is none of our data."""
CONNECT_MS = 1000
"""For one attempt to connect to one address; the others are tried by us."""
KEEPALIVE_MS = 10_000
"""etcd takes pings more often than every 5 s for an attack, and all without a call under way."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", ANSWER_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A cluster's control plane is reached directly; a proxy for downloads would not let it through.
    ("grpc.enable_http_proxy", 0),
]
_PULSE = RangeRequest(b"\0", limit=1, serializable=True, keys_only=True).encode()

Metadata: TypeAlias = "list[tuple[str, str]]"


class ClusterMember:
    """One member of the cluster, as seen from here."""

    def __init__(self, host: str, port: int, credentials: grpc.ChannelCredentials | None) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = (host, port)
        self.heard_at = 0.0
        self.failed_at = -1.0
        self.term = 0
        """Of etcd's leader, as this member last said."""
        self.under_way: set[Any] = set()
        """Calls that end when we move to another member."""
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(self.name, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(self.name, credentials, options=_OPTIONS)
        self._stubs: dict[str, Any] = {}

    def unary(self, method: str) -> Any:
        """The stub of a call with one answer."""
        if method not in self._stubs:
            self._stubs[method] = self.channel.unary_unary(method)
        return self._stubs[method]


class Cluster:
    """See the module's docstring. Belongs to one event loop."""

    def __init__(self, hosts: Sequence[tuple[str, int]], access: Credentials, timeout_s: float = 10.0) -> None:
        _process.start_using(self)
        self.access = access
        self.timeout_s = timeout_s
        self.forked = False
        self.closed = False
        self.loop = asyncio.get_running_loop()
        credentials = access.credentials()
        self.members = [ClusterMember(host, port, credentials) for host, port in hosts]
        # Those who start at once should not all begin with the member that is named first.
        self.current = random.choice(self.members)  # noqa: S311
        self.current.heard_at = self.loop.time()
        self.on_header: list[Callable[[Header], None]] = []
        self.on_switch: set[Callable[[], None]] = set()
        self.token = ""
        self._asks_nobody = False
        """etcd lets anybody in, so a name is no use."""
        self._login: asyncio.Task[None] | None = None
        self._users = 0
        self._watchman: asyncio.Task[None] | None = None

    # ---- asking

    async def ask(
        self, method: str, request: bytes, *, repeat: bool, timeout_s: float | None = None, anonymous: bool = False
    ) -> bytes:
        """One answer, from whichever member. Raises Unanswered, Refused."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = self.loop.time() + limit_s
        attempts = 0
        self._in_use(1)
        try:
            while True:
                if self.access.user and not anonymous:
                    await self.log_in(deadline)
                member, token = self.current, self.token
                try:
                    return await self._attempt(member, method, request, deadline, anonymous)
                except TokenInvalid:
                    if anonymous or attempts > 2 or not self.access.user:
                        raise
                    self.forget_token(token)
                except Unanswered as fault:
                    if isinstance(fault, Forked) or self.closed:
                        raise
                    if not isinstance(fault, LeaderChanged):
                        self.fail(member)
                    late = self.loop.time() >= deadline
                    if late or not (repeat or fault.applied is False):
                        raise
                attempts += 1
                if attempts % len(self.members) == 0:
                    await self.pause(attempts // len(self.members))
        finally:
            self._in_use(-1)

    async def _attempt(self, member: ClusterMember, method: str, request: bytes, deadline: float, anonymous: bool) -> bytes:
        self.check()
        left_s = max(deadline - self.loop.time(), 0.001)
        call = member.unary(method)(request, timeout=left_s, metadata=None if anonymous else self.metadata())
        member.under_way.add(call)
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error.code(), error.details() or "") from None
        except asyncio.CancelledError:
            if self.closed and not _is_cancelled():
                raise Unanswered("the client is closed") from None
            if call in member.under_way or _is_cancelled():
                call.cancel()
                raise
            if member is self.current:
                raise LeaderChanged("etcd's leader has changed, and no answer came from the former one") from None
            raise Unanswered(f"{member.name} does not answer any more") from None
        finally:
            member.under_way.discard(call)
        self.heard(member, decode_header(answer))
        return answer

    def metadata(self, **more: str) -> Metadata | None:
        """What goes with every request; None costs gRPC less than nothing in a list."""
        if self.token:
            more["token"] = self.token
        return list(more.items()) or None

    def heard(self, member: ClusterMember, header: Header) -> None:
        """The member gave a sign of life."""
        member.heard_at = self.loop.time()
        if header.term > member.term:
            if member.term and member.under_way:
                self.loop.call_later(TERM_S, self._give_up, member, tuple(member.under_way))
            member.term = header.term
        if header.cluster:
            for listener in self.on_header:
                listener(header)

    def _give_up(self, member: ClusterMember, calls: tuple[Any, ...]) -> None:
        for call in calls:
            if call in member.under_way:
                member.under_way.discard(call)
                call.cancel()

    def check(self) -> None:
        """It can be used. Raises Unanswered."""
        if self.forked:
            raise Forked
        if self.closed:
            raise Unanswered("the client is closed", applied=False)

    # ---- who we are

    async def log_in(self, deadline: float | None = None) -> None:
        """Get a token if we need one; all who need one at a time share it."""
        if self.token or self._asks_nobody or not self.access.user:
            return
        if deadline is None:
            deadline = self.loop.time() + self.timeout_s
        if self._login is None:
            self._login = self.loop.create_task(self._get_token(deadline), name="rdzv logs in to etcd")
            self._login.add_done_callback(self._logged_in)
        await asyncio.shield(self._login)

    def _logged_in(self, task: asyncio.Task[None]) -> None:
        self._login = None
        if not task.cancelled():
            task.exception()  # Whoever waited for it has it.

    async def _get_token(self, deadline: float) -> None:
        login = self.access.login()
        assert login is not None, "asked for by those who have one"
        left_s = max(deadline - self.loop.time(), 0.001)
        try:
            answer = await self.ask(
                "/etcdserverpb.Auth/Authenticate", encode_login(*login), repeat=True, timeout_s=left_s, anonymous=True
            )
        except EtcdError as error:
            if "authentication is not enabled" not in error.problem:
                raise
            self._asks_nobody = True
        else:
            self.token = decode_login(answer)

    def forget_token(self, token: str) -> None:
        """It was refused; unless there is a newer one already, get one at the next request."""
        if self.token == token:
            self.token = ""

    # ---- whom we talk to

    def fail(self, member: ClusterMember) -> None:
        """It did not answer: go on with another, and give up what it owes us."""
        member.failed_at = self.loop.time()
        if member is not self.current or len(self.members) == 1:
            return
        others = [one for one in self.members if one is not member]
        oldest = min(one.failed_at for one in others)
        self.current = random.choice([one for one in others if one.failed_at == oldest])  # noqa: S311
        self.current.heard_at = self.loop.time()
        owed, member.under_way = member.under_way, set()
        for call in owed:
            call.cancel()
        for listener in tuple(self.on_switch):
            listener()

    async def pause(self, rounds: int) -> None:
        """All members have failed so many times in a row."""
        first_s, longest_s = BACKOFF_S
        pause_s = min(first_s * 2 ** min(rounds, 10), longest_s)
        await asyncio.sleep(pause_s * (1 - random.random() / 2))  # noqa: S311

    def use(self) -> None:
        """A stream is open: a member that falls silent must be noticed. Undone by `unuse`."""
        self._in_use(1)

    def unuse(self) -> None:
        """See `use`."""
        self._in_use(-1)

    def _in_use(self, more: int) -> None:
        self._users += more
        if self._users and self._watchman is None and len(self.members) > 1 and not self.closed:
            self.current.heard_at = self.loop.time()
            self._watchman = self.loop.create_task(self._keep_watch(), name="rdzv takes etcd's pulse")

    async def _keep_watch(self) -> None:
        """See the module's docstring."""
        try:
            while self._users:
                due_at = self.current.heard_at + PULSE_S
                now = self.loop.time()
                if now < due_at:
                    await asyncio.sleep(due_at - now)
                    if self.loop.time() - due_at > PULSE_S:
                        self.current.heard_at = self.loop.time()  # It was us who stood still.
                else:
                    await self._take_pulse(self.current)
        finally:
            self._watchman = None

    async def _take_pulse(self, member: ClusterMember) -> None:
        call = member.unary("/etcdserverpb.KV/Range")(_PULSE, timeout=PULSE_TIMEOUT_S, metadata=self.metadata())
        header = Header()
        try:
            header = decode_header(await call)
        except grpc.aio.AioRpcError as error:
            if isinstance(error_of(error.code(), error.details() or ""), Unanswered):
                self.fail(member)
                return
        finally:
            call.cancel()
        self.heard(member, header)  # A refusal is a sign of life, too.

    async def close(self) -> None:
        """Give the channels back. In a forked child they are the parent's."""
        if self.closed or self.forked:
            return
        self.closed = True
        _process.clusters.discard(self)
        if self._watchman is not None:
            self._watchman.cancel()
        if self._login is not None:
            self._login.cancel()
        for member in self.members:
            await member.channel.close()


def _is_cancelled() -> bool:
    """Somebody cancels the task that asks, and not only the call."""
    task = asyncio.current_task()
    return sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0


# ---- fork


class _Process:
    """What a forked child must know of its parent."""

    def __init__(self) -> None:
        self.used = False
        self.forked = False
        """The parent used gRPC, whose threads did not come along: here it would hang or crash."""
        self.clusters: set[Cluster] = set()
        self.inherited: list[Cluster] = []
        """Never freed, because freeing a channel would speak on the parent's connection."""

    def start_using(self, cluster: Cluster) -> None:
        """Raises Forked."""
        if self.forked:
            raise Forked
        self.used = True
        self.clusters.add(cluster)

    def start_anew(self) -> None:
        """In the child."""
        self.forked = self.used
        for cluster in self.clusters:
            cluster.forked = True
        self.inherited.extend(self.clusters)
        self.clusters.clear()


_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.start_anew)
