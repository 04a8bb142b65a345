"""Real processes: started together, watched, and stopped together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rdzv.core.model import WorkerRanks
from rdzv.errors import SettingsError
from rdzv.launch import stacks
from rdzv.launch.crew import Crew
from rdzv.launch.environment import NodeInRound
from rdzv.launch.orphans import OrphanKiller
from rdzv.launch.output import Destinations
from rdzv.launch.workers import RoundWorkers, Worker, finish_output
from support.processes import is_alive

LIMIT_S = 30.0
NODE = NodeInRound(
    run_id="job", round=2, fence=1, reason="", host="127.0.0.1", port=1, rank=1, nodes=2, workers=1,
    ranks=WorkerRanks(4, 8, 4, 8), role="default", restarts=0, max_restarts=0,
)  # fmt: skip
QUICK = "import os, sys, time, signal; rank = int(os.environ['LOCAL_RANK'])\n"
STAYS = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
STUCK = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('stuck', flush=True)\ndef hangs():\n  time.sleep(600)\nhangs()\n"


def group(folder, workers=1, stop_s=LIMIT_S):
    node = msgspec.structs.replace(NODE, workers=workers)
    return RoundWorkers(node, Destinations("job", str(folder)), folder / "scratch", stop_s)


async def started(folder, program, workers=1, stop_s=LIMIT_S, command=(sys.executable, "-c")):
    made = group(folder, workers, stop_s)
    await made.start([*command, QUICK + program], os.environ)
    return made


async def ended(made):
    await asyncio.wait_for(made.wait(), LIMIT_S)
    return await made.stop()


async def text(path, holds=""):
    """Return the text of a file once it holds something."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or holds not in path.read_text():
        assert time.monotonic() < deadline, f"no {holds!r} in {path}"
        await asyncio.sleep(0.02)
    return path.read_text()


async def until(holds):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def log(folder, rank, ending="out"):
    return folder / "job" / "round-2" / f"rank-{rank}.{ending}"


async def test_all_workers_succeed_together_each_with_its_own_rank_and_log(tmp_path):
    made = await started(tmp_path, "print(os.environ['RANK'], os.environ['LOCAL_RANK'])", workers=3)
    assert await ended(made) is None
    assert [log(tmp_path, rank).read_text() for rank in (4, 5, 6)] == ["4 0\n", "5 1\n", "6 2\n"]


async def test_the_first_failure_is_told_with_its_exception_and_the_others_are_stopped(tmp_path):
    """Rank 5 fails. Rank 6 fails too, but as a consequence: when it is stopped."""
    program = """
if rank == 1:
    while not os.path.exists('go'): time.sleep(0.02)
    raise ValueError('bad')
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print('ready', flush=True)
time.sleep(600)
"""
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        made = await started(tmp_path, program, workers=3)
        for rank in (4, 6):
            await text(log(tmp_path, rank), "ready")
        (tmp_path / "go").touch()
        failure = await ended(made)
    finally:
        os.chdir(here)
    assert failure.reason == "rank 5: exit code 1: ValueError: bad"
    assert (failure.local_rank, failure.log) == (1, str(log(tmp_path, 5, "err")))
    assert [worker.code for worker in made.workers] == [3, 1, 3]


async def test_the_exception_in_an_error_file_goes_before_what_stderr_says(tmp_path):
    """As `torch.distributed.elastic.multiprocessing.errors.record` writes it; that of an earlier life does not count."""
    program = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": {\"message\": \"OSError: disk\"}}')"
    made = await started(tmp_path, f"{program}; raise ValueError('bad')")
    assert (await ended(made)).reason == "rank 4: exit code 1: OSError: disk"
    made = await started(tmp_path, "raise ValueError('bad')")
    assert (await ended(made)).reason == "rank 4: exit code 1: ValueError: bad"


