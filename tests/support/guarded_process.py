"""A process whose lease on etcd a sentinel guards, and its parts on both sides: the program, and the object of a test.

    python guarded_process.py ENDPOINT '{"lease": 60, ...}' [no-pidfd] < orders

It prints its lease and the process id of its sentinel. Then it obeys one order per line, and prints a line after each: `fork` a
child that only sleeps, `join` by a forked child, `exec` another program, `leave`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import rdzv
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.etcd.sentinel_process import NAME
from support.etcd_cluster import until

SRC = Path(rdzv.__file__).parent.parent
SOON_S = 30.0


class GuardedProcess:
    """The process, as a test sees it. It leads a process group of its own."""

    def __init__(self, endpoint: str, *words: str, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, endpoint, json.dumps({"lease": 60, **settings}), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(Path(__file__).parent.parent)])},
        )  # fmt: skip
        self.pid = self.process.pid
        self.children: list[int] = []
        self.lease, self.sentinel = self._read()
        until(lambda: guards(self.sentinel), "the sentinel guards the lease", SOON_S)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> list[int]:
        assert self.process.stdout is not None
        return [int(word) for word in self.process.stdout.readline().split()]

    def order(self, order: str) -> list[int]:
        """Give an order and return the numbers that the process prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self._read()

    def fork(self, order: str = "fork") -> list[int]:
        """Have it fork a child, which is killed at the end. Return the child's process id, and its lease and sentinel."""
        child = self.order(order)
        self.children.append(child[0])
        return child


def shown_of(pid: int, file: str) -> bytes:
    """Return the arguments or the environment of a process. They are empty at the first moment of a program."""
    return until(lambda: Path(f"/proc/{pid}/{file}").read_bytes(), f"process {pid} has begun", SOON_S)


def guards(pid: int) -> bool:
    """Whether a process is a sentinel that has been told of a lease: then it has its name."""
    return Path(f"/proc/{pid}/comm").read_text().strip() == NAME


def pid_of_sentinel(pid: int) -> int:
    """Wait until another process has a sentinel that guards a lease, and return its process id."""

    def look() -> int:
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread or a child ended while it was read.
            listed = [(thread / "children").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
            for child in " ".join(listed).split():
                if guards(int(child)):
                    return int(child)
        return 0

    return until(look, f"process {pid} has a sentinel", SOON_S)


def is_running(pid: int) -> bool:
    """Whether there is a process of that id that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- the program


async def join(endpoint: str, settings: dict[str, Any]) -> tuple[Any, int, int]:
    """Come as a member does. Return the session, the lease, and the process id of the sentinel."""
    from rdzv.engines.etcd import sentinel

    made = Settings.make(endpoint, run_id="job", min_nodes=1, max_nodes=1, **settings)
    session = await open_driver(made).connect()
    lease = await session.grant(made.lease, presence=True)
    sentinel.own().check()  # Start it now.
    return session, lease, sentinel.own().pid


def say(*words: object) -> None:
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


def main(endpoint: str, settings: str, *words: str) -> None:
    if "no-pidfd" in words:
        del os.pidfd_open
    loop = asyncio.new_event_loop()
    session, *told = loop.run_until_complete(join(endpoint, json.loads(settings)))
    say(*told)
    for line in sys.stdin:
        order = line.strip()
        if order == "leave":
            loop.run_until_complete(session.revoke(told[0]))
            say()
        elif order == "exec":
            say()
            os.execvp("sleep", ["sleep", "300"])
        else:
            child = os.fork()
            if not child:
                if order == "join":
                    own = asyncio.new_event_loop()
                    _, *theirs = own.run_until_complete(join(endpoint, json.loads(settings)))
                    say(os.getpid(), *theirs)
                time.sleep(300)
                os._exit(0)
            if order == "fork":
                say(child)


if __name__ == "__main__":
    main(*sys.argv[1:])
