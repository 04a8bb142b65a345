"""The blocking face and its process: signals, forks, children and the end. Each program here is a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rdzv
from support.strikes import STRIKE

SRC = Path(rdzv.__file__).parent.parent


def python(program: str, tmp_path: Path, *, warnings: str = "error") -> str:
    """Run a program of its own and give back what it printed. It must end by itself, and have nothing to complain of."""
    file = tmp_path / "program.py"
    file.write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-X", "dev", "-W", warnings, "-W", "ignore:.*multi-threaded:DeprecationWarning", str(file)]
    # Whoever starts the tests in the background of a shell has it ignore interrupts, and a child would inherit that.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    finally:
        signal.signal(signal.SIGINT, former)
    # On a busy machine asyncio's debug mode complains of how long things took, which is not for the program to answer for.
    complaints = re.sub(r"^Executing <.*> took \d+\.\d+ seconds\n", "", done.stderr, flags=re.MULTILINE)
    assert (complaints, done.returncode) == ("", 0), done.stdout
    return done.stdout


INTERRUPTED = """
import os, signal, time
import rdzv

def observe(notice):
    if notice.kind == "present":
        os.kill(os.getpid(), signal.SIGINT)

began_at = time.monotonic()
with rdzv.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=2, observer=observe) as r:
    try:
        r.join()
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - began_at < 5)
    print("members:", len(r.status().members))
    while r._aio.bell._waiters and time.monotonic() - began_at < 10:
        time.sleep(0.01)
    print("joins under way:", len(r._aio.bell._waiters))
    try:
        r.join(timeout_s=0.1)
    except rdzv.errors.JoinTimeout:
        print("and can be tried again")
"""


def test_an_interrupt_gets_through_a_join_and_ends_it(tmp_path):
    assert python(INTERRUPTED, tmp_path).splitlines() == [
        "interrupted True", "members: 1", "joins under way: 0", "and can be tried again"
    ]  # fmt: skip


IMPATIENT = """
import asyncio, os, signal, threading
from rdzv.system.portal import Portal

finished = threading.Event()

async def work():
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.3)
    finished.set()

for cancel in (True, False):
    portal = Portal.open(cancel)
    try:
        portal.run(work(), cancel=cancel)
    except KeyboardInterrupt:
        print(cancel, finished.wait(1.0))
    portal.close(cancel)
"""


def test_an_interrupt_ends_what_was_waited_for_unless_it_must_be_finished(tmp_path):
    assert python(IMPATIENT, tmp_path).splitlines() == ["True False", "False True"]


MEMBER = """
import rdzv

def member():
    return rdzv.Rendezvous("memory://", run_id="job", min_nodes=1, max_nodes=1, last_call=0)
"""
DURING = """
with member() as r:
    r.join()
    answers = 0
    def handle(*_):
        global answers
        r.status()
        answers += 1
    signal.signal(signal.SIGUSR1, handle)
    steps = strike(0, r.status)
    for place in range(1, steps):
        strike(place, r.status)
    print(steps > 100, steps - 1 - answers)
"""
FIRST_AND_LAST = """
def handle(*_):
    try:
        act(r)
    except rdzv.errors.LeftAlready:
        pass

def life():
    try:
        r.status()
    except rdzv.errors.LeftAlready:
        pass
    r.leave()

signal.signal(signal.SIGUSR1, handle)
for act in (rdzv.Rendezvous.status, rdzv.Rendezvous.leave):
    place = left = 0
    while True:
        place += 1
        r = member()
        steps = strike(place, life, ("blocking.py", "portal.py"))
        while Portal._running:  # A leave that nobody waits for ends soon. The test's time limit says if it does not.
            time.sleep(0.001)
        left += len(Portal._current)
        if steps < place:
            break
    print(place > 100, left)
"""


def test_a_signal_handler_can_make_a_call_at_any_moment_of_a_call_of_its_thread(tmp_path):
    assert python(STRIKE + MEMBER + DURING, tmp_path) == "True 0\n"


def test_a_signal_handler_can_make_the_first_or_the_last_call_at_any_moment_of_another(tmp_path):
    assert python(STRIKE + MEMBER + FIRST_AND_LAST, tmp_path) == "True 0\nTrue 0\n"


FORKED = """
import gc, os, sys, threading
import rdzv

QUICK = dict(run_id="job", last_call=0.2, lease=1)
members = [rdzv.Rendezvous("memory://x", min_nodes=2, max_nodes=2, **QUICK) for _ in range(2)]
worlds = []
threads = [threading.Thread(target=lambda m: worlds.append(m.join()), args=(m,)) for m in members]
for thread in threads: thread.start()
for thread in threads: thread.join()