async def test_a_signal_that_ended_a_worker_is_named(tmp_path):
    made = await started(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    failure = await ended(made)
    assert (failure.reason, failure.exit_code) == ("rank 4: killed by SIGKILL", 137)


async def test_workers_that_are_stopped_did_not_fail(tmp_path):
    made = await started(tmp_path, "print('ready', flush=True); time.sleep(600)", workers=2)
    for rank in (4, 5):
        await text(log(tmp_path, rank), "ready")
    assert await made.stop() is None
    assert [worker.code for worker in made.workers] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("command", [(sys.executable, "-c"), ("sh", "-c", f'{sys.executable} -c "$0"; exit $?')])
async def test_a_stuck_worker_shows_its_stack_before_it_is_killed(tmp_path, caplog, command):
    """Also if the worker is a shell that only waits for the program."""
    made = await started(tmp_path, STUCK, stop_s=0.3, command=command)
    await text(log(tmp_path, 4), "stuck")
    assert await made.stop() is None
    said = log(tmp_path, 4, "err").read_text()
    assert "Fatal Python error: Aborted" in said
    assert "in hangs" in said
    told = caplog.records[0].getMessage()
    assert told.startswith("rank 4 (local rank 0, pid ")
    assert told.endswith("did not stop within 0.3 s of SIGTERM: its Python stacks follow on its stderr, then it is killed")


async def test_a_stuck_program_that_is_not_python_is_killed_without_a_core(tmp_path, caplog):
    made = group(tmp_path, stop_s=0.2)
    await made.start(["sh", "-c", "trap '' TERM; echo stuck; while :; do sleep 1; done"], os.environ)
    await text(log(tmp_path, 4), "stuck")
    assert await made.stop() is None
    assert made.workers[0].code == -signal.SIGKILL
    assert caplog.records[0].getMessage().endswith("of SIGTERM: it is killed")


async def test_the_children_of_a_worker_end_with_it(tmp_path):
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    made = await started(tmp_path, program)
    child = int(await text(log(tmp_path, 4), "\n"))
    assert await ended(made) is None
    await until(lambda: not is_alive(child))


@asynccontextmanager
async def unkilled(child, monkeypatch, caplog):
    """Hold SIGKILL to groups back, as if the kernel let it wait, and kill the child at the end. Gives `stays_away`."""
    told, real = asyncio.Event(), os.killpg

    async def stays_away(ending):
        telling = asyncio.ensure_future(told.wait())
        await asyncio.wait([ending, telling], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        telling.cancel()
        return not ending.done()

    monkeypatch.setattr("rdzv.launch.workers.UNKILLED_S", 0.1)
    monkeypatch.setattr(caplog.handler, "emit", lambda record: told.set() if "a child of rank" in record.getMessage() else None)
    monkeypatch.setattr(os, "killpg", lambda group, number: real(group, 0 if number == signal.SIGKILL else number))
    try:
        yield stays_away
    finally:
        os.kill(child, signal.SIGKILL)


def shell(end):
    return ["sh", "-c", f'{sys.executable} -c "$0" & {end}', QUICK + STAYS]


EXITS = "while [ ! -e $GO ]; do sleep 0.02; done; exit 3"


@pytest.mark.parametrize(("end", "reason"), [("wait", ""), (EXITS, "rank 4: exit code 3")], ids=["stopped", "failed"])
async def test_workers_have_ended_when_the_programs_behind_their_shells_have(tmp_path, monkeypatch, caplog, end, reason):
    """The shells end at once. The programs have got SIGKILL, but the kernel may take its time."""
    made, go = group(tmp_path, stop_s=0.2), tmp_path / "go"
    await made.start(shell(end), {**os.environ, "GO": str(go), "PYTHONFAULTHANDLER": ""})
    child = int(await text(log(tmp_path, 4), "\n"))
    async with unkilled(child, monkeypatch, caplog) as stays_away:
        if reason:
            go.touch()
            await asyncio.wait_for(made.wait(), LIMIT_S)
        stopping = asyncio.ensure_future(made.stop())
        assert await stays_away(stopping), "the program still runs"
    failure = await asyncio.wait_for(stopping, LIMIT_S)
    assert not is_alive(child)
    assert (failure.reason if failure is not None else "") == reason


async def test_a_worker_that_stays_is_replaced_when_the_program_behind_its_shell_has_ended(tmp_path, monkeypatch, caplog):
    go = tmp_path / "go"
    crew = Crew(shell(EXITS), 1, Destinations("job", str(tmp_path)), tmp_path, 0.2, lambda: None)
    await crew.start_missing({**os.environ, "LOCAL_RANK": "0", "GO": str(go)})
    child = int(await text(tmp_path / "job" / "worker-0.out", "\n"))
    async with unkilled(child, monkeypatch, caplog) as stays_away:
        go.touch()
        await until(lambda: crew.has_failed)
        taking = asyncio.ensure_future(crew.take_failure())
        assert await stays_away(taking), "the program still runs"
    assert (await asyncio.wait_for(taking, LIMIT_S)).reason == "rank 0: exit code 3"
    assert not is_alive(child)
    await crew.stop()


async def test_a_child_that_may_not_be_signalled_is_not_waited_for(tmp_path, monkeypatch):
    """A process of another user, such as one that sudo has started. No signal of this process would ever end it."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid, flush=True)"
    made = await started(tmp_path, program)
    child, real = int(await text(log(tmp_path, 4), "\n")), os.killpg

    def refuse(*_):
        raise PermissionError

    try:
        await asyncio.wait_for(made.wait(), LIMIT_S)
        monkeypatch.setattr(os, "killpg", refuse)
        assert await asyncio.wait_for(made.stop(), LIMIT_S) is None
        assert is_alive(child)
        monkeypatch.setattr(os, "killpg", real)
        monkeypatch.setattr("rdzv.launch.stacks.may_signal", lambda pid: pid != child)
        assert not made.workers[0].group_lives, "also if others of the group have ended, and nobody has asked for them"
    finally:
        os.kill(child, signal.SIGKILL)


async def test_a_process_lives_on_when_its_main_thread_has_ended(tmp_path):
    program = "import ctypes, threading; threading.Thread(target=time.sleep, args=(600,)).start()\n"
    made = await started(tmp_path, program + "ctypes.CDLL(None).pthread_exit(None)")
    worker = made.workers[0]
    await until(lambda: not is_alive(worker.pid))  # The state that the kernel shows is that of the main thread.
    assert list(stacks.living(worker.pid)) == [worker.pid]
    await asyncio.wait_for(made.stop(), LIMIT_S)
    assert stacks.living(worker.pid) == {}


async def test_nothing_is_sent_to_the_number_of_a_worker_that_has_ended_long_before_the_others(tmp_path, monkeypatch):
    """By then it may be that of a stranger."""
    made = await started(tmp_path, "time.sleep(0 if rank == 0 else 600)", workers=2)
    first, second = made.workers
    await until(lambda: first.is_gone)
    sent, real = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (sent.append(group), real(group, number)))
    assert await made.stop() is None
    assert second.pid in sent
    assert first.pid not in sent


async def test_a_killed_launcher_takes_no_group_with_it_that_has_ended_before(tmp_path):
    """Two shells of the same kind: one group was removed, and the other is killed when the pipe ends."""
    orphans = OrphanKiller()
    await orphans.start()
    groups = [await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True) for _ in range(3)]
    for one in groups:
        orphans.add(one.pid)
    orphans.remove(groups[1].pid)
    orphans._shell.stdin.close()  # As if this process had been killed.
    await asyncio.wait_for(orphans._shell.wait(), LIMIT_S)
    for one in (groups[0], groups[2]):
        assert await asyncio.wait_for(one.wait(), LIMIT_S) == -signal.SIGKILL
    assert is_alive(groups[1].pid)
    groups[1].kill()
    await groups[1].wait()


async def test_no_shell_is_left_when_the_workers_have_ended(tmp_path):
    made = await started(tmp_path, "pass")
    shell = made._orphans._shell.pid
    assert is_alive(shell)
    assert await ended(made) is None
    assert not is_alive(shell)


async def test_workers_run_on_a_machine_without_a_shell(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    made = await started(tmp_path, "print('trains')")
    assert await ended(made) is None
    assert log(tmp_path, 4).read_text() == "trains\n"
    assert "no shell could be started" in caplog.text


async def test_a_stop_that_is_cancelled_leaves_no_worker_behind(tmp_path):
    made = await started(tmp_path, STUCK)
    await text(log(tmp_path, 4), "stuck")
    stopping = asyncio.ensure_future(made.stop())
    await asyncio.sleep(0.05)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert made.workers[0].code == -signal.SIGKILL


async def test_a_program_that_cannot_be_started_is_refused_with_the_reason(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x00\x01 no program")
    program.chmod(0o755)
    made = group(tmp_path, workers=2)
    with pytest.raises(SettingsError, match=r"program '.*program' cannot be run: Exec format error"):
        await made.start([str(program)], os.environ)


@pytest.mark.parametrize("refused", ["rdzv copies stdout of rank 4", "rdzv copies stderr of rank 5", "asyncio_"])
async def test_a_program_for_whose_output_there_is_no_thread_is_refused_with_the_reason(tmp_path, monkeypatch, refused):
    """The last one waits for the output of those that were started."""
    real = threading.Thread.start

    def start(thread):
        if thread.name.startswith(("rdzv copies stderr of rank 5", refused)):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    made = group(tmp_path, workers=2)
    with pytest.raises(SettingsError, match="program 'sleep' cannot be run: can't start new thread"):
        await made.start(["sleep", "600"], os.environ)
    assert not any(worker.runs for worker in made.workers)
    await until(lambda: not any(thread.name.startswith("rdzv copies") for thread in threading.enumerate()))


async def test_a_process_for_which_asyncio_finds_no_thread_could_not_be_started(tmp_path, monkeypatch, caplog):
    async def refuse(*_, **__):  # As asyncio before Python 3.12, which starts a thread per process.
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", refuse)
        orphans = OrphanKiller()
        await orphans.start()
        worker = Worker(4, 0, tmp_path / "error.json")
        with pytest.raises(OSError, match="can't start new thread"):
            await worker.start(["true"], os.environ, Destinations("job", str(tmp_path)), 2)
    await orphans.close()
    assert "no shell could be started (can't start new thread)" in caplog.text
    await finish_output([worker])


def test_only_the_programs_that_handle_the_signal_are_asked_for_stacks(tmp_path):
    """A shell (10) waits for Python (11), which has a child that loads data (12); 13 is of another group."""
    handles, not_this_one = "SigCgt:\t0000000000000020\n", "SigCgt:\t0000000000000002\n"
    for pid, parent, of_group, status in (
        (10, 1, 10, not_this_one), (11, 10, 10, handles), (12, 11, 10, handles), (13, 1, 13, handles), (14, 10, 10, handles),
        (15, 10, 10, "garbage"),
    ):  # fmt: skip
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) name) S {parent} {of_group} 1 0")
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\n{status}")
    (tmp_path / "16").mkdir()  # It has ended.
    assert stacks.catching(10, tmp_path) == [11, 14]
