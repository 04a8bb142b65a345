"""`rdzv join`, `run`, `serve` and `demo` as real processes, with real sockets and signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rdzv.cli import demo, launcher
from support.cli_commands import LIMIT_S, QUICK, rdzv, running, served, worlds
from support.processes import is_alive
from support.timing import within
from support.torchrun_jobs import ServeProcess, children_of, environ_of, wait_for


def joining(place, name, nnodes="2:3"):
    return running("join", place, "--run-id", "t", "--nnodes", nnodes, "--json", *QUICK, "--conf", f"slot={name}")


def test_a_member_leaves_on_sigterm_with_code_0_and_the_others_are_told_of_a_leave():
    with served() as place, joining(place, "a", "1:2") as a, joining(place, "b", "1:2") as b:
        worlds(a, lambda said: said["size"] == 2)
        worlds(b, lambda said: said["size"] == 2)
        b.send_signal(signal.SIGTERM)
        assert b.wait(LIMIT_S) == 0
        broken = next(said for said in map(json.loads, a.stdout) if said.get("kind") == "broken")
        assert "/b left: its work here is over" in broken["reason"]


def test_a_member_that_cannot_print_what_it_is_told_stays_a_member():
    words = ["join", "--run-id", "t", "--nnodes", "2", *QUICK]
    with served() as place, Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rdzv", *words, place, "--conf", "slot=\u65e5"]
        with (
            running(*words, place, "--conf", "slot=a", PYTHONIOENCODING="latin-1") as a,
            subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True) as b,
        ):
            try:
                lost = "this member goes on, but what it is told cannot be printed: No space left on device"
                assert b.stderr.readline() == f"rdzv: {lost}\n"
                assert any("\\u65e5" in line for line in a.stdout), a.stderr.read()
                a.send_signal(signal.SIGTERM)
                assert a.wait(LIMIT_S) == 0
                b.send_signal(signal.SIGTERM)
                assert (b.communicate(timeout=LIMIT_S)[1], b.returncode) == ("", 1)
            finally:
                b.kill()


def test_a_member_whose_lines_do_not_fit_on_the_disk_goes_from_round_to_round_all_the_same():
    words = ["join", "--run-id", "t", "--nnodes", "1:2", "--json", *QUICK]
    with served() as place, Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rdzv", *words, place, "--conf", "slot=b"]
        with subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True) as b:
            try:
                assert "this member goes on" in b.stderr.readline()
                wait_for(lambda: '"sealed"' in rdzv("status", place, "--json").stdout, "it is in round 1")
                with running(*words, place, "--conf", "slot=a"):
                    wait_for(lambda: '"size":2' in rdzv("status", place, "--json").stdout, "another member is in its round")
                b.send_signal(signal.SIGTERM)
                assert (b.communicate(timeout=LIMIT_S)[1], b.returncode) == ("", 1)
            finally:
                b.kill()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_member_whose_lines_nobody_reads_any_more_leaves(form):
    with served() as place, running("join", place, "--run-id", "t", "--nnodes", "2", *form, *QUICK) as member:
        member.stdout.close()
        assert member.wait(LIMIT_S) == 1
        assert member.stderr.read() == ""


def test_a_serving_member_stays_for_the_others_until_a_second_signal_and_they_go_on():
    """The second takes the address over, with nothing but what it knows itself."""
    with served() as place:
        free = place
    with joining(free, "a", "1:2") as a:
        worlds(a, lambda said: said["size"] == 1)
        with joining(free, "b", "1:2") as b:
            for one in (a, b):
                worlds(one, lambda said: said["size"] == 2)
            a.send_signal(signal.SIGINT)
            worlds(b, lambda said: said["size"] == 1)
            warned = next(line for line in a.stderr if "stays until the others have left" in line)
            assert "this process serves run 't'" in warned
            a.send_signal(signal.SIGINT)
            assert a.wait(LIMIT_S) == 1
            assert a.stderr.read() == "rdzv: ended at once, as the second signal asked\n"
            back = next(said for said in map(json.loads, b.stdout) if said.get("kind") == "sealed")
            assert back["reason"] == "kept after the engine came back"


async def test_a_signal_that_a_wrapper_sends_twice_is_one(monkeypatch):
    """timeout and srun signal the process and its group; only a later signal is impatience."""

    async def leaving():
        stop = launcher.StopSignal()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.run_until(asyncio.Event().wait())
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        return stop.signal

    assert await asyncio.ensure_future(leaving()) is signal.SIGTERM
    monkeypatch.setattr(launcher, "IMPATIENT_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(leaving())


def test_the_reason_of_a_close_is_shown_once():
    with served() as place, running("join", place, "--run-id", "t", "--nnodes", "1", *QUICK) as member:
        next(line for line in member.stdout if "round 1: rank 0 of 1" in line)
        assert rdzv("close", place, "--run-id", "t", "--reason", "enough").returncode == 0
        shown, error = member.communicate(timeout=LIMIT_S)
    assert member.returncode == 4
    assert (shown + error).count("enough") == 1, shown
    assert error.startswith("rdzv: run 't' is closed: enough")


def test_a_spare_is_told_that_the_run_has_succeeded(tmp_path):
    words = ["--run-id", "t", "--nnodes", "1", *QUICK]
    until_finished = ["--", "sh", "-c", f"echo trains; until [ -e {tmp_path}/finish ]; do sleep 0.1; done"]
    with served() as place, running("run", place, *words, "--conf", "slot=a", *until_finished) as a:
        assert a.stdout.readline() == "trains\n"
        with running("join", place, *words, "--conf", "slot=b") as spare:
            next(line for line in spare.stdout if "runs without this node" in line)
            (tmp_path / "finish").touch()
            shown, error = spare.communicate(timeout=LIMIT_S)
            assert (spare.returncode, error) == (0, "")
            assert shown.count("the run is closed: the only member of round 1 is done") == 1, shown
        assert a.wait(LIMIT_S) == 0


def test_an_unreachable_engine_is_reported_at_once():
    with joining("no-such-host.invalid:29400", "a", "2") as a:
        assert json.loads(a.stdout.readline())["kind"] == "joining"
        said = json.loads(a.stdout.readline())
        assert said["kind"] == "engine away"
        assert "engine rdzv://no-such-host.invalid:29400 is unreachable: host 'no-such-host.invalid' " in said["reason"]


def test_a_taken_port_is_named():
    with served() as place:
        done = rdzv("serve", "--bind", place)
        assert done.returncode == 5
        assert "cannot listen there: Address already in use" in done.stderr


PROGRAM = """
import os, sys, time
NAMES = "RANK", "WORLD_SIZE", "MASTER_PORT", "RDZV_ROUND", "RDZV_RUN_ID", "RDZV_FENCE"
print(*(os.environ[name] for name in NAMES), flush=True)
print(os.environ["RDZV_REASON"], file=sys.stderr, flush=True)
if os.environ["WORLD_SIZE"] == sys.argv[1]:
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


