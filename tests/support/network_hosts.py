"""Network namespaces as hosts: each with a name, a hosts file and addresses of its own, on a network that can be cut.

    with Network() as network:
        a, b = network.host("a"), network.host("b")
        a.run("python", ...)

Everything is made with `ip netns`, which needs root. A link is cut at the switch, so that the host does not notice: the carrier
stays up, but packets do not arrive.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PREFIX = "rdzv-test"
ETC = Path("/etc/netns")
"""`ip netns exec` shows the folder with a namespace's name as /etc."""
V4, V6 = "10.99.0", "fd99::"
ENTER = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Return why no namespaces can be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need the commands ip and unshare"
    try:
        with Network() as network:
            network.host("a")
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


class Host:
    """One namespace."""

    def __init__(self, network: Network, name: str, number: int, *, ipv4: bool, ipv6: bool) -> None:
        self.name = name
        self.number = number
        self.space = f"{network.prefix}-{name}"
        self.v4 = f"{V4}.{number}" if ipv4 else ""
        self.v6 = f"{V6}{number:x}" if ipv6 else ""
        self._network = network
        self._port = f"p{number}"
        ip("netns", "add", self.space)
        etc = ETC / self.space
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "nsswitch.conf").write_text("hosts: files\n")
        self.hosts({})
        ip("-n", self.space, "link", "set", "lo", "up")
        self.plug("eth0", self._port, self.v4 and f"{self.v4}/24", self.v6 and f"{self.v6}/64")

    @property
    def address(self) -> str:
        return self.v4 or self.v6

    @property
    def on(self) -> tuple[str, ...]:
        """The prefix of a command that runs here. It becomes that command, so the process id is the command's."""
        return ("ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", ENTER, self.name)

    def hosts(self, names: dict[str, str]) -> None:
        """Replace the host's hosts file: address by name."""
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in names.items())]
        # Written in place, because running processes see this very file.
        (ETC / self.space / "hosts").write_text("\n".join(lines) + "\n")

    def plug(self, device: str, port: str, *addresses: str, bridge: str = "br0") -> None:
        """Connect this host to a bridge."""
        switch = self._network.switch
        ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", self.space)
        ip("-n", switch, "link", "set", port, "master", bridge, "up")
        if not any(":" in address for address in addresses):
            ip("netns", "exec", self.space, "sysctl", "-qw", f"net.ipv6.conf.{device}.disable_ipv6=1")
        for address in filter(None, addresses):
            ip("-n", self.space, "addr", "add", address, "dev", device, *(("nodad",) if ":" in address else ()))
        ip("-n", self.space, "link", "set", device, "up")

    def cut(self) -> None:
        """Drop all packets from and to this host."""
        ip("-n", self._network.switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        ip("-n", self._network.switch, "link", "set", self._port, "master", "br0")

    def do(self, work: Callable[[], T]) -> T:
        """Call a function in a thread that runs in this host's namespace."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: (self._enter(), work())[1]).result()

    def _enter(self) -> None:
        """Move the current thread into the namespace."""
        with Path(f"/run/netns/{self.space}").open() as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def reaches(self, address: str, timeout_s: float = 10.0) -> bool:
        """Whether this host can connect to HOST:PORT."""
        host, _, port = address.rpartition(":")
        program = f"import socket; socket.create_connection(({host.strip('[]')!r}, {port}), {timeout_s}).close()"
        command = [*self.on, "python3", "-c", program]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


class Network:
    """A switch, in a namespace of its own, and the hosts that are plugged into it."""

    def __init__(self) -> None:
        self.prefix = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{self.prefix}-switch"
        self.all: dict[str, Host] = {}

    def __enter__(self) -> Network:  # noqa: PYI034  Self came with 3.11.
        clear_leftovers()
        try:
            ip("netns", "add", self.switch)
            self.bridge("br0")
        except OSError:
            self.clear()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def bridge(self, name: str) -> None:
        """Add another network."""
        ip("-n", self.switch, "link", "add", name, "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        ip("-n", self.switch, "link", "set", name, "up")

    def host(self, name: str, *, ipv4: bool = True, ipv6: bool = False) -> Host:
        """Add a host. All hosts know each other by name."""
        host = self.all[name] = Host(self, name, len(self.all) + 1, ipv4=ipv4, ipv6=ipv6)
        names = {other.name: other.address for other in self.all.values()}
        for other in self.all.values():
            other.hosts(names)
        return host

    def clear(self) -> None:
        for space in (self.switch, *(host.space for host in self.all.values())):
            remove(space)


def remove(space: str) -> None:
    with contextlib.suppress(OSError):
        ip("netns", "del", space)
    shutil.rmtree(ETC / space, ignore_errors=True)


def clear_leftovers() -> None:
    """Remove the namespaces of test processes that were killed."""
    for line in ip("netns", "list").splitlines():
        space = line.split()[0]
        if space.startswith(f"{PREFIX}-"):
            pid = space.removeprefix(f"{PREFIX}-").partition("-")[0]
            if not Path(f"/proc/{pid}").exists():
                remove(space)
