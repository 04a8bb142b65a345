"""torchrun, which also writes events about the calls between the agent and its rendezvous handler.

    python agent.py TORCHRUN'S ARGUMENTS     one agent
    python agent.py                          reads a request per line and forks an agent for each

Importing torch takes seconds of CPU, so a test session does it once and forks its agents from here. Each runs torchrun's own
`main`, in the main thread of its own process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.rendezvous import api


def say(event: str, **fields: object) -> None:
    # A test that shifts the clock still needs the true time in its rows.
    at = float(Path("/proc/uptime").read_text().split()[0]) if "FAKETIME" in os.environ else time.monotonic()
    row = {"at": at, "node": os.environ["JOB_NODE"], "event": event, "pid": os.getpid(), **fields}
    with (Path(os.environ["JOB_DIR"]) / f"{os.environ['JOB_NODE']}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def observe(handler: Any) -> Any:
    """Write events when a rendezvous begins and ends, and when the agent is first told that its round is over."""
    join, waiting = handler.next_rendezvous, handler.num_nodes_waiting
    told = False

    def next_rendezvous() -> Any:
        nonlocal told
        say("joins")
        info = join()
        told = False
        code = getattr(sys.modules.get("rdzv"), "__file__", "")
        say("joined", rank=info.rank, size=info.world_size, round=int(os.environ.get("RDZV_ROUND", "0")), code=code)
        hold()
        return info

    def num_nodes_waiting() -> int:
        nonlocal told
        count = waiting()
        if count and not told:
            told = True
            say("told")
        return int(count)

    handler.next_rendezvous, handler.num_nodes_waiting = next_rendezvous, num_nodes_waiting
    return handler


def hold() -> None:
    """Stop right before the ranks are assigned, if the test has asked for it."""
    order = Path(os.environ["JOB_DIR"]) / f"{os.environ['JOB_NODE']}.hold"
    if order.exists():
        order.unlink()
        say("held")
        release = order.with_suffix(".release")
        deadline = time.monotonic() + 600.0  # Longer than any test holds an agent.
        while not release.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{release} did not come")
            time.sleep(0.02)
        release.unlink()


def observe_all_handlers() -> None:
    create = api.RendezvousHandlerRegistry.create_handler
    api.RendezvousHandlerRegistry.create_handler = lambda self, params: observe(create(self, params))


def serve() -> Callable[[], object]:
    """Fork and reap until the input ends. Returns only in a child, with the function that it must call."""
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    requests = sys.stdin
    # Otherwise the collector of each agent walks through all objects of torch.
    gc.collect()
    gc.freeze()
    answer(ready=os.getpid())
    while True:
        ready, _, _ = select.select([requests, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            reap()
        if requests in ready:
            line = requests.readline()
            if not line:
                os._exit(0)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake)
                os.close(waker)
                return become(request)
            answer(pid=pid, request=request["number"])


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        answer(pid=pid, code=os.waitstatus_to_exitcode(status))


def answer(**fields: int) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def become(request: dict[str, Any]) -> Callable[[], object]:
    os.setsid()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["env"])
    if request["netns"]:
        enter_network(request["netns"])
    if request["container"]:
        contain(request["container"])
    if request["function"]:
        module, _, name = request["function"].rpartition(":")
        return getattr(importlib.import_module(module), name)
    return lambda: run.main(request["argv"])


CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x04000000, 0x20000000, 0x40000000


def call(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def enter_network(name: str) -> None:
    """Enter a namespace of `ip netns`."""
    with Path(f"/run/netns/{name}").open() as file:
        call(ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET), "setns")


def contain(host: str) -> None:
    """Become process 1 on a host of that name, as in a container. The process outside ends with the same code."""
    call(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS | CLONE_NEWPID), "unshare")
    socket.sethostname(host)
    inside = os.fork()
    if inside:
        _, status = os.waitpid(inside, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)))
    assert os.getpid() == 1
    say("contained", host=socket.gethostname())


observe_all_handlers()
if __name__ == "__main__":
    if len(sys.argv) > 1:
        run.main(sys.argv[1:])
    else:
        serve()()
