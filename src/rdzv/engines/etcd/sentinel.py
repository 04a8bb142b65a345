"""The sentinel of a process: a small process beside it that revokes its leases when it dies.

etcd sees no connections, so without a sentinel a killed member is noticed when its lease ends. The sentinel waits on a pidfd of
the process, which becomes readable when the process is dead and at no other time: not when it is stopped, and not when etcd is
away. That is proof, so the lease is revoked at once. It takes no part in anything else. If it cannot be started, or dies
together with the process, the lease decides as before.

All members of a process share one sentinel. It starts soon after the first lease and ends with the last. Its program is
`sentinel_process`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...system.fork import let_go_in_children, never_free_in_children
from ...system.processes import reap, start
from .client.client import Client
from .client.credentials import Credentials
from .client.errors import Denied, EtcdError, LeaseNotFound, WrongLogin
from .sentinel_process import ATTEMPT_S, PAUSE_S

START_AFTER_S = 0.1
"""Pause before a sentinel is started. Its start takes 10 ms of CPU time, and a join must not wait for that (8 ms of 27 ms)."""
STARTS_MAX = 3
"""Sentinels in a row that may end before their time. Then the next would not last either."""
PIPE_SIZE = 64 * 1024
"""Bytes that a pipe holds unless it is enlarged. Linux lets any user enlarge it to 1 MiB."""
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals to a whole job must not end a sentinel. It inherits the mask of the thread that starts it, so they never do."""
_CONSEQUENCE = "if this process is killed, the others notice it when its lease ends"
_PROGRAM = Path(__file__).with_name("sentinel_process.py")
_ROOT = str(Path(__file__).parents[3])

logger = logging.getLogger("rdzv.etcd")


class ClusterAccess(msgspec.Struct, frozen=True):
    """Where leases are and how to revoke them. It goes to the sentinel by a pipe, so that no other process sees secrets."""

    hosts: tuple[tuple[str, int], ...]
    credentials: Credentials


_decode = msgspec.msgpack.Decoder(ClusterAccess).decode


