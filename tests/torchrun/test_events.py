"""Reports while a run waits, events for torch's handlers, and the warning about restarts."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from msgspec.structs import replace
from torch.distributed.elastic.events import NodeState

from rdzv.core.status import MemberStatus, Status
from rdzv.errors import Unreachable
from rdzv.torchrun import events
from support.torchrun_jobs import free_port

LONG_S = 20.0


def status(phase="open", *members):
    standings = tuple(MemberStatus(str(number), name, name, state) for number, (name, state) in enumerate(members))
    return Status("job", 1, phase, 2, "1 of 2 nodes: waiting for 1 more", "a", standings)


class LogCollector(logging.Handler):
    """Collects messages, and lets a test wait for them."""

    def __init__(self, count):
        super().__init__()
        self.lines, self.count, self.enough = [], count, threading.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        if len(self.lines) >= self.count:
            self.enough.set()


def listen(ask, lines=2):
    collected = LogCollector(lines)
    events.logger.addHandler(collected)
    try:
        with events.WaitReporter(ask, 600.0, every_s=0.01) as reporter:
            reporter.start()
            reporter.start()
            assert collected.enough.wait(LONG_S)
    finally:
        events.logger.removeHandler(collected)
    return [line.partition(" s: ")[2] for line in collected.lines]


def test_a_report_names_lost_and_late_members():
    here = status("broken", ("a", "ready"), ("b", "lost"), ("c", "straggling"))
    first, second, *_ = listen(lambda: here)
    assert (
        first
        == second
        == (
            "run 'job', round 1 broken: 1 of 2 nodes: waiting for 1 more (1 lost, 1 ready, 1 straggling); lost: b; "
            "still stopping their workers: c"
        )
    )


def test_a_report_below_quorum_says_what_happens_next():
    few = replace(status(), round=0, min_nodes=2, ready=1)
    assert listen(lambda: few, 1)[0].endswith("waiting for 1 more (no members); gives up in 600 s (join_timeout)")
    again = replace(few, round=3, phase="broken")
    assert events.describe(again, -1.0).endswith("(no members); a run that had a round is waited for without limit")


TORCHRUN = "import rdzv.torchrun.events as e; e.REPORT_EVERY_S = 0.5; from torch.distributed.run import main; main()"


def test_an_agent_of_torchrun_that_waits_says_so_on_stderr():
    """A real one; only the time between two lines is shorter."""
    words = ["--rdzv-backend=rdzv", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=2"]
    command = [sys.executable, "-c", TORCHRUN, *words, "--rdzv-conf=join_timeout=4", "never.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    line = (
        r"^waiting for a round since \d s: run 'job', round 0 none: 1 of 2 nodes: waiting for 1 more \(1 ready\); "
        r"gives up in [0-4] s \(join_timeout\)$"
    )
    assert len(re.findall(line, done.stderr, re.MULTILINE)) >= 3, done.stderr
    timed_out = r"RendezvousTimeoutError: run 'job' gave no world in 4(\.\d+)? s: 1 of 2 nodes: waiting for 1 more \(here: "
    assert re.search(timed_out, done.stderr), done.stderr
    assert done.stderr.rstrip().endswith("[RDZV-E05]")


def test_an_engine_that_is_away_is_what_is_waited_for():
    def ask():
        raise Unreachable("host:1", "connection refused")

    assert listen(ask, 1)[0] == "engine host:1 is unreachable: connection refused [RDZV-E02]"


def test_a_spare_of_a_round_that_runs_says_so_seldom():
    asked = []

    def ask():
        asked.append(1)
        return status("sealed" if len(asked) < 2 * events.SPARE_REPORTS_EVERY else "open")

    assert len(listen(ask, 3)) >= 3
    assert len(asked) >= 2 * events.SPARE_REPORTS_EVERY


def test_it_ends_quietly_with_the_interpreter():
    asked = threading.Event()

    def ask():
        asked.set()
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    reporter = events.WaitReporter(ask, 600.0, every_s=0.01)
    with reporter:
        reporter.start()
        assert asked.wait(LONG_S)
        reporter._thread.join(LONG_S)
        assert not reporter._thread.is_alive()


def test_many_names_are_cut():
    many = status("broken", *((f"n{number}", "lost") for number in range(10)))
    assert events.describe(many, 1.0).endswith("lost: n0, n1, n2, n3, n4, n5, n6, n7 and 2 more")


# ---- torch's events


def test_torchs_event_handlers_hear_of_every_step(monkeypatch):
    heard = []
    monkeypatch.setattr(events, "construct_and_record_rdzv_event", lambda **fields: heard.append(fields))
    recorder = events.Recorder("rdzv", "job")
    recorder.record("round 1", rank=0, bootstrap="h:1")
    recorder.record("leaves", NodeState.SUCCEEDED)
    recorder.record("lost", NodeState.FAILED)
    assert [(one["message"], one["node_state"], one["rank"], one["master_endpoint"]) for one in heard] == [
        ("round 1", NodeState.RUNNING, 0, "h:1"),
        ("leaves", NodeState.SUCCEEDED, None, ""),
        ("lost", NodeState.FAILED, None, ""),
    ]
    assert {(one["run_id"], one["name"]) for one in heard} == {("job", "rdzv")}


def test_an_event_handler_that_fails_ends_nobody(monkeypatch, caplog):
    def fail(**_):
        raise OSError("disk full")

    monkeypatch.setattr(events, "construct_and_record_rdzv_event", fail)
    events.Recorder("rdzv", "job").record("round 1")
    assert "a rendezvous event could not be recorded: round 1" in caplog.text


# ---- max_restarts


@pytest.mark.parametrize(
    ("arguments", "environ", "restarts"),
    [
        (["/venv/bin/torchrun", "train.py"], {}, 0),
        (["/venv/bin/torchrun", "--max-restarts=3", "train.py"], {}, 3),
        (["torchrun", "--max_restarts", "4", "train.py"], {}, 4),
        (["/x/torch/distributed/run.py", "train.py"], {"PET_MAX_RESTARTS": "7"}, 7),
        (["torchrun", "--max-restarts=many"], {}, None),
        (["my_program.py"], {}, None),
        ([], {}, None),
    ],
)
def test_torchruns_command_line_tells_how_often_it_restarts(arguments, environ, restarts):
    assert events.max_restarts(arguments, environ) == restarts


@pytest.mark.parametrize(("high", "arguments", "warned"), [(4, [], True), (2, [], False), (4, ["--max-restarts=1"], False)])
def test_an_elastic_run_without_restarts_is_warned_of(monkeypatch, caplog, high, arguments, warned):
    monkeypatch.setattr("sys.argv", ["torchrun", *arguments, "train.py"])
    monkeypatch.delenv("PET_MAX_RESTARTS", raising=False)
    events.warn_without_restarts(2, high)
    assert ("is elastic, but --max-restarts is 0" in caplog.text) is warned