def launching(place, name, *words, nnodes="1:2"):
    return running(
        "run", place, "--run-id", "t", "--nnodes", nnodes, *QUICK, "--conf", f"slot={name}", "--stop-timeout", "5",
        "--", sys.executable, "-c", PROGRAM, *words,
    )  # fmt: skip


def test_a_program_is_run_in_each_world_and_restarted_when_it_changes():
    """The first runs alone, then with the second, in a new round and for a reason it can read."""
    with served() as place, launching(place, "a", "2", "0") as a:
        assert a.stdout.readline().split()[:2] == ["0", "1"]
        with launching(place, "b", "2", "0") as b:
            assert b.wait(LIMIT_S) == 0
            assert a.wait(LIMIT_S) == 0
            lines = [process.stdout.readline().split() for process in (a, b)]
            assert sorted(line[0] for line in lines) == ["0", "1"]
            assert {tuple(line[1:]) for line in lines} == {("2", lines[0][2], "2", "t", lines[0][5])}
            assert int(lines[0][5]) > 2**32
            assert "came to join" in a.stderr.read()


def test_the_exit_code_is_the_programs_and_the_others_end_with_the_root_cause():
    with served() as place, launching(place, "a", "2", "7", nnodes="2") as a, launching(place, "b", "9", "0", nnodes="2") as b:
        assert a.wait(LIMIT_S) == 7
        assert re.search(r"the program failed: rank \d: exit code 7 \(local rank 0, pid \d+\)", a.stderr.read())
        assert b.wait(LIMIT_S) == 4
        assert re.search(r"run 't' is closed: \S+/a gave up: rank \d: exit code 7", b.stderr.read())


def test_sigterm_stops_the_program_and_the_member():
    with served() as place, launching(place, "a", "9", "0", nnodes="1") as a:
        a.stdout.readline()
        a.send_signal(signal.SIGTERM)
        assert a.wait(LIMIT_S) == 128 + signal.SIGTERM


def test_sigterm_stops_the_program_soon_although_the_engine_is_away():
    """A platform gives a node half a minute, most of which the workers need to save."""
    with ServeProcess() as server, launching(server.endpoint, "a", "9", "0", nnodes="1") as a:
        a.stdout.readline()
        [worker] = [pid for pid in children_of(a.pid) if "\0RANK=" in environ_of(pid)]
        server.kill()
        a.send_signal(signal.SIGTERM)
        began_at = time.monotonic()
        wait_for(lambda: not is_alive(worker), "the worker is stopped")
        within(time.monotonic() - began_at, 15.0)
        assert a.wait(LIMIT_S) == 128 + signal.SIGTERM
        server.start()  # For the end of the block.


