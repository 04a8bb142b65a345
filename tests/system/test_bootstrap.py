"""The bootstrap socket: real, bound before it is announced, and never held by anybody who should not."""

from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from rdzv.errors import SettingsError
from rdzv.system import bootstrap as bootstrap_module
from rdzv.system.bootstrap import Bootstrap, bind, candidates, parse
from support.ports import has_ipv6

V4 = "127.0.0.1"


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def bound():
    bootstrap = bind(V4, (0, 0))
    yield bootstrap
    bootstrap.release()


def test_a_bound_address_has_a_real_port_and_is_held(bound):
    assert bound.host == V4
    assert bound.port > 0
    assert bound.held
    assert str(bound) == f"127.0.0.1:{bound.port}"
    assert repr(bound) == f"<Bootstrap 127.0.0.1:{bound.port}, held here>"


def test_a_peer_that_is_quicker_than_the_server_is_queued(bound):
    with socket.create_connection((V4, bound.port), timeout=10) as early:
        early.sendall(b"early")
        with bound.take_socket() as listener:
            server, _ = listener.accept()
            with server:
                assert server.recv(5) == b"early"


def test_the_socket_is_handed_over_once(bound):
    with bound.take_socket() as listener:
        assert listener.getsockname()[1] == bound.port
        assert not bound.held
        with pytest.raises(SettingsError) as caught:
            bound.take_socket()
        assert caught.value.sentence == (
            f"bootstrap address 127.0.0.1:{bound.port}: its socket is not held here "
            "(not rank 0, or taken or released before)"
        )
        bound.release()
        assert listener.fileno() >= 0, "what was handed over is closed by whoever has it"
        assert accepts(V4, bound.port)


def test_a_released_port_can_be_bound_by_another(bound):
    assert accepts(V4, bound.port)
    bound.release()
    bound.release()
    assert not bound.held
    assert not accepts(V4, bound.port)
    again = bind(V4, (bound.port, bound.port))
    try:
        assert again.port == bound.port
    finally:
        again.release()


@pytest.mark.parametrize(
    ("ports", "former", "tried"),
    [
        ((7, 10), 0, [7, 8, 9, 10]),
        ((7, 10), 8, [9, 10, 7, 8]),
        ((7, 10), 10, [7, 8, 9, 10]),
        ((7, 10), 99, [7, 8, 9, 10]),
        ((7, 7), 7, [7]),
        ((0, 0), 7, [0, 0]),
    ],
)
def test_rounds_take_turns_in_a_range_and_the_former_port_is_the_last_choice(ports, former, tried):
    assert candidates(ports, former) == tried


def test_a_port_that_the_system_chooses_is_not_the_former_one(monkeypatch, bound):
    chosen = [bound.port, 0]
    real = bootstrap_module._listen
    bound.release()
    monkeypatch.setattr(bootstrap_module, "_listen", lambda host, _port: real(host, chosen.pop(0)))
    again = bind(V4, (0, 0), former=bound.port)
    assert (again.port != bound.port, chosen) == (True, [])
    assert not accepts(V4, bound.port)
    again.release()


def test_a_held_port_cannot_be_bound_by_another(bound):
    with pytest.raises(SettingsError) as caught:
        bind(V4, (bound.port, bound.port))
    sentence = caught.value.sentence
    assert sentence.startswith(f"bootstrap_port {bound.port}..{bound.port}: no port could be bound on this host (")
    assert os.strerror(98 if sys.platform == "linux" else 48) in sentence
    assert sentence.endswith("; give a free port or a wider range")


def test_the_first_free_port_of_a_range_is_taken():
    low, taken = free_range(2)
    try:
        bootstrap = bind(V4, (low, low + 1))
        try:
            assert bootstrap.port == low + 1
            with pytest.raises(SettingsError, match=rf"bootstrap_port {low}\.\.{low + 1}: no port could be bound"):
                bind(V4, (low, low + 1))
        finally:
            bootstrap.release()
    finally:
        taken.release()


def free_range(size: int) -> tuple[int, Bootstrap]:
    """The lowest of so many ports of which only it is taken, by us."""
    for _ in range(50):
        first = bind(V4, (0, 0))
        others = []
        try:
            others = [bind(V4, (port, port)) for port in range(first.port + 1, first.port + size)]
        except (SettingsError, OverflowError):
            first.release()
            continue
        finally:
            for other in others:
                other.release()
        return first.port, first
    pytest.fail("this machine has no two free ports in a row")


