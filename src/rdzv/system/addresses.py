"""Addresses of this node: listening on them, and which of them others can use.

A *place* is where two servers cannot be at the same time: this boot of this node, this network namespace, this address and
port. A server that could bind it knows that its predecessor there is dead. That is why SO_REUSEPORT is never set, and why
forked children let go of the socket.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

BACKLOG = 4096
"""Thousands of members may connect at the same moment. A connection that does not fit waits a second for its next attempt."""
LOOPBACK = ("127.0.0.1", "::1")
_LITERALS = {LOOPBACK[0]: socket.AF_INET, LOOPBACK[1]: socket.AF_INET6, "0.0.0.0": socket.AF_INET}  # noqa: S104
"""Addresses that need no look-up. Each member binds one of them in each round."""
_SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface. It fails elsewhere.
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at a name, an address or '' (all interfaces). Port 0: any. Raises OSError."""
    opened: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in _to_bind(host):
        port = opened[0].getsockname()[1] if opened else port
        try:
            opened.append(_listen(family, address, port))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                for one in opened:
                    one.close()
                raise
            problem = error  # A name may have addresses of a family that this node does not have.
            continue
        if not host:
            break
    if not opened:
        raise problem or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    return opened


def _to_bind(host: str) -> list[tuple[int, str]]:
    if not host:
        # The first takes both families; the second is for nodes without IPv6.
        return [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]  # noqa: S104
    if host == "localhost":
        return [(socket.AF_INET, LOOPBACK[0]), (socket.AF_INET6, LOOPBACK[1])]
    if host in _LITERALS:
        return [(_LITERALS[host], host)]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # A part of the name is empty or too long.
        raise OSError(str(error)) from None
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _listen(family: int, address: str, port: int) -> socket.socket:
    # With its protocol named, asyncio sends small frames at once; without, each could wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A restart then need not wait for the last connections of the former life. It does not allow two servers at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_here(family: int, address: str) -> bool:
    """Whether the address is this node's: then it can be bound."""
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.bind((address, 0))
        return True
    return False


def place_of(listeners: Sequence[socket.socket], host: str) -> str:
    """Return a text of all that makes the place unique."""
    names = "*" if not host else ",".join(sorted(plain(one.getsockname()[0]) for one in listeners))
    boot, namespace = f"{sys.platform}-{socket.gethostname()}", "-"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/net").stat().st_ino)
    return f"{boot}/{namespace}/{names}:{listeners[0].getsockname()[1]}"


@lru_cache(maxsize=1024)  # Reading an address is slow, and there are few: thousands may connect from one.
def plain(address: str) -> str:
    """Return the address without scope, and IPv4 as IPv4 even where both families share a socket."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def is_loopback(address: str) -> bool:
    """Whether only this node reaches the address."""
    return ipaddress.ip_address(plain(address)).is_loopback


@lru_cache(maxsize=1024)
def can_be_told(address: str) -> bool:
    """Whether others can use the address: link-local and loopback addresses mean something else on every host."""
    try:
        ip = ipaddress.ip_address(plain(address))
    except ValueError:
        return False
    return not (ip.is_link_local or ip.is_loopback or ip.is_unspecified or ip.is_multicast)


def source_of(family: int, where: tuple[Any, ...]) -> str:
    """Return the local address of connections to that address, or "" if there is no route. Sends nothing."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where if where[1] else (where[0], 9, *where[2:]))
        return plain(probe.getsockname()[0])
    return ""


def outward_address() -> str:
    """Return the address of this node that others would likely see; empty: none. Nothing is sent to find out."""
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        own = source_of(family, (outside, 9))
        if can_be_told(own):
            return own
    # No way to the outside: a cluster with a network of its own.
    return next((address for address, _ in interfaces() if can_be_told(address)), "")


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield the addresses of this node, as far as the system tells, and the interface of each."""
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        import fcntl  # noqa: PLC0415  Not everywhere.

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # It has no address.
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24]), name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            yield str(ipaddress.IPv6Address(bytes.fromhex(number))), name