def test_no_worker_and_no_child_of_one_outlives_a_launcher_that_is_killed():
    """SIGTERM to the whole job comes first, as from a batch system: whatever kills the workers later must not end on it."""
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = f"import os, signal, time; {ignores}; print(os.getpid(), flush=True); time.sleep(60)"
    words = ["run", "memory://", "--run-id", "t", "--nnodes", "1", "--conf", "last_call=0", "--nproc-per-node", "2"]
    with running(*words, "--", "sh", "-c", f"{sys.executable} -c '{child}' & wait") as launcher:
        children = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        family = [launcher.pid]
        for pid in family:
            family += children_of(pid)
        assert set(children) < set(family)
        launcher.send_signal(signal.SIGSTOP)  # Else it ends the other worker when the first has ended.
        for pid in set(family) - {launcher.pid}:
            os.kill(pid, signal.SIGTERM)
        launcher.kill()
        launcher.wait(LIMIT_S)
        wait_for(lambda: not any(map(is_alive, family)), "all have ended")


SHOW = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')))"


def test_every_worker_of_every_node_has_a_rank_of_its_own_and_a_prefix(tmp_path):
    """A node with two workers and one with one. The files of both are in one folder, as on a shared file system."""

    def node(place, name, workers, *more):
        words = ["run", place, "--run-id", "t", "--nnodes", "2", *QUICK, "--conf", f"slot={name}", "--nproc-per-node", workers]
        return running(*words, *more, "--", sys.executable, "-c", SHOW)

    with served() as place, node(place, "a", "2") as a, node(place, "b", "1", "--log-dir", str(tmp_path), "--tee") as b:
        shown, other = (process.communicate(timeout=LIMIT_S)[0] for process in (a, b))
        assert (a.returncode, b.returncode) == (0, 0)
    first = 0 if "rank 0" in shown else 1
    assert sorted(shown.splitlines()) == [f"[rank {first + n}] {first + n} 3 {n} 2 {first}" for n in (0, 1)]
    alone = 2 - 2 * first
    assert other == f"{alone} 3 0 1 {1 - first}\n"
    assert (tmp_path / f"t/round-1/rank-{alone}.out").read_text() == other
    assert [file.name for file in tmp_path.glob("*.rdzv.jsonl")], "the journal is there too"


def test_an_endpoint_that_is_left_out_is_the_jobs_first_node_and_the_run_its_id():
    """Two nodes of a job of Slurm, with the same command line."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.1"}
    program = ["--", sys.executable, "-c", f"{SHOW}; print(os.environ['RDZV_RUN_ID'])"]

    def node(name):
        return running("run", "--nnodes", "2", *QUICK, "--conf", f"slot={name}", *program, **job)

    with node("a") as a, node("b") as b:
        shown = [process.communicate(timeout=LIMIT_S)[0].splitlines() for process in (a, b)]
    assert sorted(lines[0] for lines in shown) == ["0 2 0 1 0", "1 2 0 1 1"]
    assert {lines[1] for lines in shown} == {str(os.getpid())}


def test_the_demo_shows_a_kill_and_a_late_comer():
    """The limit is three times the fifteen seconds of an idle machine."""
    began = time.monotonic()
    done = rdzv("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    within(time.monotonic() - began, 45)
    told = re.sub(r"^ *\d+ ms  ", "", done.stdout, flags=re.MULTILINE).splitlines()
    story = [line for line in told if "agree" in line or "killed" in line]
    assert story == ["all 4 agree on round 1", "node1 is killed", "all 3 agree on round 2", "all 4 agree on round 3"]
    assert told[-1] == story[-1], "it says more after its last act"
    assert sum("node1 lost" in line for line in told) == 3


def test_a_demo_whose_server_does_not_start_says_so():
    done = rdzv("demo", env={**os.environ, "RDZV_TOKEN": "x" * 100_000})
    problem = "it ended with code 2; `rdzv serve --bind 127.0.0.1:0` says why"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rdzv: the server was not started: {problem} [RDZV-E18]\n"


async def test_a_demo_kills_what_does_not_end():
    await demo.end([])
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    deaf = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    try:
        assert await asyncio.wait_for(deaf.stdout.readline(), LIMIT_S) == b"deaf\n"
        await asyncio.wait_for(demo.end([deaf], 0.1), LIMIT_S)
        assert deaf.returncode == -signal.SIGKILL
    finally:
        if deaf.returncode is None:
            deaf.kill()


def test_a_killed_demo_leaves_no_process():
    with running("demo") as shown:
        next(line for line in shown.stdout if "node3 starts" in line)
        started = children_of(shown.pid)
        assert len(started) >= 6, "a server, four members, and the one that ends them"
        shown.kill()
        shown.wait(LIMIT_S)
        wait_for(lambda: not any(map(is_alive, started)), "all its processes have ended")
