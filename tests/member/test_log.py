"""The lines of a member's log: the sentence of each notice, its level, and the set-up of a launcher."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from rdzv.member import log
from rdzv.member.log import Log
from rdzv.member.notices import Notice, Totals
from rdzv.member.sentences import level_of, percent, sentence


def notice(kind, round=2, reason="x", **fields):
    return Notice(kind, "job", round, "n1", reason, **fields)


TOTALS = Totals(rounds=4, restarts=3, ran_s=96.0, lost_s=4.0)
LINES = [
    (notice("joining", 0, "at engine e"), "INFO", "n1 joins at engine e"),
    (notice("joining", cause="restarted"), "INFO", "round 2: the workers of this node have stopped; it asks for a new round"),
    (
        notice("joining", cause="lost"),
        "DEBUG",
        "the workers of this node have stopped; it is ready for the round after round 2",
    ),
    (notice("present", reason="on engine e"), "DEBUG", "n1 is present on engine e"),
    (notice("waiting", reason="1 of 2 nodes", seconds=30.02), "INFO", "waits since 30.0 s: 1 of 2 nodes"),
    (notice("outside"), "INFO", "round 2 runs without this node: x"),
    (notice("given", rank=0, size=4, seconds=1.26), "INFO", "round 2: rank 0 of 4, formed in 1.3 s"),
    (
        notice("given", rank=0, size=2, came=("a", "b"), seconds=1.26), "INFO",
        "round 2: rank 0 of 2, formed in 1.3 s; came in: a, b",
    ),
    (
        notice("given", rank=0, size=3, size_before=4, seconds=120.7, cause="lost", members=("b", "c")),
        "INFO",
        "round 2: rank 0 of 3 (4 before), re-formed in 121 s (lost: b, c)",
    ),
    (
        notice("given", rank=0, size=4, size_before=4, seconds=2.0, cause="gave_up"),
        "INFO",
        "round 2: rank 0 of 4, re-formed in 2.0 s (gave up)",
    ),
    (notice("sealed", reason="3 nodes"), "DEBUG", "round 2 sealed: 3 nodes"),
    (
        notice("sealed", reason="kept after the engine came back"),
        "INFO",
        "round 2 goes on: kept after the engine came back",
    ),
    (notice("broken", reason="b lost", seconds=60.0), "INFO", "round 2 broken after 60.0 s: b lost"),
    (notice("broken", reason="b lost"), "INFO", "round 2 broken: b lost"),
    (notice("lost", cause="lost"), "DEBUG", "n1: lost: x"),
    (notice("leading"), "DEBUG", "n1: leading: x"),
    (
        notice("joining", cause="outage", reason="the engine has been away for 15 s"),
        "WARNING",
        "round 2: the workers of this node have stopped: the engine has been away for 15 s",
    ),
    (notice("evicted", seconds=5.0), "WARNING", "this node was evicted from its round after 5.0 s: x"),
    (notice("evicted"), "WARNING", "this node was evicted: x"),
    (notice("engine away"), "WARNING", "engine away: x"),
    (notice("engine back", seconds=3.0), "WARNING", "engine back after 3.0 s: x"),
    (notice("engine back", seconds=0.01), "WARNING", "engine back: x"),
    (notice("drained", reason="SIGTERM received"), "INFO", "n1 is about to leave: SIGTERM received"),
    (notice("drained", cause="drained"), "DEBUG", "n1 is about to leave: x"),
    (notice("done", reason="its work succeeded"), "INFO", "round 2: its work succeeded; it waits for the others"),
    (notice("closed"), "INFO", "the run is closed: x"),
    (notice("ended"), "INFO", "this node can take no further part: x"),
    (notice("leaving"), "INFO", "leaves the run: x"),
    (
        notice("leaving", seconds=101.0, totals=TOTALS),
        "INFO",
        "leaves the run after 101 s, 4 rounds and 3 restarts that took 4.0 s (96 % of the time in a round): x",
    ),
    (
        notice("leaving", seconds=9.0, totals=Totals(rounds=1, restarts=0, ran_s=8.0, lost_s=0.0)),
        "INFO",
        "leaves the run after 9.0 s, 1 round and 0 restarts (100 % of the time in a round): x",
    ),
]


@pytest.mark.parametrize(("told", "level", "line"), LINES, ids=lambda one: one.kind if isinstance(one, Notice) else "")
def test_each_notice_has_a_sentence_and_a_level(told, level, line):
    assert (sentence(told), logging.getLevelName(level_of(told))) == (line, level)


def test_texts_of_others_are_cleaned():
    assert sentence(notice("broken", reason="a\x1b[31m\nb")) == "round 2 broken: a [31m b"


def test_a_hundred_percent_means_that_nothing_was_lost():
    assert [percent(share) for share in (1.0, 0.9999, 0.5, 0.0)] == ["100 %", "99.9 %", "50 %", "0 %"]


def test_a_line_has_the_fields_of_its_notice_and_is_said_once(caplog):
    write, away, sealed = Log(), notice("engine away", reason="gone"), notice("sealed", reason="2 nodes")
    with caplog.at_level(logging.WARNING, "rdzv"):
        for told in (sealed, away, away):
            write(told)
    assert [record.getMessage() for record in caplog.records] == ["[job] engine away: gone"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "rdzv"):
        write(sealed)
        write(away)
    first, second = caplog.records
    assert (first.name, first.levelname, second.levelname) == ("rdzv", "DEBUG", "WARNING")
    assert (first.rdzv_kind, first.rdzv_run_id, first.rdzv_round, first.rdzv_reason) == ("sealed", "job", 2, "2 nodes")


# ---- the set-up of a launcher

TORCHS = r"[DIW]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ rdzv\] "
"""The beginning of torch's lines, with the logger in place of a source file."""
PROGRAM = """
import logging
from rdzv.member import log
log.set_up()
log.set_up()
{more}
for level in "debug", "info", "warning":
    getattr(log.logger, level)(level)
"""


def lines_of(level=None, more=""):
    environ = {} if level is None else {"RDZV_LOG": level}
    command = [sys.executable, "-c", PROGRAM.format(more=more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env={**environ, "PYTHONPATH": SRC})
    return done.stderr.splitlines()


SRC = str(log.__file__).rpartition("/rdzv/")[0]


@pytest.mark.parametrize(
    ("level", "count"), [(None, 2), ("", 2), ("debug", 3), (" INFO ", 2), ("warning", 1), ("off", 0)]
)  # fmt: skip
def test_the_variable_chooses_the_level_and_lines_look_like_torchs(level, count):
    lines = lines_of(level)
    assert [re.sub(TORCHS, "", line) for line in lines] == ["debug", "info", "warning"][3 - count :]
    assert all(re.match(TORCHS, line) for line in lines)


def test_an_unknown_level_is_named():
    line = re.sub(TORCHS, "", lines_of("loud")[0])
    assert line == "RDZV_LOG is 'loud': it must be one of debug, info, warning, off; it counts as info"


def test_a_program_that_configures_logging_sees_each_line_once_and_its_own_way():
    assert lines_of(more="logging.basicConfig(format='own %(message)s')") == ["own info", "own warning"]
