"""Waits for the death of its parent, then revokes the parent's leases.

This is a script that uses only the standard library until the parent is dead. Importing gRPC at the start would take 34 MB
instead of 9 MB on every node, and 0.15 s of CPU time during the join; after the death it delays the revocation by that time. So
an etcd without TLS and users is asked without gRPC (`bare_revoke`).

    python -I -S sentinel_process.py PARENT PIDFD

PIDFD is an inherited descriptor that becomes readable when the parent is dead; -1 if the kernel has none. The parent writes
orders to standard input, one per line, with texts in hexadecimal:

    path TEXT             the parent's module search path
    cluster NUMBER TEXT   where leases are and how to revoke them (`sentinel.ClusterAccess`)
    plain NUMBER TEXT     the members of that cluster, which has neither TLS nor users
    lease LEASE NUMBER S  revoke this lease of that cluster; it was granted for S seconds
    forget LEASE          the lease has ended

The parent kills this process when its last lease has ended.

The end of standard input is no proof of death: a program that the parent becomes by `exec` has closed it, too, and a child that
the parent forked may keep it open.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

POLL_S = 0.2
"""Interval to look for the parent where the kernel has no pidfd to wait on."""
ORPHAN_POLLS = 100
"""How often the sentinel looks, every 10 ms, whether it has lost its parent, once the pidfd says so."""
OUTAGE_S = 20.0
"""Time added to that of the leases, for an etcd without quorum: it ends no lease, and renews all when it is back."""
ATTEMPT_S = 1.0
"""Time for one attempt to revoke: etcd's members forget a request that was on its way to a leader that died."""
PAUSE_S = 0.2
"""Pause after an attempt that failed."""
NAME = "rdzv-sentinel"
"""The name in lists of processes. Linux takes 15 characters."""
READ_MAX = 65536
STDIN = 0


class Orders:
    """The state that the parent's orders describe."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self.clusters: dict[bytes, bytes] = {}
        self.plain: dict[bytes, list[tuple[str, int]]] = {}
        """The members of clusters without TLS and without users."""
        self.leases: dict[int, tuple[bytes, float]] = {}
        """Each lease's cluster and time."""
        self._left = b""

    def take(self, data: bytes) -> None:
        """Obey all lines that are complete. One that is cut off by the parent's death is ignored."""
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            word, *rest = line.split(b" ")
            if word == b"path":
                self.path = os.fsdecode(bytes.fromhex(rest[0].decode())).split("\0")
            elif word == b"cluster":
                self.clusters[rest[0]] = bytes.fromhex(rest[1].decode())
            elif word == b"plain":
                names = bytes.fromhex(rest[1].decode()).decode().split("\0")
                self.plain[rest[0]] = [(host, int(port)) for host, port in zip(names[::2], names[1::2], strict=True)]
            elif word == b"lease":
                self.leases[int(rest[0])] = rest[1], float(rest[2])
            elif word == b"forget":
                self.leases.pop(int(rest[0]), None)

    @property
    def limit_s(self) -> float:
        """The time after the parent's last sign of life in which its leases can still be there."""
        return max((ttl_s for _, ttl_s in self.leases.values()), default=0.0) + OUTAGE_S

    def by_cluster(self) -> dict[bytes, list[int]]:
        """Return the leases of each cluster."""
        found: dict[bytes, list[int]] = {}
        for lease, (number, _) in self.leases.items():
            found.setdefault(self.clusters[number], []).append(lease)
        return found


def wait_for_death(parent: int, pidfd: int, orders: Orders) -> bool:
    """Obey orders until the parent is dead (True), or until its leases must have ended without its death (False)."""
    sources = select.poll()
    sources.register(STDIN, select.POLLIN)
    if pidfd >= 0:
        sources.register(pidfd, select.POLLIN)
    polls, give_up_at = pidfd < 0, float("inf")
    while True:
        ready = dict(sources.poll(POLL_S * 1000 if polls else None))
        if STDIN in ready:
            data = os.read(STDIN, READ_MAX)
            was_idle = not orders.leases
            orders.take(data)
            if was_idle and orders.leases:
                show_name()
            if not data:
                # Either the parent is dying, and its pidfd will say so, or it is another program now and renews nothing.
                sources.unregister(STDIN)
                polls, give_up_at = True, time.monotonic() + orders.limit_s
        if ready.get(pidfd, 0) & select.POLLIN or (pidfd < 0 and os.getppid() != parent):
            read_rest(orders)
            return is_orphan(parent)
        if pidfd in ready:
            return False  # An error. Where a pidfd is of no use, the lease decides.
        if time.monotonic() >= give_up_at:
            return False


def is_orphan(parent: int) -> bool:
    """Whether this process has lost its parent. A kernel that reports a death while the parent is there is not believed."""
    for _ in range(ORPHAN_POLLS):
        if os.getppid() != parent:
            return True
        time.sleep(0.01)
    return False


def read_rest(orders: Orders) -> None:
    """Obey what the parent had written before its death. A child of its may keep the pipe open, so do not wait."""
    os.set_blocking(STDIN, False)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(STDIN, READ_MAX):
            orders.take(data)


def revoke_barely(orders: Orders, limit_s: float) -> bool:
    """Revoke without gRPC where that can be done: for one cluster with neither TLS nor users. Return whether it was done."""
    numbers = {number for number, _ in orders.leases.values()}
    if len(numbers) != 1 or not numbers <= orders.plain.keys():
        return False
    from rdzv.engines.etcd.bare_revoke import revoke  # noqa: PLC0415

    return revoke(orders.plain[numbers.pop()], list(orders.leases), ATTEMPT_S, PAUSE_S, limit_s)


def show_name() -> None:
    """Let `ps` and `top` show what this process is, from the moment at which it guards a lease."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123  pathlib is not loaded here.
        file.write(NAME)


def main(arguments: list[str]) -> None:
    """Run the program."""
    parent, pidfd = int(arguments[0]), int(arguments[1])
    if pidfd < 0 and os.getppid() != parent:
        return  # Its parent is dead or in another namespace of processes. Without a pidfd, that cannot be distinguished.
    orders = Orders()
    if wait_for_death(parent, pidfd, orders) and orders.leases:
        sys.path[:] = orders.path
        died_at = time.monotonic()
        if revoke_barely(orders, orders.limit_s):
            return
        import asyncio  # noqa: PLC0415

        from rdzv.engines.etcd.sentinel import revoke_all  # noqa: PLC0415

        asyncio.run(revoke_all(orders.by_cluster(), max(1.0, died_at + orders.limit_s - time.monotonic())))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        os._exit(0)  # Nothing is left to do, and closing gRPC takes time. No traceback: nobody reads it.
