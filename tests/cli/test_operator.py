"""Commands of non-members against a real server: status, watch, journal, drain, ban, unban, close, adopt."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from support.cli_commands import LIMIT_S, QUICK, rdzv, running, served, worlds

HOST = os.uname().nodename
RUN = ["--run-id", "t"]


def member(place, name, nnodes="1:3"):
    return running("join", place, *RUN, "--nnodes", nnodes, "--json", *QUICK, "--conf", f"slot={name}")


def asked(*words):
    """Run a command that must succeed, and return its JSON output."""
    done = rdzv(*words, *RUN, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    return json.loads(done.stdout)


def test_an_operator_sees_drains_bans_lets_in_again_and_closes():
    with served() as place, member(place, "a", "2:3") as a, member(place, "b", "2:3") as b, member(place, "c", "2:3") as c:
        for one in (a, b, c):
            worlds(one, lambda said: said["size"] == 3)
        status = asked("status", place)
        assert (status["phase"], status["round"], status["size"], status["min_nodes"]) == ("sealed", 1, 3, 2)
        assert {one["name"] for one in status["members"]} == {f"{HOST}/{name}" for name in "abc"}
        shown = rdzv("status", *RUN, env={**os.environ, "RDZV_ENDPOINT": place})
        assert "run 't', round 1 sealed: round 1 runs with 3 nodes (3 in)" in shown.stdout
        assert f"{HOST}/b" in shown.stdout

        assert asked("drain", f"{HOST}/c", place, "--reason", "maintenance")["members"] == [f"{HOST}/c"]
        assert c.wait(LIMIT_S) == 6
        assert re.search(r"drained from run 't': maintenance; .*\[RDZV-E\d+\]\n$", c.stderr.read())
        worlds(a, lambda said: said["size"] == 2)
        worlds(b, lambda said: said["size"] == 2)

        endless = rdzv("ban", HOST, place, *RUN, "--for", "for ever")
        assert (endless.returncode, "is no duration" in endless.stderr) == (2, True)
        mistaken = rdzv("ban", f"{HOST}/a", place, *RUN)
        assert mistaken.stdout.endswith(f"; no member is on it: '{HOST}/a' is the name of one on host '{HOST}'\n"), mistaken
        assert rdzv("ban", "nobody", place, *RUN).stdout.endswith("; no member is on it\n")
        banned = asked("ban", HOST, place, "--reason", "bad memory", "--for", "2h")
        assert (banned["for_s"], banned["members"]) == (7200, [f"{HOST}/a", f"{HOST}/b"])
        assert [one.wait(LIMIT_S) for one in (a, b)] == [6, 6]
        assert "is banned from run 't': bad memory (for 2 h); `rdzv unban` lets it in again" in a.stderr.read()
        assert asked("unban", HOST, place)["done"] == "unbanned"
        again = rdzv("unban", HOST, place, *RUN)
        assert (again.returncode, "is neither banned from it nor quarantined" in again.stderr) == (7, True)

        with member(place, "a", "1:3") as d:
            worlds(d, lambda said: said["size"] == 1)
            going_on = rdzv("journal", place, *RUN, "--outcome")
            assert (going_on.returncode, "the run did not end" in going_on.stderr) == (7, True)
            assert asked("close", place, "--reason", "enough")["reason"] == "enough"
            assert d.wait(LIMIT_S) == 4
        again = rdzv("close", place, *RUN)
        assert (again.returncode, "it is closed already" in again.stderr) == (7, True)
        journal = rdzv("journal", place, *RUN, "--json", "--outcome")
        assert (journal.returncode, "the run failed: enough" in journal.stderr) == (4, True)
        lines = [json.loads(line) for line in journal.stdout.splitlines()]
        assert next(one["kind"] for one in lines if one["event"] == "restart") == "drained"


def test_the_engine_tells_that_a_run_succeeded():
    with served() as place:
        assert rdzv("run", place, *RUN, "--nnodes", "1", "--", "true").returncode == 0
        journal = rdzv("journal", place, *RUN, "--outcome")
    assert (journal.returncode, journal.stderr) == (0, "")
    assert "closed: the only member of round 1 is done" in journal.stdout


def test_watch_shows_every_change_waits_for_a_run_goes_through_an_outage_and_ends_with_the_run():
    with served() as place:
        free = place
    with running("watch", free, *RUN, "--json") as watch:
        first = json.loads(watch.stdout.readline())
        assert first["event"] == "away"
        assert "is unreachable" in first["reason"]
        with running("serve", "--bind", free) as server:
            server.stdout.readline()
            seen = iter(map(json.loads, watch.stdout))
            assert next(one for one in seen if one["event"] == "none")["reason"].startswith("no such run yet")
            with member(free, "a", "1:2") as a:
                worlds(a, lambda said: said["size"] == 1)
                assert next(one for one in seen if one.get("phase") == "sealed")["size"] == 1
                assert rdzv("close", free, *RUN).returncode == 0
                assert next(one for one in seen if one.get("phase") == "closed")["round"] == 1
                assert watch.wait(LIMIT_S) == 4


def test_watch_ends_well_with_a_run_whose_members_are_all_done():
    with served() as place, running("watch", place, *RUN, "--json") as watch:
        assert json.loads(watch.stdout.readline())["event"] == "none"
        assert rdzv("run", place, *RUN, "--nnodes", "1", *QUICK, "--", sys.executable, "-c", "").returncode == 0
        assert watch.wait(LIMIT_S) == 0
        assert json.loads(watch.stdout.read().splitlines()[-1])["phase"] == "closed"


def test_watch_without_a_terminal_prints_plain_lines_and_ends_when_told():
    with served() as place, running("watch", place, *RUN) as watch:
        assert watch.stdout.readline().startswith("run 't': no such run yet on engine rdzv://")
        with member(place, "a", "2:4"):
            line = next(line for line in watch.stdout if "round 0 open" in line)
            assert "1 of 2..4 nodes: waiting for 1 more (1 ready) [" in line
            assert line.endswith("] 1 ready, 2 needed, 4 at most\n")
            watch.send_signal(signal.SIGTERM)
            assert watch.wait(LIMIT_S) == 0


def test_watch_on_a_terminal_draws_a_table():
    with served() as place, member(place, "a", "1:2") as a:
        worlds(a, lambda said: said["size"] == 1)
        terminal, child_side = pty.openpty()
        command = [sys.executable, "-m", "rdzv", "watch", place, *RUN]
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        with subprocess.Popen(command, stdin=child_side, stdout=child_side, stderr=subprocess.PIPE, env=environ) as watch:
            os.close(child_side)
            drawn = ""
            while not ("round 1 sealed for >" in drawn and f"{HOST}/a" in drawn and "1 in, 1 needed, 2 at most" in drawn):
                drawn += os.read(terminal, 4096).decode(errors="replace")
            watch.send_signal(signal.SIGINT)
            assert watch.wait(LIMIT_S) == 0
        os.close(terminal)


COMMANDS = [["status"], ["journal"], ["close"], ["drain", "x"], ["ban", "x"], ["unban", "x"]]


def test_a_run_that_is_not_there_has_its_own_exit_code():
    with served() as place:
        for words in COMMANDS:
            done = rdzv(*words, place, *RUN)
            assert done.returncode == 7, words
            assert f"run 't': engine rdzv://{place} keeps no such run" in done.stderr
            assert "check --run-id and the endpoint" in done.stderr


@pytest.mark.parametrize("words", [*COMMANDS, ["adopt", "--force"]])
def test_no_command_of_a_viewer_or_operator_ever_serves(words):
    """The endpoint is this machine's and nothing listens there: a member would serve."""
    with served() as place:
        free = place
    done = rdzv(*words, free, *RUN)
    assert done.returncode == 5
    assert f"engine rdzv://{free} is unreachable: {free}: connection refused" in done.stderr


def test_a_run_that_an_agents_server_does_not_keep_is_no_such_run():
    """The server answers, so it is not unreachable: scripts tell the two apart by the exit code."""
    with served() as free:
        place = free
    with running("join", place, *RUN, "--nnodes", "1", "--json", *QUICK) as host:
        worlds(host, lambda said: said["size"] == 1)
        commands = (["status"], ["journal"], ["close"], ["ban", HOST], ["unban", HOST], ["drain", HOST])
        for command in commands:
            done = rdzv(*command, place, "--run-id", "other")
            assert (done.returncode, done.stdout) == (7, ""), done
            assert f"rdzv: run 'other': engine rdzv://{place} keeps another run: " in done.stderr
            assert "hosted by an agent of run 't' and serves that run only, not 'other'" in done.stderr
        assert rdzv("status", place, *RUN).returncode == 0
    assert rdzv("status", place, "--run-id", "other").returncode == 5
