"""The members of an etcd cluster, and the choice of the one that requests go to.

There is one gRPC channel per member, and this module chooses among them. gRPC's own choice stays with a frozen member,
because its connection looks healthy, and etcd forbids pings often enough to notice. So a member that is in use and
silent for PROBE_AFTER_S gets a cheap read from its memory. If it does not answer within PROBE_TIMEOUT_S, everything
moves to another member.

Retries: reads, and requests whose caller allows it, are repeated on any member until their timeout. A write is repeated
only if etcd certainly never saw it. Otherwise its caller gets an error that says that the outcome is unknown.

A member forwards writes to etcd's leader. If the leader dies, such a write is lost, and the member reports that only
after seven seconds (measured: 6.0 s with an election timeout of 0.5 s). A rendezvous leader that waits that long for
its seal cannot renew its lease and was evicted. But every reply names the leader's term: once a later term is seen,
requests from an earlier one are given up after LEADER_CHANGE_S. The same loss then costs 1.4 s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ....errors import SettingsError
from .channels import open_channel
from .credentials import Credentials
from .errors import EtcdError, Forked, LeaderChanged, TokenInvalid, Unanswered, error_of
from .messages import Header, RangeRequest, decode_header, decode_login, encode_login

PROBE_AFTER_S = 1.0  # Silence of the member in use before it is probed.
PROBE_TIMEOUT_S = 0.8
"""Time to answer a probe. Together with PROBE_AFTER_S below 2 s, which is the most that a frozen member may cost."""
LEADER_CHANGE_S = 0.5  # Time that a pending request has left once a later term of etcd's leader is seen.
BACKOFF_S = (0.02, 0.5)
"""First and longest pause after all members have failed. Jitter shortens each pause to as little as half."""
ENDING_S = 0.1  # How long a client that closes waits for the end of calls that it has cancelled. They take a millisecond.
_PROBE = RangeRequest(b"\0", limit=1, serializable=True, keys_only=True).encode()


class ClusterMember:
    """One member of the cluster, as this client sees it."""

    def __init__(self, host: str, port: int, open_channel: Callable[[str], Any]) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = (host, port)
        self.replied_at = 0.0
        self.failed_at = -1.0
        self.term = 0  # The term of etcd's leader in this member's last reply.
        self.pending: set[Any] = set()  # Calls that are cancelled when the client switches to another member.
        self.channel = open_channel(self.name)
        self._stubs: dict[str, Any] = {}

    def unary(self, method: str) -> Any:
        """Return the stub of a method with one reply."""
        if method not in self._stubs:
            self._stubs[method] = self.channel.unary_unary(method)
        return self._stubs[method]

    def cancel(self, calls: set[Any]) -> None:
        """Cancel those of the calls that are still pending. Their absence from `pending` tells `_attempt` who did it."""
        for call in calls & self.pending:
            self.pending.discard(call)
            call.cancel()


class Cluster:
    """Channels to all members, requests with retries, the login and the probes. Belongs to one event loop."""

    def __init__(self, hosts: Sequence[tuple[str, int]], credentials: Credentials, timeout_s: float = 10.0) -> None:
        _fork_guard.register(self)
        self.credentials = credentials
        self.timeout_s = timeout_s
        self.forked = False
        self.closed = False
        self.loop = asyncio.get_running_loop()
        files = credentials.files()
        opener: Callable[[str], Any] = partial(open_channel, files=files)
        if _fork_guard.forked:
            from .relay import Relay, RelayChannel  # noqa: PLC0415  Seldom needed.

            opener = partial(RelayChannel, Relay(files))
        self.members = [ClusterMember(host, port, opener) for host, port in hosts]
        # Random, so that clients that start together do not all begin with the member that is named first.
        self.current = random.choice(self.members)  # noqa: S311
        self.current.replied_at = self.loop.time()
        self.on_header: list[Callable[[Header], None]] = []  # Called with the header of every reply.
        self.on_switch: set[Callable[[], None]] = set()  # Called when another member becomes the current one.
        self.token = ""
        self._auth_is_off = False
        self._was_logged_in = False
        self._login: asyncio.Task[None] | None = None
        self._users = 0
        self._prober: asyncio.Task[None] | None = None

    # ---- requests

    async def call(
        self, method: str, request: bytes, *, retry: bool, timeout_s: float | None = None, anonymous: bool = False
    ) -> bytes:
        """Send a request to the member in use, or to others, and return the reply. Raises Unanswered, RequestRefused."""
        deadline = self.loop.time() + (self.timeout_s if timeout_s is None else timeout_s)
        attempts = 0
        self.start_use()
        try:
            while True:
                if self.credentials.user and not anonymous:
                    await self.log_in(deadline)
                member, token = self.current, self.token
                try:
                    return await self._attempt(member, method, request, deadline, anonymous)
                except TokenInvalid:
                    if anonymous or attempts > 2 or not self.credentials.user:
                        raise
                    self.forget_token(token)
                except Unanswered as fault:
                    if isinstance(fault, Forked) or self.closed:
                        raise
                    if not isinstance(fault, LeaderChanged):
                        self.mark_failed(member)
                    if self.loop.time() >= deadline or not (retry or fault.applied is False):
                        raise
                attempts += 1
                if attempts % len(self.members) == 0:
                    await self.back_off(attempts // len(self.members))
        finally:
            self.end_use()

    async def _attempt(self, member: ClusterMember, method: str, request: bytes, deadline: float, anonymous: bool) -> bytes:
        self.check_usable()
        left_s = max(deadline - self.loop.time(), 0.001)
        call = member.unary(method)(request, timeout=left_s, metadata=None if anonymous else self.metadata())
        member.pending.add(call)
        try:
            reply: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error.code(), error.details() or "") from None
        except asyncio.CancelledError:
            # Either the caller's task is cancelled, or this client cancelled the call: to close, after a change of
            # etcd's leader, or because it switched to another member.
            if self.closed and not _is_cancelled():
                raise Unanswered("the client is closed") from None
            if call in member.pending or _is_cancelled():
                call.cancel()
                raise
            if member is self.current:
                raise LeaderChanged("etcd's leader has changed, and no answer came from the former one") from None
            raise Unanswered(f"{member.name} does not answer any more") from None
        finally:
            member.pending.discard(call)
        self.note_reply(member, decode_header(reply))
        return reply

    def metadata(self, **more: str) -> list[tuple[str, str]] | None:
        """Return the metadata of a request. None instead of [], because gRPC handles it faster."""
        if self.token:
            more["token"] = self.token
        return list(more.items()) or None

    def note_reply(self, member: ClusterMember, header: Header) -> None:
        """Record that the member is alive, and act on a new leader of etcd."""
        member.replied_at = self.loop.time()
        if header.term > member.term:
            if member.term and member.pending:
                self.loop.call_later(LEADER_CHANGE_S, member.cancel, set(member.pending))
            member.term = header.term
        if header.cluster:
            for listener in self.on_header:
                listener(header)

    def check_usable(self) -> None:
        """Raise Unanswered if the client is closed or belongs to the parent of this process."""
        if self.forked:
            raise Forked
        if self.closed:
            raise Unanswered("the client is closed", applied=False)

    # ---- login

    async def log_in(self, deadline: float | None = None) -> None:
        """Get a token if one is needed. Concurrent callers share one request."""
        if self.token or self._auth_is_off or not self.credentials.user:
            return
        if deadline is None:
            deadline = self.loop.time() + self.timeout_s
        if self._login is None:
            self._login = self.loop.create_task(self._get_token(deadline), name="rdzv logs in to etcd")
            self._login.add_done_callback(self._login_done)
        await asyncio.shield(self._login)

    def _login_done(self, task: asyncio.Task[None]) -> None:
        self._login = None
        if not task.cancelled():
            task.exception()  # Mark it as retrieved: the callers that still wait have it.

    async def _get_token(self, deadline: float) -> None:
        try:
            login = self.credentials.login()
        except SettingsError as error:
            if not self._was_logged_in:
                raise
            # Final for a newcomer, but an outage for a member that is in: the file may be being replaced right now.
            raise Unanswered(error.problem, applied=False) from None
        assert login is not None, "log_in has checked that there is a user"
        left_s = max(deadline - self.loop.time(), 0.001)
        try:
            reply = await self.call(
                "/etcdserverpb.Auth/Authenticate", encode_login(*login), retry=True, timeout_s=left_s, anonymous=True
            )
        except EtcdError as error:
            if "authentication is not enabled" not in error.problem:
                raise
            self._auth_is_off = True
        else:
            self.token = decode_login(reply)
            self._was_logged_in = True

    def forget_token(self, token: str) -> None:
        """Drop a token that was refused, unless there is a newer one. The next request gets another."""
        if self.token == token:
            self.token = ""

    # ---- choice of the member

    def mark_failed(self, member: ClusterMember) -> None:
        """Switch from a member that does not answer to another, and cancel the calls that are pending there."""
        member.failed_at = self.loop.time()
        if member is not self.current or len(self.members) == 1:
            return
        others = [one for one in self.members if one is not member]
        oldest = min(one.failed_at for one in others)
        self.current = random.choice([one for one in others if one.failed_at == oldest])  # noqa: S311
        self.current.replied_at = self.loop.time()
        member.cancel(set(member.pending))
        for listener in tuple(self.on_switch):
            listener()

    async def back_off(self, rounds: int) -> None:
        """Pause after all members have failed `rounds` times in a row."""
        first_s, longest_s = BACKOFF_S
        pause_s = min(first_s * 2 ** min(rounds, 10), longest_s)
        await asyncio.sleep(pause_s * (1 - random.random() / 2))  # noqa: S311

    def start_use(self) -> None:
        """Probe the current member when it falls silent, until `end_use` is called as often."""
        self._users += 1
        if self._prober is None and len(self.members) > 1 and not self.closed:
            self.current.replied_at = self.loop.time()
            self._prober = self.loop.create_task(self._probe_silence(), name="rdzv probes etcd")

    def end_use(self) -> None:
        self._users -= 1

    async def _probe_silence(self) -> None:
        try:
            while self._users:
                due_at = self.current.replied_at + PROBE_AFTER_S
                now = self.loop.time()
                if now < due_at:
                    await asyncio.sleep(due_at - now)
                    if self.loop.time() - due_at > PROBE_AFTER_S:
                        # This process was paused, not the member: its replies may wait to be read.
                        self.current.replied_at = self.loop.time()
                else:
                    await self._probe(self.current)
        finally:
            self._prober = None

    async def _probe(self, member: ClusterMember) -> None:
        call = member.unary("/etcdserverpb.KV/Range")(_PROBE, timeout=PROBE_TIMEOUT_S, metadata=self.metadata())
        header = Header()
        try:
            header = decode_header(await call)
        except grpc.aio.AioRpcError as error:
            if isinstance(error_of(error.code(), error.details() or ""), Unanswered):
                self.mark_failed(member)
                return
        finally:
            call.cancel()
        self.note_reply(member, header)  # A refusal is a sign of life, too.

    async def close(self) -> None:
        """Close the channels. Does nothing in a forked child, where they belong to the parent."""
        if self.closed or self.forked:
            return
        self.closed = True
        _fork_guard.clusters.discard(self)
        if self._prober is not None:
            self._prober.cancel()
        if self._login is not None:
            self._login.cancel()
        for member in self.members:
            await member.channel.close()
        # gRPC has one poller for all event loops. If this loop were closed before the poller has told it how the calls ended,
        # the poller would raise in another loop.
        ending = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "").startswith("_AioCall.")]
        if ending:
            await asyncio.wait(ending, timeout=ENDING_S)


class _PollerFilter(logging.Filter):
    """Drops what asyncio logs when gRPC's poller has news for an event loop that its owner closed too early."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        return not (is_late and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_PollerFilter())


def _is_cancelled() -> bool:
    """Whether the calling task is being cancelled, and not only its gRPC call."""
    task = asyncio.current_task()
    return sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0


# ---- fork


class _ForkGuard:
    """Keeps a forked child from gRPC, whose threads a fork does not copy: in five of five trials it hung or crashed.

    Clients of the parent fail in the child. Those that the child makes use a helper process (`relay`).
    """

    def __init__(self) -> None:
        self.used = False
        self.forked = False  # The parent had used gRPC before the fork.
        self.clusters: set[Cluster] = set()
        self.inherited: list[Cluster] = []
        """Clusters of the parent, never freed: freeing a channel would write to the parent's connection."""

    def register(self, cluster: Cluster) -> None:
        """Add a cluster of this process."""
        self.used = True
        self.clusters.add(cluster)

    def after_fork(self) -> None:
        """Disable, in the child, all clusters of the parent."""
        self.forked = self.forked or self.used
        for cluster in self.clusters:
            cluster.forked = True
        self.inherited.extend(self.clusters)
        self.clusters.clear()


_fork_guard = _ForkGuard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork_guard.after_fork)
