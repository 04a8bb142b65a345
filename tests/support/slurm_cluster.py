"""A real Slurm of a controller and four nodes on this machine, which ends with the test.

    with Network() as network, Slurm(network, folder) as slurm:
        job = slurm.submit("script.sbatch")
        slurm.wait(job, "COMPLETED")

Every host is a network namespace with a name of its own, and every node a PID namespace too: the end of its first process is
the end of the machine, as when the power fails. munged listens at a socket in the folder, so that neither a Slurm of this
machine nor that of another test is touched. The folder plays the part of the file system that all nodes share.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.browser import why_not as why_not_installed
from support.network_hosts import Host, Network, ip

NODES = ("n0", "n1", "n2", "n3")
CONTROLLER = "ctl"
LONG_S = 60.0
NOTICE_S = 3
"""Slurm takes a silent node for lost after this time. Its default is 300 s."""
KILL_S = 5
"""Seconds from SIGTERM to SIGKILL when Slurm ends a job. Its default is 30 s."""
AS_INIT = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""In a PID namespace that ends with this process, and this process with the test."""
REAP = '"$@" & wait'
"""A shell as the first process: it waits for processes that lost their parent, which slurmd does not."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY", "BOOT_FAIL")
CONFIGURATION = """\
ClusterName=rdzv
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={notice_s}
MessageTimeout=3
TCPTimeout=1
KillWait={kill_s}
KillOnBadExit=1
WaitTime=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str:
    """Install Slurm. Return why there can be none here, or ""."""
    return why_not_installed("munge", "slurmctld", "slurmd", "slurm-client", munge="munged", slurm_client="srun")


class Slurm:
    """The daemons and what a user types. Commands run on the controller's host."""

    def __init__(self, network: Network, folder: Path, grace_s: int = 10, more: str = "") -> None:
        """`more`: lines to add to the configuration."""
        self.folder = folder
        self.work = folder / "work"
        self.hosts: dict[str, Host] = {name: network.host(name) for name in (CONTROLLER, *NODES)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "work", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        nodes = [f"NodeName={name} NodeAddr={self.hosts[name].v4} CPUs=2 State=UNKNOWN" for name in NODES]
        self.configuration = folder / "slurm.conf"
        text = CONFIGURATION.format(
            controller=CONTROLLER, address=self.hosts[CONTROLLER].v4, folder=folder, nodes="\n".join(nodes),
            notice_s=NOTICE_S, kill_s=KILL_S, grace_s=grace_s,
        )  # fmt: skip
        self.configuration.write_text(f"{text}{more}\n")
        # `ip netns exec` hides the file system of cgroups, and a plug-in that is named is not looked for. No task uses it.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.configuration),
        }

    def __enter__(self) -> Slurm:  # noqa: PYI034  Self came with 3.11.
        try:
            self._start_munged()
            self._start(CONTROLLER, "slurmctld", "-D", "-f", str(self.configuration))
            for name in NODES:
                self.start_node(name)
            self.until(lambda: self.nodes_that_are("idle") == set(NODES), "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(LONG_S)
        self._processes.clear()

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = (f"--{what}={self.folder}/munge.{what.removesuffix('-file')}" for what in ("socket", "pid-file", "log-file"))
        # --force: the folders above are the test's, and not the system's.
        command = ("munged", "--foreground", "--force", f"--key-file={key}", f"--seed-file={self.folder}/munge.seed", *files)
        self._start(CONTROLLER, *command, name="munged")
        self.until((self.folder / "munge.socket").exists, "munged listens")

    def _start(self, host: str, *command: str, name: str = "") -> None:
        with (self.folder / f"{name or host}.out").open("ab") as out:
            whole = [*self.hosts[host].on, *AS_INIT, "sh", "-c", REAP, "sh", *command]
            self._processes[name or host] = subprocess.Popen(
                whole, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environ, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip

    # ---- the machines

    def start_node(self, name: str) -> None:
        """Switch a node on."""
        self.hosts[name].heal()
        self._start(name, "slurmd", "-D", "-f", str(self.configuration))

    def kill_node(self, name: str, *, silent: bool = False) -> None:
        """End all processes of a node at once. `silent`: its kernel does not say goodbye to peers, as without power."""
        if silent:
            self.hosts[name].cut()
        process = self._processes.pop(name)
        process.kill()
        process.wait(LONG_S)

    def kill_tasks(self, name: str) -> None:
        """Kill what runs in the job's step on a node. Slurm's own processes there live on."""
        for pid in ip("netns", "pids", self.hosts[name].space).split():
            with suppress(OSError):
                if b"\0SLURM_PROCID=" in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)

    # ---- what a user types

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command on the controller's host, and return its output."""
        whole = [*self.hosts[CONTROLLER].on, *command]
        done = subprocess.run(
            whole, capture_output=True, text=True, timeout=LONG_S, check=False, env=self.environ, cwd=self.work
        )
        assert done.returncode == 0 or not check, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *words: str | Path, **environ: str) -> str:
        """Submit a script, with options before it and arguments behind it. Return the job's id."""
        given = ("env", *(f"{name}={value}" for name, value in environ.items()))
        return self.run(*given, "sbatch", "--parsable", *map(str, words)).strip()

    def nodes_that_are(self, *states: str) -> set[str]:
        rows = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %t", check=False).splitlines()
        return {row.split()[0] for row in rows if row.split()[1] in states}

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of a job, such as JobState, ExitCode and Restarts."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        """Return what all tasks of the job and its script have printed so far."""
        with suppress(FileNotFoundError):
            return (self.work / f"slurm-{job}.out").read_text(errors="replace")
        return ""

    # ---- waiting

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = LONG_S, job: str = "") -> None:
        """Poll until it holds. If it does not, fail with the logs."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self.report(job)}"
            time.sleep(0.1)

    def until_said(self, job: str, text: str, timeout_s: float = LONG_S, times: int = 1) -> None:
        what = f"job {job} says {text!r}, {times} times"
        self.until(lambda: self.output(job).count(text) >= times, what, timeout_s, job)

    def until_over(self, job: str, timeout_s: float = LONG_S) -> dict[str, str]:
        """Wait for the end of a job, and return its fields."""
        self.until(lambda: self.job(job)["JobState"] in OVER, f"job {job} is over", timeout_s, job)
        return self.job(job)

    def report(self, job: str = "") -> str:
        """Return what happened, for the message of a test that failed."""
        files = [*sorted(self.folder.glob("*.out")), *sorted(self.folder.glob("*.log"))]
        parts = [f"--- {file.name}\n{file.read_text(errors='replace')[-2500:]}" for file in files]
        if job:
            parts.append(f"--- job {job}\n{self.job(job)}\n{self.output(job)[-8000:]}")
        return "\n".join(parts)
