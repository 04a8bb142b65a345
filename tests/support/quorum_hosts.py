"""A quorum on hosts that are network namespaces: members as processes, the faults of whole hosts, and what each etcd says."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rdzv.engines.quorum.agreement import HostRecord
from support.etcd_cluster import LONG_S, until
from support.member_processes import ENVIRON, Line, Process, ProcessSet, is_world
from support.network_hosts import Host, Network, ip

PORT = 29400


class QuorumHosts:
    """Hosts of which the first `listed` are in the endpoint, and the processes on them."""

    def __init__(self, network: Network, names: Sequence[str], state: Path, *, listed: int = 3, run_id: str = "job") -> None:
        self.hosts = {name: network.host(name) for name in names}
        self.listed = list(names)[:listed]
        self.endpoint = f"quorum://{','.join(f'{self.hosts[name].address}:{PORT}' for name in self.listed)}"
        self.state = state
        state.mkdir(mode=0o700)
        self.run_id = run_id
        self.processes = ProcessSet()
        self.members: dict[str, Process] = {}

    def __enter__(self):
        self.processes.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(*(member.report() for member in self.members.values()), sep="\n")  # noqa: T201  pytest shows it.
        try:
            self.processes.__exit__(kind)
        finally:
            for host in self.hosts.values():
                kill_all(host)
        if kind is None:
            self.check_no_two_clusters()

    def start(self, *names: str, nnodes: str = "", slot: str = "", settings: Sequence[str] = ()) -> list[Process]:
        """Start a member on each of these hosts. `slot`: it is a further one of its host."""
        nnodes = nnodes or f"1:{len(self.hosts)}"
        own = [f"state_dir={self.state}", "serve_on=20", *settings]
        for name in names:
            member = self.processes.member(
                slot or name, self.endpoint, nnodes, *own, run_id=self.run_id, on=self.hosts[name].on
            )
            self.members[slot or name] = member
        return [self.members[slot or name] for name in names]

    def world(self, names: Iterable[str], after: int = 0) -> int:
        """Wait until these have a world together that is later than a round, and return the number of its round."""
        names = list(names)
        lines = [self._world(name, len(names), after) for name in names]
        numbers = {line["round"] for line in lines}
        while len(numbers) > 1:  # Some passed through a world of the same size that others did not get.
            late = [index for index, line in enumerate(lines) if line["round"] < max(numbers)]
            for index in late:
                lines[index] = self._world(names[index], len(names), lines[index]["round"])
            numbers = {line["round"] for line in lines}
        return numbers.pop()

    def _world(self, name: str, size: int, after: int) -> Line:
        return self.members[name].until(is_world(size, after), f"a world of {size} after round {after}", LONG_S)

    # ---- faults

    def kill_host(self, name: str) -> float:
        """Kill every process of a host with SIGKILL, its etcd too, and return the time."""
        at = time.monotonic()
        kill_all(self.hosts[name])
        return at

    def empty(self, name: str) -> None:
        """Delete what a host has on its disk."""
        shutil.rmtree(self.folder(name))

    def folder(self, name: str) -> Path:
        (found,) = self.state.glob(f"*-{self.hosts[name].address}-{PORT}")
        return found

    def begin_anew(self) -> None:
        """Check what the processes so far have printed, and forget them: nothing that they knew is left on any host."""
        wrong = [*self.processes.check()]
        for process in self.processes.processes:
            process.close()
        self.processes = ProcessSet()
        self.members.clear()
        assert not wrong, "\n".join(wrong)

    # ---- looking

    def record(self, name: str) -> HostRecord | None:
        try:
            return msgspec.json.decode((self.folder(name) / "record.json").read_bytes(), type=HostRecord)
        except (OSError, ValueError):
            return None

    def etcd(self, name: str) -> list[int]:
        """Return the process ids of etcd on a host."""
        return [pid for pid in pids_of(self.hosts[name]) if "--initial-cluster-token" in command_of(pid)]

    def status(self, name: str) -> dict[str, Any] | None:
        """Return what the etcd of a host says of itself; None if it does not answer."""

        def ask() -> dict[str, Any] | None:
            connection = http.client.HTTPConnection(self.hosts[name].address, PORT, timeout=1.0)
            try:
                connection.request("POST", "/v3/maintenance/status", "{}")
                return dict(json.loads(connection.getresponse().read()))
            except (OSError, ValueError, http.client.HTTPException):
                return None
            finally:
                connection.close()

        return self.hosts[name].do(ask)

    def leader(self) -> str:
        """Return the host whose etcd leads."""

        def look() -> str:
            for name in self.listed:
                said = self.status(name) if self.etcd(name) else None
                if said and said.get("leader") == said.get("header", {}).get("member_id"):
                    return name
            return ""

        return until(look, "etcd has a leader")

    def clusters(self) -> set[str]:
        """Return the ids of the clusters in which some etcd now follows a leader."""
        said = [self.status(name) for name in self.listed if self.etcd(name)]
        return {one["header"]["cluster_id"] for one in said if one and int(one.get("leader", 0))}

    def check_no_two_clusters(self) -> None:
        """Check that the records on all disks allow at most one cluster with a majority."""
        records = [record for name in self.listed if (record := self.record_if_any(name)) is not None and record.chosen]
        voters = [record.chosen for record in records if record.chosen[record.me] == record.number]
        able = {chosen for chosen in voters if voters.count(chosen) > len(self.listed) // 2}
        assert len(able) <= 1, voters

    def record_if_any(self, name: str) -> HostRecord | None:
        found = list(self.state.glob(f"*-{self.hosts[name].address}-{PORT}"))
        return self.record(name) if found else None

    def rdzv(self, name: str, *words: str, limit_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command of rdzv on a host."""
        command = [*self.hosts[name].on, sys.executable, "-m", "rdzv", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=ENVIRON)

    def close_run(self, name: str, *trust: str) -> None:
        """Close the run, and check that nothing is left of it: no process, no port, no folder."""
        words = ("close", self.endpoint, "--run-id", self.run_id, "--reason", "the test is over", *trust)
        until(lambda: self.rdzv(name, *words).returncode == 0, "the run is closed")  # A busy etcd elects now and then.
        for member in self.members.values():
            if member.lives:
                member.wait()
        until(lambda: not any(pids_of(host) for host in self.hosts.values()), "no process is left on any host")
        left = [path.name for path in self.state.iterdir()]
        assert not left, "\n".join([f"left behind: {left}", *(member.report() for member in self.members.values())])


def pids_of(host: Host) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", host.space).split()]


def command_of(pid: int) -> str:
    """Return the command line of a program; of a supervisor only its own part, not its program's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return words.partition("supervisor.py")[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_all(host: Host) -> None:
    """Kill all processes of a host: first stopped, so that none notices the end of another and acts on it."""
    pids = pids_of(host)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    until(lambda: not pids_of(host), f"all processes of {host.name} have ended")
