"""Network namespaces as hosts on one network, whose cables can be pulled. For root."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

NET = "10.98.7"
_numbers = itertools.count()


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Lan:
    """A switch in a namespace of its own, and hosts numbered from 1; the address of host n is NET.n."""

    def __init__(self, hosts: int) -> None:
        self._prefix = f"rdzv-lan-{os.getpid()}-{next(_numbers)}"
        self._hosts = range(1, hosts + 1)
        self._switch = f"{self._prefix}-0"

    def __enter__(self) -> Lan:  # noqa: PYI034  Self came with 3.11.
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise OSError("network namespaces need root and the command ip")
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
            ip("-n", self._switch, "link", "set", "br0", "up")
            for number in self._hosts:
                self._plug(number)
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self._switch, *map(self.space, self._hosts)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    def space(self, number: int) -> str:
        """The host's namespace."""
        return f"{self._prefix}-{number}"

    def address(self, number: int) -> str:
        return f"{NET}.{number}"

    def _plug(self, number: int) -> None:
        space, port = self.space(number), f"p{number}"
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")

    def cut(self, number: int) -> None:
        """At the switch, so that the host sees no lost carrier: packets just do not arrive."""
        ip("-n", self._switch, "link", "set", f"p{number}", "nomaster")

    def heal(self, number: int) -> None:
        ip("-n", self._switch, "link", "set", f"p{number}", "master", "br0")
