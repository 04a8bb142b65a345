"""The worker channel: real processes, a real socket, and what a worker may not do with it."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rdzv import worker as client
from rdzv.core import wire
from rdzv.core.model import CauseKind, ProgressReport
from rdzv.core.worker_messages import LINE_MAX, SAID_MAX, NoticeSent, WorkerHello, WorkerListens, encode
from rdzv.engines.port import Get
from rdzv.member import worker_channel, worker_watch
from support.memory_members import Party

LONG_S = 30.0
PROGRAM = "import sys, time, os, signal\nfrom rdzv import worker\nsignal.alarm(300)\n"
"""The alarm ends a worker whose test was killed."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(worker_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(worker_watch, "REPORT_S", 0.2)


@asynccontextmanager
async def worker(path, program, rank=0, round=1, **environ):
    """A process that is a worker of the agent at that path; it lives until the end of the block."""
    own = {**os.environ, "RDZV_WORKER": path, "RANK": str(rank), "RDZV_ROUND": str(round), **environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM + program, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(look, what):
    """Poll for the first true result."""
    deadline = time.monotonic() + LONG_S
    while True:
        found = await look()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {LONG_S:g} s: {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def agent():
    """A member in a round of its own, with its channel, and a function that reads what it told the run."""
    async with Party(1, 1) as party:
        ((member,), _) = await party.form("here")
        path = await member.serve_workers()

        async def told():
            item = (await party.operator.txn(then=[Get(party.keys.progress_of(member.presence.id))])).item(0)
            return None if item is None else wire.decode(ProgressReport, item.value)

        yield party, member, path, told


async def test_the_steps_of_workers_reach_the_run():
    program = "rank = int(os.environ['RANK'])\nworker.progress(100 + rank)\nsys.stdin.read()\n"
    async with agent() as (_, member, path, told), worker(path, program, 0), worker(path, program, 1):

        async def both():
            found = await told()
            return found if found is not None and found.workers == 2 else None

        found = await until(both, "two workers told")
        assert (found.low, found.high, found.slowest) == (100, 101, (0,))
        status = await member.status()
        assert (status.progress.step, status.progress.furthest, status.progress.behind) == (100, 101, (0,))


async def test_a_worker_that_calls_a_million_times_costs_a_few_small_writes():
    program = "step = 0\nwhile True:\n  for _ in range(1000): worker.progress(step); step += 1\n"
    async with agent() as (party, member, path, told), worker(path, program):
        reads = [Get(party.keys.progress_of(member.presence.id)), Get(party.keys.member(member.presence.id))]

        async def far():
            found = await told()
            return found if found is not None and found.low > 1_000_000 else None

        await until(told, "a first report")
        began, first = time.monotonic(), await party.operator.txn(then=reads)
        await until(far, "a million steps")
        last = await party.operator.txn(then=reads)
        lasted_s = time.monotonic() - began
        assert len(last.item(0).value) < 400
        assert last.item(1).modified == first.item(1).modified, "the record that the leader watches is not touched"
        assert 1 <= last.revision - first.revision <= lasted_s / worker_watch.REPORT_S + 1


async def test_a_worker_that_ended_is_forgotten_and_one_of_another_round_does_not_count():
    program = "worker.progress(7)\nprint('told', flush=True)\nsys.stdin.read()\n"
    async with agent() as (_, member, path, told):
        async with worker(path, program, rank=3, round=9) as late:
            assert await late.stdout.readline() == b"told\n"
            async with worker(path, program, rank=4):
                found = await until(told, "a report")
                assert (found.slowest, found.workers) == ((4,), 1)
        workers = member._workers.channel.workers

        async def empty():
            return not workers

        await until(empty, "both workers are gone")


async def test_a_forked_child_says_nothing_and_does_not_keep_the_connection():
    program = """
worker.progress(5)
if os.fork() == 0:
    worker.progress(99)
    print(os.getpid(), flush=True)
    for descriptor in (0, 1): os.close(descriptor)  # The test would wait for their end.
    time.sleep(600)
sys.stdin.readline()
"""
    async with agent() as (_, member, path, told), worker(path, program) as parent:
        child = int(await asyncio.wait_for(parent.stdout.readline(), LONG_S))
        found = await until(told, "a report")
        assert found.high == 5
        parent.stdin.write(b"\n")
        workers = member._workers.channel.workers

        async def empty():
            return not workers

        try:
            await until(empty, "the end of the parent is seen although its child lives")
        finally:
            os.kill(child, signal.SIGKILL)


def test_first_calls_of_two_threads_make_one_connection():
    with tempfile.TemporaryDirectory(prefix="t") as short, socket.socket(socket.AF_UNIX) as agent:
        path = str(Path(short, "worker"))
        agent.bind(path)
        agent.listen()
        agent.setblocking(False)
        both = threading.Barrier(2)

        def serve():
            both.wait(LONG_S)
            return path

        client.begin_round(serve, 0, 1)
        try:
            with ThreadPoolExecutor(2) as pool:
                for called in [pool.submit(client.progress, 1), pool.submit(client.notice)]:
                    called.result(LONG_S)
            agent.accept()[0].close()
            with pytest.raises(BlockingIOError):
                agent.accept()
        finally:
            client.end_rounds()


def test_an_agent_that_goes_before_the_hello_leaves_no_descriptor_and_no_file(tmp_path):
    program = """
import socket
agent = socket.socket(socket.AF_UNIX)
agent.bind(os.environ["RDZV_WORKER"])
agent.listen()
register = worker._register_stacks

def and_the_agent_goes(page):
    agent.close()
    return register(page)

worker._register_stacks = and_the_agent_goes
before = len(os.listdir("/proc/self/fd"))
worker.progress(1)
agent = socket.socket(socket.AF_UNIX)
os.kill(os.getpid(), signal.SIGURG)  # Nothing is written to a file that is closed.
print(len(os.listdir("/proc/self/fd")) - before)
"""
    environ = {**os.environ, "RDZV_WORKER": str(tmp_path / "agent")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], env=environ, capture_output=True, text=True, timeout=LONG_S, check=True
    )
    assert done.stdout == "0\n"
    assert "this worker cannot talk to its agent" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["agent"]


def test_a_child_that_is_forked_while_a_thread_connects_does_not_wait_for_that_thread():
    program = """
import signal, threading
thread = threading.Thread(target=worker._opening.acquire)
thread.start()
thread.join()
child = os.fork()
if child == 0:
    signal.alarm(10)
    worker.progress(1)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    own = {name: value for name, value in os.environ.items() if name != "RDZV_WORKER"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], env=own, capture_output=True, text=True, timeout=LONG_S, check=True
    )
    assert done.stdout == "0\n"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell of handlers by C code")
@pytest.mark.parametrize(
    ("before", "registered"),
    [
        ("", signal.SIGURG),
        ("signal.signal(signal.SIGURG, signal.SIG_IGN)", signal.SIGURG),
        ("signal.signal(signal.SIGURG, print)", 0),
        ("libc.signal(signal.SIGURG, ours)", 0),
        ("import faulthandler; faulthandler.register(signal.SIGURG)", 0),
    ],
    ids=["none", "ignored", "by Python", "by C", "stacks elsewhere"],
)
def test_a_handler_that_the_program_has_for_the_signal_stays_also_one_by_c_code(before, registered):
    """Go's runtime in a shared library has one. Here it is `abs`, which C code may call with any number."""
    program = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
ours = ctypes.cast(libc.abs, ctypes.c_void_p).value
{before}
print(worker._register_stacks(2))
print(libc.signal(signal.SIGURG, 0) == ours)
"""
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stdout.split() == [str(int(registered)), str("libc" in before)]


class FleetingChannel(client._Channel):
    """A channel whose connection another thread lets go of as soon as it has been looked at."""

    @property
    def socket(self):
        held, self._held = self._held, None
        return held

    @socket.setter
    def socket(self, held):
        self._held = held


def test_a_connection_that_another_thread_lets_go_of_is_used_to_the_end_of_the_call():
    agent, ours = socket.socketpair()
    channel = FleetingChannel("", "0", "0")
    with agent, ours:
        channel.socket = ours
        assert channel.notice() is None
        assert agent.recv(LINE_MAX) == encode(WorkerListens())
        agent.sendall(encode(NoticeSent(1)))
        channel.page[1] = 1
        channel.socket = ours
        assert channel.notice().id == 1
        channel.socket = ours
        channel.forget()
        assert ours.fileno() == -1


def test_without_an_agent_every_call_does_nothing():
    own = {name: value for name, value in os.environ.items() if name != "RDZV_WORKER"}
    for more in ({}, {"RDZV_WORKER": "/nowhere/worker"}):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM + "worker.progress(1)\nprint('on')"],
            env={**own, **more}, capture_output=True, text=True, timeout=LONG_S, check=True,
        )  # fmt: skip
        assert done.stdout == "on\n"
        assert ("this worker cannot talk to its agent" in done.stderr) == bool(more)


def test_the_client_needs_the_standard_library_and_msgspec_only():
    program = PROGRAM + "print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert {name for name in done.stdout.split() if not name.startswith("_")} - {"typing_extensions"} == {"msgspec", "rdzv"}


async def test_an_agent_that_can_make_no_socket_says_so_and_goes_on(monkeypatch, caplog):
    async with Party(1, 1) as party:
        ((member,), _) = await party.form("here")
        monkeypatch.setattr(worker_channel, "make_folder", lambda: (Path("/nowhere"), -1))
        assert await member.serve_workers() == ""
        assert "no socket could be made" in caplog.text


@pytest.mark.parametrize("step", [-1, 2**62, "7", 1.5, None])
def test_a_step_that_is_none_is_refused(step):
    with pytest.raises((ValueError, TypeError)):
        client.progress(step)


# ---- stalls


async def test_a_stall_on_two_nodes_names_the_rank_that_is_behind_and_shows_the_stacks_of_both_first(caplog):
    program = """
def stands(): sys.stdin.read()
worker.progress(9 + int(os.environ['RANK']))
stands()
"""
    async with Party(2, 2, stall=2) as party:
        members, worlds = await party.form("a", "b")
        ranks = {member: world.rank for member, world in zip(members, worlds, strict=True)}
        first, second = sorted(members, key=ranks.__getitem__)
        paths = [await member.serve_workers() for member in (first, second)]
        async with worker(paths[0], program, 0), worker(paths[1], program, 1):
            changes = await asyncio.wait_for(asyncio.gather(*(member.wait_changed() for member in members)), LONG_S)
        behind = first.state.me.name
        wanted = rf"no progress for \d+ s: rank 0 at step 9, others at 10 \({behind}\)"
        assert all(re.fullmatch(wanted, change.reason) for change in changes), changes
        head = await party.head()
        assert (head.cause.kind, head.cause.members) == (CauseKind.STALLED, (behind,))
        assert first.presence.record.stalled.table == head.table
    for rank in (0, 1):
        assert f"rank {rank} (pid" in caplog.text
        assert re.search(rf"rank {rank}: .* in stands", caplog.text)


async def test_a_stall_is_not_reported_without_the_setting():
    async with agent() as (_, member, path, told), worker(path, "worker.progress(3)\nsys.stdin.read()\n"):
        await until(told, "a report")
        await asyncio.sleep(0.3)
        assert member.presence.record.stalled is None
        assert member.changed is None


# ---- limits


async def refused(path, said=b""):
    """Whether the agent ends a connection that sends this."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(said)
        return await asyncio.wait_for(reader.read(), LONG_S) == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


def modes(*paths):
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def open_to_all(path):
    path.parent.chmod(0o755)
    path.chmod(0o666)


async def test_the_socket_and_its_folder_are_for_this_user_only_and_go_with_the_agent():
    async with agent() as (_, member, path, _):
        folder = Path(path).parent
        assert modes(folder, Path(path)) == [0o700, 0o600]
        assert await member.serve_workers() == path
    assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can become another user")
async def test_a_process_of_another_user_is_refused_even_if_it_reaches_the_socket(caplog):
    async with agent() as (_, _, path, _):
        open_to_all(Path(path))
        program = f"import socket, os; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect({path!r})"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"{program}; print(s.recv(1))", stdout=-1)
        assert (await asyncio.wait_for(process.communicate(), LONG_S))[0] == b"b''\n"
        assert "belongs to user 65534, and this agent to 0" in caplog.text