def sockets():
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(name) for name in names if os.path.lexists(name)]
    return sorted(target.partition(":")[0] for target in targets if target.startswith(("socket", "anon_inode")))

def say(*words):
    print(*words, flush=True)

say("parent", *sockets())
child = os.fork()
if child == 0:
    say("child", *sockets())
    say(members[0].changed.reason)
    for call in (members[0].join, members[1].status, worlds[0].members, worlds[0].store.num_keys):
        try:
            call()
        except rdzv.errors.ForkedChild as error:
            say(error)
    with members[0]:
        members[0].leave()
    with rdzv.Rendezvous("memory://x", min_nodes=1, max_nodes=1, **QUICK) as own:
        say("own", own.join().size)
    del members, worlds, threads, call, own
    gc.collect()
    say("child at its end", *sockets())
    sys.exit(0)
say("child ended", os.waitpid(child, 0)[1])
say("undisturbed", members[0].wait_changed(1.8), members[1].changed, members[0].status().phase)
members[0].leave(reason="bye")
say(members[1].wait_changed(10).reason.partition(" ")[2])
members[1].leave()
say("parent at its end", *sockets())
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at the descriptors in /proc")
def test_a_forked_child_lets_go_of_the_parents_member_and_can_have_its_own(tmp_path):
    theirs = (
        "this member of run 'job' belongs to the process that this one was forked from; "
        "make a new Rendezvous here to take part [RDZV-E15]"
    )
    assert python(FORKED, tmp_path).splitlines() == [
        "parent anon_inode socket socket socket",
        "child",
        f"changed: {theirs}",
        f"join: {theirs}",
        f"status: {theirs}",
        f"members: {theirs}",
        f"num_keys: {theirs}",
        "own 1",
        "child at its end",
        "child ended 0",
        "undisturbed None None sealed",
        "left: bye",
        "parent at its end",
    ]


CHILDREN = """
import multiprocessing, sys
import rdzv

def work(queue):
    with rdzv.Rendezvous("memory://", run_id="job", min_nodes=1, max_nodes=1, last_call=0.2) as r:
        queue.put(r.join().rank)
        r.done()

if __name__ == "__main__":
    with rdzv.Rendezvous("memory://", run_id="job", min_nodes=1, max_nodes=1, last_call=0.2) as r:
        r.join()
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            queue = context.SimpleQueue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(method, queue.get())
            child.join()
            print(child.exitcode)
        print(r.changed)
"""


def test_children_of_multiprocessing_can_be_members(tmp_path):
    assert python(CHILDREN, tmp_path).splitlines() == ["fork 0", "0", "spawn 0", "0", "None"]


AT_EXIT = """
import asyncio, atexit, threading, time

@atexit.register
def last():
    # Registered first, so it runs last: all that is here now was said by the members as they left.
    from rdzv.core.keys import Keys
    from rdzv.core import wire
    from rdzv.core.model import RankEntry
    from rdzv.engines.port import List
    from rdzv.engines.memory import MemoryDriver

    async def look():
        session = await MemoryDriver().connect()
        keys = Keys("job")
        found = await session.txn(then=[List(keys.members), List(keys.ranks)])
        print("members left:", len(found.reads[0]))
        print(*sorted(wire.decode(RankEntry, item.value).went for item in found.reads[1]), sep="; ")
        await session.close()

    asyncio.run(look())
    for member in members:
        member.leave()
    try:
        members[0].status()
    except rdzv.errors.LeftAlready:
        print("nothing can be asked any more")
    print("quickly:", time.monotonic() - ended_at < 4, [t.name for t in threading.enumerate() if t.name == "rdzv"])

import rdzv

members = [rdzv.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=2) for _ in range(2)]
threads = [threading.Thread(target=member.join) for member in members]
for thread in threads: thread.start()
for thread in threads: thread.join()
ended_at = time.monotonic()
"""


def test_a_process_that_ends_leaves(tmp_path):
    assert python(AT_EXIT, tmp_path).splitlines() == [
        "members left: 0",
        "its process ended; its process ended",
        "nothing can be asked any more",
        "quickly: True []",
    ]


STUCK = """
import threading
import rdzv

stuck = threading.Event()

def observe(notice):
    if notice.kind == "given":
        stuck.set()
        threading.Event().wait()

member = rdzv.Rendezvous("memory://", run_id="job", min_nodes=1, max_nodes=1, last_call=0.1, observer=observe)
threading.Thread(target=member.join, daemon=True).start()
print("ending", stuck.wait(20))
"""


def test_a_process_ends_even_if_an_observer_never_comes_back(tmp_path):
    began_at = time.monotonic()
    assert python(STUCK, tmp_path) == "ending True\n"
    assert time.monotonic() - began_at < 15