def test_a_name_that_others_know_is_bound_on_all_interfaces():
    bootstrap = bind("some-name.example", (0, 0))
    try:
        assert str(bootstrap) == f"some-name.example:{bootstrap.port}"
        assert accepts(V4, bootstrap.port)
    finally:
        bootstrap.release()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_name_is_bound_in_both_families_and_its_port_is_free_in_both():
    """A node of a network without IPv4 is known by its name, too."""
    bootstrap = bind("some-name.example", (0, 0))
    try:
        assert accepts("::1", bootstrap.port)
        for host in (V4, "::1", "10.0.0.1", "2001:db8::1", "other-name.example"):
            with pytest.raises(SettingsError, match="no port could be bound"):
                bind(host, (bootstrap.port, bootstrap.port))
    finally:
        bootstrap.release()
    for host in (V4, "::1"):
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
            port = other.getsockname()[1]
            with pytest.raises(SettingsError, match="no port could be bound"):
                bind("some-name.example", (port, port))


def test_a_node_without_ipv6_binds_a_name_in_the_other_family(monkeypatch):
    def without_ipv6(family: int, *given: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family, *given)

    real = socket.socket
    monkeypatch.setattr("rdzv.system.addresses.socket.socket", without_ipv6)
    bootstrap = bind("some-name.example", (0, 0))
    monkeypatch.undo()
    try:
        assert accepts(V4, bootstrap.port)
    finally:
        bootstrap.release()


def test_an_ipv4_address_that_others_know_is_bound_on_all_interfaces_of_its_family():
    with bind("10.0.0.1", (0, 0)).take_socket() as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_loopback_is_bound_on_loopback_only(bound):
    with bound.take_socket() as listener:
        assert listener.getsockname()[0] == V4


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6_works_and_has_brackets_only_where_a_port_follows():
    bootstrap = bind("::1", (0, 0))
    try:
        assert bootstrap.host == "::1"
        assert str(bootstrap) == f"[::1]:{bootstrap.port}"
        assert accepts("::1", bootstrap.port)
    finally:
        bootstrap.release()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_that_others_know_is_bound_on_all_interfaces():
    bootstrap = bind("2001:db8::1", (0, 0))
    try:
        assert accepts("::1", bootstrap.port)
    finally:
        bootstrap.release()


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("node1:29500", "node1", 29500), ("10.0.0.1:1", "10.0.0.1", 1), ("[2001:db8::1]:5", "2001:db8::1", 5)],
)
def test_the_address_in_a_head_is_read_and_written_alike(address, host, port):
    bootstrap = parse(address)
    assert (bootstrap.host, bootstrap.port, bootstrap.held) == (host, port, False)
    assert str(bootstrap) == address
    assert repr(bootstrap) == f"<Bootstrap {address}>"


def test_what_is_not_held_here_can_be_released_but_not_taken():
    bootstrap = parse("node1:29500")
    bootstrap.release()
    with pytest.raises(SettingsError, match="its socket is not held here"):
        bootstrap.take_socket()


def test_a_forgotten_one_does_not_stay_among_those_closed_at_a_fork():
    from rdzv.system import bootstrap as module

    gc.collect()
    before = len(module._open)
    held = bind(V4, (0, 0))
    assert len(module._open) == before + 1
    held.release()
    del held
    gc.collect()
    assert len(module._open) == before


FORK = """
    import os, signal, socket, sys
    from rdzv.system.bootstrap import bind

    held = bind("127.0.0.1", (0, 0))
    taken = bind("127.0.0.1", (0, 0))
    listener = taken.take_socket()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # The child says what it has, then stays, so that what it holds is held while the parent looks.
        os.write(write, b"%d%d" % (held.held, listener.fileno() >= 0))
        signal.pause()
        os._exit(0)
    try:
        in_child = os.read(read, 2).decode()
        in_parent = "%d%d" % (held.held, listener.fileno() >= 0)
        works = socket.create_connection(("127.0.0.1", held.port), timeout=10)
        works.close()
        held.release()
        bind("127.0.0.1", (held.port, held.port)).release()
        print(in_child, in_parent, "bound again")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_keep_the_port():
    program = [sys.executable, "-c", textwrap.dedent(FORK)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    # Held by the parent only; what was taken before the fork is the taker's affair and untouched.
    assert (done.stdout, done.stderr) == ("01 11 bound again\n", "")