HELLO = encode(WorkerHello(0, 1, "0123456789abcdef"))


@pytest.mark.parametrize(
    "said",
    [
        b"garbage\n",
        b"\xff\xfe\n",
        b"x" * (2 * LINE_MAX) + b"\n",
        b"[" * 2000 + b"\n",
        HELLO,  # Its page does not exist.
        encode(WorkerHello(0, 1, "../../etc/passwd")),
    ],
    ids=["garbage", "no text", "a long line", "deep", "no page", "a path"],
)
async def test_a_hello_that_is_none_is_refused(said, caplog):
    async with agent() as (_, member, path, _):
        assert await refused(path, said)
        assert member._workers.channel.workers == {}
        assert "was refused" in caplog.text


async def test_a_process_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(worker_channel, "HELLO_S", 0.1)
    async with agent() as (_, _, path, _):
        assert await refused(path, b'{"rank"')


async def test_a_worker_that_talks_without_end_is_cut_off_and_one_too_many_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(worker_channel, "WORKERS_MAX", 1)
    async with agent() as (_, _, path, _):
        page = Path(path).with_name("0123456789abcdef")
        page.write_bytes(bytes(64))
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(HELLO)

        async def known():
            return not page.exists()

        await until(known, "the hello is read, and the name of the page removed")
        assert await refused(path)
        assert "1 are connected already" in caplog.text
        writer.write((b"x" * 1000 + b"\n") * (2 + SAID_MAX // 1000))
        assert await asyncio.wait_for(reader.read(), LONG_S) == b""
        assert "not listened to any longer" in caplog.text
        writer.close()


async def test_a_page_that_is_cut_short_does_not_harm_the_agent():
    async with agent() as (_, member, path, told):
        page = Path(path).with_name("0123456789abcdef")
        page.write_bytes(bytes([9]) + bytes(63))
        with page.open("r+b") as file:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            connection.send(HELLO)
            assert (await until(told, "a report")).low == 8
            file.truncate(0)
            assert member._workers.channel.workers[0].step is None
            connection.close()


async def test_two_calls_at_once_open_one_channel():
    async with Party(1, 1) as party:
        ((member,), _) = await party.form("here")
        first, second = await asyncio.gather(member.serve_workers(), member.serve_workers())
        assert first == second


# ---- the folder


def test_a_folder_that_cannot_be_locked_is_removed_and_closed(monkeypatch, tmp_path):
    tried = []

    def refuse(lock, _how):
        tried.append(lock)
        raise OSError(errno.ENOSYS, "this file system has no locks")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(worker_channel, "PATH_MAX", 1000)  # pytest's own folder has a long path.
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match="this file system has no locks"):
        worker_channel.make_folder()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(tried[0])


async def test_an_agent_removes_the_folders_of_killed_agents_and_of_no_other(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t") as short:  # pytest's own is too long for a socket.
        await check_folders(Path(short), monkeypatch)


async def test_workers_are_served_although_no_thread_can_be_started(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    channel = worker_channel.WorkerChannel()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        await channel.open()
    assert channel.path
    channel.close()


async def check_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import asyncio, os\nfrom rdzv.member.worker_channel import WorkerChannel\n"
        "async def main():\n    channel = WorkerChannel()\n    await channel.open()\n    print(channel.path, flush=True)\n"
        "    await asyncio.sleep(600)\nasyncio.run(main())"
    )
    agents = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        for _ in range(2)
    ]
    try:
        _, lives = [Path((await one.stdout.readline()).decode().strip()).parent for one in agents]
        agents[0].kill()
        await agents[0].wait()
        other = tmp_path / "of-another-program"
        other.mkdir()
        channel = worker_channel.WorkerChannel()
        await channel.open()
        kept = {lives.name, other.name}

        async def removed() -> bool:
            return names() == kept | {Path(channel.path).parent.name}

        await until(removed, "the folder of the killed agent to go")
        channel.close()
        assert names() == kept
    finally:
        for one in agents:
            if one.returncode is None:
                one.kill()
            await one.wait()
