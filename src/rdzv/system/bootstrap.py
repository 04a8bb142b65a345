"""The socket where rank 0 will serve, bound before ranks are assigned.

A member binds a new socket for every round it wants to be in and puts the address in its record. The seal copies rank
0's address into the head. So all members agree on the address, its port is really held, and it is not the one of the
round before.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import weakref
from functools import lru_cache

from ..errors import SettingsError
from .addresses import LOOPBACK, listen

_open: weakref.WeakSet[Bootstrap] = weakref.WeakSet()


class Bootstrap:
    """The agreed address. The member that bound it also holds the listening socket, until it is taken or released."""

    def __init__(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        self.host = host
        self.port = port
        self._listener = listener
        if listener is not None:
            _open.add(self)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        held = ", held here" if self._listener is not None else ""
        return f"<Bootstrap {self}{held}>"

    @property
    def held(self) -> bool:
        """Whether this process holds the listening socket, not taken and not released."""
        return self._listener is not None

    def take_socket(self) -> socket.socket:
        """Hand over the listening socket; the caller closes it."""
        if self._listener is None:
            problem = f"bootstrap address {self}: its socket is not held here (not rank 0, or taken or released before)"
            raise SettingsError(problem)
        listener, self._listener = self._listener, None
        return listener

    def release(self) -> None:
        """Close the socket, so that the program that serves there can bind the port. Harmless if it is not held."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def parse(address: str) -> Bootstrap:
    """Read the address of a head."""
    host, _, port = address.rpartition(":")
    return Bootstrap(host.strip("[]"), int(port))


def candidates(ports: tuple[int, int], former: int) -> list[int]:
    """Return the ports of a range in the order to try them: those above the former one, those below it, itself last."""
    low, high = ports
    if (low, high) == (0, 0):
        return [0, 0]
    start = former + 1 if low <= former <= high else low
    return [*range(start, high + 1), *range(low, start)]


def bind(host: str, ports: tuple[int, int], former: int = 0) -> Bootstrap:
    """Bind a socket on all interfaces and announce it as `host`, which may resolve to loopback on this node.

    The round before used port `former`. A worker that is late in that round must not meet one of the next there, so it
    is bound only if no other port of the range is free.
    """
    low, high = ports
    problem: OSError | None = None
    refused: socket.socket | None = None
    try:
        for port in candidates(ports, former):
            try:
                listener = _listen(host, port)
            except OSError as error:
                problem = error
                continue
            chosen = listener.getsockname()[1]
            if port or chosen != former:
                return Bootstrap(host, chosen, listener)
            refused = listener  # Bound until another one is found, or the system might choose it again.
    finally:
        if refused is not None:
            refused.close()
    raise SettingsError(
        f"bootstrap_port {low}..{high}: no port could be bound on this host ({problem}); give a free port or a wider range"
    )


def _listen(host: str, port: int) -> socket.socket:
    """Listen already, so that a peer that is quicker than the server is queued and not refused."""
    (listener,) = listen(_interfaces_of(host), port)
    return listener


@lru_cache(maxsize=1024)  # Reading an address is slow, and it is the same in every round.
def _interfaces_of(host: str) -> str:
    """Return where to listen for those who are told this host."""
    if host == "localhost":
        return LOOPBACK[0]  # Only one socket can be handed over.
    if host in LOOPBACK:
        return host
    try:
        is_ipv4 = ipaddress.ip_address(host).version == 4
    except ValueError:
        is_ipv4 = False
    # Others may have addresses of either family for a name, so both are served where the node has both.
    return "0.0.0.0" if is_ipv4 else ""  # noqa: S104


def _forget_in_child() -> None:
    # A forked worker that outlives its agent must not keep the port occupied.
    for bootstrap in list(_open):
        bootstrap.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