class Sentinel:
    """The sentinel of this process, as the process sees it. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._clusters: dict[bytes, int] = {}
        """The number of each encoded cluster."""
        self._leases: dict[int, bytes] = {}
        """The order that names each lease."""

    @property
    def pid(self) -> int:
        """The process id of the sentinel; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    def add(self, lease: int, ttl_s: int, cluster: ClusterAccess) -> None:
        """Have this lease revoked when this process dies, from START_AFTER_S on. Called from an event loop."""
        encoded = msgspec.msgpack.encode(cluster)
        with self._lock:
            is_new = encoded not in self._clusters
            number = self._clusters.setdefault(encoded, len(self._clusters))
            self._leases[lease] = b"lease %d %d %d\n" % (lease, number, ttl_s)
            if self._is_running():
                self._tell((_cluster_order(number, encoded) if is_new else b"") + self._leases[lease])
            else:
                asyncio.get_running_loop().call_later(START_AFTER_S, self.check)

    def check(self) -> None:
        """Start the sentinel if there are leases and none is running: at first, or because it was killed or failed."""
        with self._lock:
            if self._leases and not self._is_running():
                self._start()

    async def forget(self, lease: int) -> None:
        """Remove a lease, which has ended. The sentinel ends after the last one."""
        with self._lock:
            if self._leases.pop(lease, None) is None:
                return
            if self._leases:
                self._tell(b"forget %d\n" % lease)
                return
            process, self._process = self._process, None
            self._starts = 0
            self._clusters.clear()
        if process is not None:
            process.kill()  # It has nothing left to do. While it starts, it would take its time to obey.
            _close(process)
            await reap(process)

    # ---- with the lock held

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        """Start a sentinel that knows all leases. A failure is logged and does no harm: the leases decide."""
        if self._process is not None:
            _close(self._process)
            self._process = None
        if self._starts > STARTS_MAX:
            return
        self._starts += 1
        if self._starts > STARTS_MAX:
            logger.warning("%d sentinels of this process have ended: %s", STARTS_MAX, _CONSEQUENCE)
            return
        try:
            self._process = _start_process()
        except Exception as error:  # noqa: BLE001  Whatever it is, a renewal must not fail for it.
            logger.warning("no sentinel could be started (%s): %s", error, _CONSEQUENCE)
            self._starts = STARTS_MAX + 1
            return
        path = "\0".join([*(os.path.abspath(entry) for entry in sys.path), _ROOT])  # noqa: PTH100  An entry may be ''.
        clusters = [_cluster_order(number, encoded) for encoded, number in self._clusters.items()]
        self._tell(b"".join([b"path %s\n" % os.fsencode(path).hex().encode(), *clusters, *self._leases.values()]))

    def _tell(self, orders: bytes) -> None:
        """Write orders. A sentinel that does not take them is killed: this process never waits for it.

        A pipe holds 64 KiB, the orders of 2,000 members. A long `sys.path`, as Bazel makes it, needs a larger one.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None, "stdin is a pipe"
        try:
            if len(orders) > PIPE_SIZE and hasattr(fcntl, "F_SETPIPE_SZ"):  # Only then: all pipes of a user share a limit.
                fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, len(orders))
            is_taken = process.stdin.write(orders) == len(orders)
        except OSError:
            is_taken = False
        if not is_taken:
            process.kill()  # `check` starts another one.


def _start_process() -> subprocess.Popen[bytes]:
    """Start the program. Raises OSError."""
    if getattr(sys, "frozen", False):
        raise OSError("this is a frozen program, which has no Python interpreter")
    pidfd = _own_pidfd()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        process = start(
            [sys.executable or "", "-I", "-S", str(_PROGRAM), str(os.getpid()), str(pidfd)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # Else whoever reads this process's output would wait for the sentinel's end.
            pass_fds=[pidfd] if pidfd >= 0 else [],
            start_new_session=True,  # Launchers and terminals signal whole process groups.
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pidfd >= 0:
            os.close(pidfd)
    assert process.stdin is not None, "stdin is a pipe"
    os.set_blocking(process.stdin.fileno(), False)
    let_go_in_children(process.stdin)
    never_free_in_children(process)
    return process


def _own_pidfd() -> int:
    """Return a pidfd of this process; -1 where there is none (before Linux 5.3, elsewhere, or forbidden in a container)."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "stdin is a pipe"
    process.stdin.close()


def _cluster_order(number: int, encoded: bytes) -> bytes:
    cluster = _decode(encoded)
    order = b"cluster %d %s\n" % (number, encoded.hex().encode())
    if not cluster.credentials.tls and not cluster.credentials.user:
        names = "\0".join(f"{host}\0{port}" for host, port in cluster.hosts)
        order += b"plain %d %s\n" % (number, names.encode().hex().encode())
    return order


# ---- this process's own

_sentinels = [Sentinel()]
"""The sentinels of the processes that this one was forked from, and its own, the last."""


def own() -> Sentinel:
    """Return the sentinel of this process."""
    return _sentinels[-1]


if hasattr(os, "register_at_fork"):
    # A forked child leaves the sentinel to its parent. One that joins a run gets its own.
    os.register_at_fork(after_in_child=lambda: _sentinels.append(Sentinel()))


# ---- in the sentinel, after the death


async def revoke_all(leases: Mapping[bytes, Sequence[int]], limit_s: float) -> None:
    """Revoke the leases of each encoded cluster, for at most that long."""
    work = [_revoke(_decode(cluster), ids) for cluster, ids in leases.items()]
    await asyncio.wait([asyncio.create_task(one) for one in work], timeout=limit_s)


async def _revoke(cluster: ClusterAccess, leases: Sequence[int]) -> None:
    """Revoke by all of etcd's members at once: a dead or frozen one then costs no time, and a second request does no harm."""
    asked = [asyncio.create_task(_revoke_by(host, cluster.credentials, leases)) for host in cluster.hosts]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)


async def _revoke_by(host: tuple[str, int], credentials: Credentials, leases: Sequence[int]) -> None:
    client = Client([host], credentials, ATTEMPT_S)

    async def revoke(lease: int) -> None:
        while True:
            try:
                return await client.revoke(lease)
            except (LeaseNotFound, Denied, WrongLogin):
                return None  # It is gone, or asking again will not help.
            except EtcdError:
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(revoke, leases))
