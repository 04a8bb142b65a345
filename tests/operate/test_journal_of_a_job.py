"""A job that is scripted, and its journal: every cause and every duration, checked against what the script did and saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

PAIRS = ("last_call=0.3", "settle=0.2", "lease=3", "grow_every=0", "replace_wait=0.7")
QUICK = [word for pair in PAIRS for word in ("-c", pair)]
LIMIT_S = 60.0
NOISE_S = 2.0
"""A loaded machine: between what a leader wrote and what the script saw of it."""
RUN = ["--run-id", "scripted"]


def rdzv(*words):
    command = [sys.executable, "-m", "rdzv", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def running(*words):
    command = [sys.executable, "-m", "rdzv", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


class Node:
    """A member, and when it was told what, by the script's own clock."""

    def __init__(self, stack, place, name):
        words = ["join", place, *RUN, "--nnodes", "2:3", "--json", *QUICK, "-c", f"slot={name}"]
        self.name = f"{os.uname().nodename}/{name}"
        self.process = stack.enter_context(running(*words))

    def until(self, number, event="world", **fields):
        for line in self.process.stdout:
            said = json.loads(line)
            if said["event"] == event and said["round"] == number and fields.items() <= said.items():
                return time.monotonic()
        raise AssertionError(self.process.stderr.read())


def test_the_journal_of_a_job_names_every_cause_and_duration():
    """Form, kill, re-form, grow, spare promoted, close."""
    with ExitStack() as stack:
        server = stack.enter_context(running("serve", "--bind", "127.0.0.1:0"))
        place = server.stdout.readline().split()[-1]
        a, b, c = (Node(stack, place, name) for name in "abc")
        sealed = {1: max(node.until(1) for node in (a, b, c))}
        c.process.kill()
        broken = {1: a.until(1, "changed")}
        sealed[2] = max(node.until(2) for node in (a, b))
        d = Node(stack, place, "d")
        broken[2] = a.until(2, "changed")
        sealed[3] = max(node.until(3) for node in (a, b, d))
        e = Node(stack, place, "e")
        e.until(3, "notice", kind="present")
        b.process.kill()
        broken[3] = a.until(3, "changed")
        sealed[4] = max(node.until(4) for node in (a, d, e))
        assert rdzv("close", place, *RUN, "--reason", "enough").returncode == 0
        assert [node.process.wait(LIMIT_S) for node in (a, d, e)] == [4, 4, 4]
        done = rdzv("journal", place, *RUN, "--json")
        shown = rdzv("journal", place, *RUN)
    assert (done.returncode, done.stderr) == (0, "")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    restarts = [one for one in said if one["event"] == "restart"]
    assert [(one["round"], one["kind"], one["members"], one["came"], one["gone"]) for one in restarts] == [
        (1, "lost", [c.name], [], [c.name]),
        (2, "growth", [d.name], [d.name], []),
        (3, "lost", [b.name], [e.name], [b.name]),
    ]
    assert [(one["next_round"], one["next_size"]) for one in restarts] == [(2, 2), (3, 3), (4, 3)]
    for one in restarts:
        number = one["round"]
        assert one["cost_exact"]
        assert one["ran_exact"]
        assert abs(one["cost_s"] - (sealed[number + 1] - broken[number])) < NOISE_S, one
        assert abs(one["ran_s"] - (broken[number] - sealed[number])) < NOISE_S, one
    assert restarts[0]["cost_s"] >= 0.7, "the wait for a replacement is part of what it cost"
    closed = said[len(said) - len(restarts) - 1]
    assert (closed["phase"], closed["cause"]["kind"], closed["reason"]) == ("closed", "closed", "enough")
    assert f"round 1 broken after {restarts[0]['ran_s']:.1f} s: {c.name} lost" in shown.stdout
    assert f"came in: {e.name}; no longer in: {b.name}; the restart took {restarts[2]['cost_s']:.1f} s" in shown.stdout
    assert f"restart after round 2: growth (by {d.name})" in shown.stdout
    assert "closed: enough (by " in shown.stdout
