"""A network of our own: its hosts are network namespaces, and so is the switch between them. The machine's is not touched."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

CLONE_NEWNET = 0x40000000


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


class Lan:
    """So many hosts, 10.<random>.0.1 and on, each with a cable that can be pulled."""

    def __init__(self, size: int) -> None:
        self._tag = f"rdzv-{secrets.token_hex(3)}"
        self._net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self.size = size

    def host(self, index: int) -> str:
        return f"{self._net}.{index + 1}"

    def name(self, index: int) -> str:
        return f"{self._tag}-{index}"

    def within(self, index: int) -> tuple[str, ...]:
        """What to put before a command that is to run on that host."""
        return "ip", "netns", "exec", self.name(index)

    def __enter__(self):
        if shutil.which("ip") is None:
            pytest.skip("NO PARTITIONS ARE TESTED: there is no `ip` command here")
        if _ip("netns", "add", self._hub).returncode:
            pytest.skip("NO PARTITIONS ARE TESTED: making network namespaces needs root")
        try:
            self._run("-n", self._hub, "link", "add", "switch", "type", "bridge")
            self._run("-n", self._hub, "link", "set", "switch", "up")
            for index in range(self.size):
                self._plug_in(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [self._hub, *(self.name(index) for index in range(self.size))]:
            _ip("netns", "del", name)

    @property
    def _hub(self) -> str:
        return f"{self._tag}-hub"

    def _plug_in(self, index: int) -> None:
        name = self.name(index)
        self._run("netns", "add", name)
        self._run("-n", self._hub, "link", "add", f"port{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
        self._run("-n", self._hub, "link", "set", f"port{index}", "master", "switch")
        self._run("-n", self._hub, "link", "set", f"port{index}", "up")
        self._run("-n", name, "address", "add", f"{self.host(index)}/24", "dev", "eth0")
        self._run("-n", name, "link", "set", "eth0", "up")
        self._run("-n", name, "link", "set", "lo", "up")

    def _run(self, *words: str) -> None:
        done = _ip(*words)
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"

    def cut(self, index: int) -> None:
        """Pull that host's cable at the switch: it reaches itself, and sees no fault of its own."""
        self._run("-n", self._hub, "link", "set", f"port{index}", "nomaster")

    def heal(self, index: int) -> None:
        self._run("-n", self._hub, "link", "set", f"port{index}", "master", "switch")

    def on(self, index: int, work: Callable[[], T]) -> T:
        """Do it on that host: in a thread of ours that lives there."""
        results: list[T] = []
        problems: list[BaseException] = []

        def inside() -> None:
            try:
                enter(self.name(index))
                results.append(work())
            except BaseException as error:  # noqa: BLE001  It is raised where it is waited for.
                problems.append(error)

        thread = threading.Thread(target=inside, daemon=True)
        thread.start()
        thread.join()
        if problems:
            raise problems[0]
        return results[0]


def enter(name: str) -> None:
    """Move this thread, and only it, to that host."""
    with Path(f"/run/netns/{name}").open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
