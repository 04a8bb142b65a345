"""A waiting agent and a failed one on stderr, events for torch's handlers, and the warning about restarts."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed.elastic.events import NodeState

from rdzv.errors import RdzvError, SettingsError
from rdzv.member import log
from rdzv.torchrun import events, failure_line
from support.ports import free_port

TORCHRUN = """
import sys
import rdzv.member.waiting as waiting
waiting.REPORT_EVERY_S = 0.5
sys.argv[0] = "torchrun"
from torch.distributed.run import main
main()
"""


def test_an_agent_that_waits_says_so_and_a_failure_is_one_line(tmp_path):
    """Real agents of torchrun; only the time between two lines is shorter."""
    words = ["--rdzv-backend=rdzv", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=2"]
    words += [f"--log-dir={tmp_path}", "--rdzv-conf=join_timeout=2"]
    command = [sys.executable, "-c", TORCHRUN, *words, "never.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    start = r"^[IE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ rdzv\] "
    line = start + r"\[job\] waits since \d\.\d s: 1 of 2 nodes: waiting for 1 more; here: \S+; "
    line += r"gives up in [0-2] s \(join_timeout\)$"
    assert len(re.findall(line, done.stderr, re.MULTILINE)) >= 2, done.stderr
    timed_out = start + r"run 'job' gave no world in 2(\.\d+)? s: 1 of 2 nodes: waiting for 1 more \(here: .* \[RDZV-E05\]$"
    assert re.search(timed_out, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("job_*.rdzv.jsonl"))) == 1, "the journal is beside torchrun's own logs"


def test_a_wrong_setting_is_one_line_too():
    command = [sys.executable, "-c", TORCHRUN, "--rdzv-backend=rdzv", "--rdzv-conf=join_tiout=3", "never.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if " rdzv] " in line]
    assert line.endswith("--rdzv-conf has an unknown key 'join_tiout': did you mean 'join_timeout'? [RDZV-E01]")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("level", [logging.DEBUG, log.LEVELS["off"]])
def test_a_failure_has_its_traceback_if_the_log_asks_for_it_or_is_off(monkeypatch, caplog, level):
    shown = []
    monkeypatch.setattr(failure_line, "_previous", lambda *given: shown.append(given))
    with caplog.at_level(level, "rdzv"):
        failure_line._show(RdzvError, SettingsError("x"), None)
    assert len(shown) == 1


def test_other_errors_and_other_programs_are_shown_as_ever(monkeypatch):
    shown = []
    monkeypatch.setattr(failure_line, "_previous", lambda *given: shown.append(given))
    failure_line._show(ValueError, ValueError("x"), None)
    assert len(shown) == 1
    monkeypatch.setattr("sys.argv", ["train.py"])
    hook = sys.excepthook
    failure_line.install()
    assert sys.excepthook is hook


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
        (["/home/me/run.py"], {}, None),
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
