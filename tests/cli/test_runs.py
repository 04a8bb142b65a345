"""`rdzv runs`, and status, journal and watch without a run id, against one real server with several runs."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rdzv.cli.main import make_app
from rdzv.cli.watch import Watcher
from rdzv.config.settings import Settings
from rdzv.engines.port import DeletePrefix
from support.cli_commands import LIMIT_S, QUICK, running, worlds
from support.embedded_server import until
from support.memory_members import Party

HOST = os.uname().nodename


def invoke(*words, **environ):
    """Run a command in this process, without a terminal."""
    return CliRunner().invoke(make_app(), [str(word) for word in words], env=environ)


def on_a_terminal(*words, columns=100):
    """Run a command to its end on a terminal of its own, and return what it draws."""
    terminal, child_side = pty.openpty()
    command = [sys.executable, "-m", "rdzv", *words]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(command, stdin=child_side, stdout=child_side, stderr=child_side, env=environ) as process:
        os.close(child_side)
        drawn = b""
        try:
            while more := os.read(terminal, 65536):
                drawn += more
        except OSError:  # The other side is closed.
            pass
        process.wait(LIMIT_S)
    os.close(terminal)
    return drawn.decode()


def member(place, run_id, slot, nnodes="1:3"):
    return running("join", place, "--run-id", run_id, "--nnodes", nnodes, "--json", *QUICK, "--conf", f"slot={slot}")


@pytest.fixture(scope="module")
def place():
    """A server with two runs: `big`, in its second round after b was killed, and `small`, which waits for a second node."""
    with running("serve", "--bind", "127.0.0.1:0") as server:
        where = server.stdout.readline().split()[-1]
        with member(where, "small", "a", "2:4"), member(where, "big", "a") as a, member(where, "big", "b") as b:
            worlds(a, lambda said: said["size"] == 2)
            b.kill()
            worlds(a, lambda said: said["size"] == 1)
            yield where


def test_runs_are_listed_for_people_in_a_pipe_and_on_a_terminal(place):
    listed = invoke("runs", place)
    assert (listed.exit_code, listed.stderr) == (0, "")
    head, big, small = listed.stdout.splitlines()
    assert head.split() == ["RUN", "PHASE", "ROUND", "NODES", "AGE", "REASON"]
    assert re.fullmatch(r"big +sealed +2 +1 of 1\.\.3 +\d+ s +round 2 runs with 1 node", big)
    assert re.fullmatch(r"small +open +0 +1 of 2\.\.4 +\d+ s +1 of 2\.\.4 nodes: waiting for 1 more", small)
    drawn = on_a_terminal("runs", place)
    assert "─" in drawn
    assert "\x1b[32msealed" in drawn


def test_a_finding_of_the_doctor_is_shown_on_a_narrow_terminal_too():
    told = json.loads(invoke("doctor", "memory://", "--json").stdout.splitlines()[0])["text"]
    narrow, wide = (on_a_terminal("doctor", "memory://", columns=columns) for columns in (20, 500))
    assert told in narrow
    assert "\x1b[" not in narrow
    assert told in wide
    assert "\x1b[" in wide


def test_runs_are_listed_for_programs_with_the_fields_of_a_status(place):
    lines = [json.loads(line) for line in invoke("runs", place, "--json").stdout.splitlines()]
    assert [(one["run_id"], one["phase"], one["members"]) for one in lines] == [
        ("big", "sealed", {"in": 1}), ("small", "open", {"ready": 1})
    ]  # fmt: skip
    for one in lines:
        assert one["kept_at"] == f"rdzv://{place}"
        assert (one["problem"], one["served_by"]) == ("", f"rdzv serve at {place}")
        assert one["silent_s"] < LIMIT_S > one["age_s"] >= 0
    some = invoke("runs", place, "--json", "--limit", "1")
    assert [json.loads(line)["run_id"] for line in some.stdout.splitlines()] == ["big"]
    assert some.stderr == "rdzv: there are more than 1 runs: `rdzv runs --limit` lists more, and --run-id names one\n"


def test_status_tells_what_happened_who_serves_and_who_leads(place):
    shown = invoke("status", RDZV_ENDPOINT=place, RDZV_RUN_ID="big").stdout.splitlines()
    assert shown[0] == "run 'big', round 2 sealed: round 2 runs with 1 node (1 in)"
    assert re.fullmatch(
        rf"last change: \d+ s ago, round 2 sealed with 1 node \(.*\); no longer in: {HOST}/b \(written by {HOST}/a\)", shown[1]
    )
    assert shown[2].startswith(f"before that: round 1 broken: {HOST}/b lost")
    assert re.fullmatch(rf"served by rdzv serve at {place}; led by {HOST}/a; began \d+ s ago", shown[3])
    assert shown[4].split() == ["MEMBER", "HOST", "RANK", "STATE", "INFO"]
    assert shown[5].split() == [f"{HOST}/a", "(leads)", HOST, "0", "in", "-"]
    assert len(shown) == 6
    events = json.loads(invoke("status", place, "--run-id", "big", "--json").stdout)["events"]
    last, broken = events["last"], events["broken"]
    assert (last["phase"], broken["cause"], broken["members"]) == ("sealed", "lost", [f"{HOST}/b"])


def test_status_journal_and_watch_without_a_run_id_need_only_one_run(place):
    assert invoke("status", place).stdout.splitlines()[0].split()[0] == "RUN"
    several = invoke("watch", place)
    assert (several.exit_code, several.stdout) == (2, "")
    assert "keeps several runs ('big', 'small'): name one with --run-id" in several.stderr
    assert invoke("journal", place).stdout.split()[:2] == ["RUN", "PHASE"]
    unnamed = invoke("drain", "*", place)
    assert (unnamed.exit_code, unnamed.stdout) == (2, "")
    assert "--run-id is not given: name the run; `rdzv runs` lists those that are there" in unnamed.stderr
    one_only = invoke("journal", place, "--outcome")
    assert (one_only.exit_code, one_only.stderr) == (2, "rdzv: --outcome is about one run: name it with --run-id [RDZV-E01]\n")
    with running("serve", "--bind", "127.0.0.1:0") as server:
        other = server.stdout.readline().split()[-1]
        nothing = f"rdzv: engine rdzv://{other} keeps no run: nobody has joined one, or their records are gone [RDZV-E12]\n"
        for words in (["status"], ["watch"], ["journal"], ["status", "--json"]):
            done = invoke(*words, other)
            assert (done.exit_code, done.stdout, done.stderr) == (7, "", nothing)
        none = invoke("runs", other)
        assert (none.exit_code, none.stdout, none.stderr) == (0, f"engine rdzv://{other} keeps no run\n", "")
        assert invoke("runs", other, "--json").stdout == ""
        with member(other, "only", "a") as a:
            worlds(a, lambda said: said["size"] == 1)
            assert invoke("status", other).stdout.startswith("run 'only', round 1 sealed")
            assert invoke("journal", other).stdout.startswith("run 'only', incarnation ")
            with running("watch", other) as watch:
                first = watch.stdout.readline()
                assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ round 1 sealed with 1 node ", first)
                assert watch.stdout.readline().startswith("run 'only', round 1 sealed: ")
                assert invoke("close", other, "--run-id", "only", "--reason", "enough").exit_code == 0
                told = watch.stdout.read()
                assert re.search(r"Z closed: enough \(by \S+\) \(written by ", told)
                assert watch.wait(LIMIT_S) == 4
        closed = invoke("status", other)
        assert (closed.exit_code, "run 'only', round 1 closed: enough (by" in closed.stdout) == (0, True)


def test_a_closed_run_says_how_it_ended_after_its_head_has_expired_and_watch_ends_at_once(place):
    words = ["join", place, "--run-id", "brief", "--nnodes", "1", *QUICK, "--conf", "closed_for=0.1"]
    with running(*words, "--json") as a:
        worlds(a, lambda said: said["size"] == 1)
        assert invoke("close", place, "--run-id", "brief", "--reason", "enough").exit_code == 0
        assert a.wait(LIMIT_S) == 4
    deadline = time.monotonic() + LIMIT_S
    while (seen := json.loads(invoke("status", place, "--run-id", "brief", "--json").stdout))["members"]:
        assert time.monotonic() < deadline, "the head and its rank table have expired by then"
        time.sleep(0.1)
    assert (seen["phase"], seen["round"]) == ("closed", 1)
    assert seen["reason"].startswith("closed: enough (by ")
    assert seen["events"]["last"]["cause"] == "closed"
    assert invoke("watch", place, "--run-id", "brief", "--json").exit_code == 4


def test_no_secret_no_list(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("f3b1c0a97e0d4f6f8f2f7a4a1c5b9e21")
    secret.chmod(0o600)
    with running("serve", "--bind", "127.0.0.1:0", "--token-file", str(secret)) as server:
        where = server.stdout.readline().split()[-1]
        for command in ("runs", "status", "watch"):
            done = invoke(command, where)
            assert (done.exit_code, done.stdout) == (6, "")
            assert "the server has a secret and the member has none" in done.stderr
        assert invoke("runs", where, "--token-file", str(secret)).stdout == f"engine rdzv://{where} keeps no run\n"


@pytest.mark.parametrize("words", [["runs"], ["status"], ["watch"]])
def test_an_engine_that_is_away_has_its_exit_code(words):
    done = invoke(*words, "127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (5, "")
    assert "is unreachable: 127.0.0.1:1: connection refused" in done.stderr


async def test_watch_ends_when_the_records_of_the_run_are_gone(capsys):
    """Nothing says how it ended, and nobody will come back to it."""
    async with Party(1, 1) as party:
        settings = Settings.make(party.endpoint, run_id="job", min_nodes=1, max_nodes=1)
        watching = asyncio.ensure_future(Watcher(settings, Console(), as_json=True).run())
        (a,), _ = await party.form("a")
        await until(lambda: "sealed" in capsys.readouterr().out)
        await a.leave()
        await party.write(DeletePrefix(party.keys.run))
        assert await watching == 7
    assert "run 'job' is gone: all have left, and its records have expired" in capsys.readouterr().err
