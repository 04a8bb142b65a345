"""Signals are noticed at once, and other owners of the wakeup descriptor stay undisturbed."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed.elastic.multiprocessing import api as torch_api
from torch.distributed.elastic.multiprocessing.api import SignalException

from rdzv.torchrun import signals as signals_module
from rdzv.torchrun.signals import FATAL, SignalHold, SignalListener, ended_by_sigterm, fatal_signals

LONG_S = 20.0


class Recorder:
    def __init__(self):
        self.names = queue.Queue()

    def heard(self, name):
        self.names.put(name)


@pytest.fixture
def handled():
    """SIGTERM and SIGUSR1 have a handler, as under torch; the wakeup descriptor is as it was afterwards."""
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.fixture
def wakeup_pair():
    writer, reader = socket.socketpair()
    with writer, reader:
        writer.setblocking(False)
        reader.settimeout(LONG_S)
        yield writer, reader


@pytest.fixture
def default_sigterm():
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def listener(handled):
    listener = Recorder()
    signals = SignalListener(weakref.WeakMethod(listener.heard))
    signals.listen()
    yield listener
    signals.close()


def test_a_fatal_signal_is_noticed_although_it_has_another_handler(listener):
    os.kill(os.getpid(), signal.SIGTERM)
    assert listener.names.get(timeout=LONG_S) == "SIGTERM"


def test_other_signals_mean_nothing(listener):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert listener.names.get(timeout=LONG_S) == "SIGTERM"
    assert listener.names.empty()


def test_a_signal_without_a_name_ends_nothing(listener):
    nameless = signal.SIGRTMIN + 1
    former = signal.signal(nameless, lambda *_: None)
    os.kill(os.getpid(), nameless)
    os.kill(os.getpid(), signal.SIGTERM)
    assert listener.names.get(timeout=LONG_S) == "SIGTERM"
    signal.signal(nameless, former)


def test_torchruns_variable_names_the_fatal_signals(listener, monkeypatch):
    assert fatal_signals() == FATAL
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM, SIGUSR1")
    os.kill(os.getpid(), signal.SIGUSR1)
    assert listener.names.get(timeout=LONG_S) == "SIGUSR1"


def test_the_previous_owner_of_the_descriptor_is_told_too_and_gets_it_back(handled, wakeup_pair):
    mine, reader = wakeup_pair
    signal.set_wakeup_fd(mine.fileno())
    listener = Recorder()
    signals = SignalListener(weakref.WeakMethod(listener.heard))
    signals.listen()
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert reader.recv(1) == bytes([signal.SIGTERM])
    assert listener.names.get(timeout=LONG_S) == "SIGTERM"
    signals.close()
    signals.close()
    assert signal.set_wakeup_fd(-1) == mine.fileno()


def test_a_later_owner_of_the_descriptor_keeps_it(handled, wakeup_pair):
    mine, _ = wakeup_pair
    signals = SignalListener(weakref.WeakMethod(Recorder().heard))
    signals.listen()
    signal.set_wakeup_fd(mine.fileno())
    signals.close()
    assert signal.set_wakeup_fd(-1) == mine.fileno()


def test_a_listener_that_was_dropped_is_not_told(handled):
    signals = SignalListener(weakref.WeakMethod(Recorder().heard))
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    signals.close()


def test_outside_the_main_thread_nothing_is_noticed(handled):
    listener = Recorder()
    signals = SignalListener(weakref.WeakMethod(listener.heard))
    thread = threading.Thread(target=lambda: (signals.listen(), signals.close()))
    thread.start()
    thread.join(LONG_S)
    assert signal.set_wakeup_fd(-1) == -1


def close(signals, where):
    if where == "main":
        signals.close()
    else:
        thread = threading.Thread(target=signals.close)
        thread.start()
        thread.join(LONG_S)


def test_a_listener_closed_in_another_thread_keeps_its_number_from_other_files_until_the_main_thread_is_back(handled):
    recorder = Recorder()
    one, other = (SignalListener(weakref.WeakMethod(recorder.heard)) for _ in range(2))
    one.listen()
    number = one._writer.fileno()
    reader = next(thread for thread in threading.enumerate() if thread.name == "rdzv signals")
    close(one, "elsewhere")
    assert os.path.samestat(os.fstat(number), Path(os.devnull).stat()), "a signal writes into no file"
    reader.join(LONG_S)
    assert not reader.is_alive()
    other.listen()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert other._previous_fd == -1
    other.close()


def test_the_previous_owner_is_told_again_after_a_listener_was_closed_in_another_thread(handled, wakeup_pair):
    mine, reader = wakeup_pair
    signal.set_wakeup_fd(mine.fileno())
    recorder = Recorder()
    one, two, three = (SignalListener(weakref.WeakMethod(recorder.heard)) for _ in range(3))
    one.listen()
    two.listen()
    for signals in (two, one):
        close(signals, "elsewhere")
    three.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert reader.recv(1) == bytes([signal.SIGTERM])
    three.close()
    assert signal.set_wakeup_fd(-1) == mine.fileno()


@pytest.mark.parametrize("where", ["main", "elsewhere"])
def test_a_listener_never_passes_signals_on_to_the_number_of_one_that_was_closed_before_it(handled, wakeup_pair, where):
    mine, reader = wakeup_pair
    signal.set_wakeup_fd(mine.fileno())
    recorder = Recorder()
    one, other = (SignalListener(weakref.WeakMethod(recorder.heard)) for _ in range(2))
    one.listen()
    other.listen()
    close(one, where)
    os.kill(os.getpid(), signal.SIGTERM)
    assert reader.recv(1) == bytes([signal.SIGTERM])
    other.close()
    assert signal.set_wakeup_fd(-1) == mine.fileno()


@pytest.mark.parametrize("where", ["main", "elsewhere"])
def test_of_two_listeners_that_take_turns_each_is_told_once(handled, wakeup_pair, where):
    mine, reader = wakeup_pair
    signal.set_wakeup_fd(mine.fileno())
    recorders = Recorder(), Recorder()
    one, other = (SignalListener(weakref.WeakMethod(recorder.heard)) for recorder in recorders)
    for signals in (one, other, one):
        signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert reader.recv(1) == bytes([signal.SIGTERM])
    assert [recorder.names.get(timeout=LONG_S) for recorder in recorders] == ["SIGTERM", "SIGTERM"]
    close(one, where)
    other.close()
    assert [recorder.names.qsize() for recorder in recorders] == [0, 0]
    assert signal.set_wakeup_fd(-1) == mine.fileno()


def test_a_forked_childs_signals_are_not_the_agents():
    program = """if True:
        import os, queue, signal, weakref
        from rdzv.torchrun.signals import SignalListener
        class Recorder:
            names = queue.Queue()
            def heard(self, name): self.names.put((os.getpid(), name))
        listener = Recorder()
        signal.signal(signal.SIGTERM, lambda *_: None)
        signals = SignalListener(weakref.WeakMethod(listener.heard))
        signals.listen()
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(signal.set_wakeup_fd(-1) + 1)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert listener.names.get(timeout=20) == (os.getpid(), "SIGTERM")
        assert listener.names.empty()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=120, check=True)


# ---- before torch has its handlers


def test_while_waiting_sigterm_is_torchs_exception(default_sigterm):
    with pytest.raises(SignalException, match="got SIGTERM while waiting") as caught, ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.sigval is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_there_is_left_alone(handled):
    handler = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_that_is_installed_meanwhile_stays(default_sigterm):
    with ended_by_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


# ---- while workers save


@pytest.fixture
def torchs():
    """torch's own handler for SIGTERM, as while workers run."""
    former = signal.signal(signal.SIGTERM, torch_api._terminate_process_handler)
    yield torch_api._terminate_process_handler
    signal.signal(signal.SIGTERM, former)


def test_a_signal_is_held_back_until_the_agent_may_go(torchs):
    hold = SignalHold()
    hold.poll(False)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # As a wrapper sends it, within a second.
    hold.poll(False)
    with pytest.raises(SignalException) as caught:
        hold.poll(True)
    assert caught.value.sigval is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is torchs, "the next one is torch's"
    hold.poll(True)
    assert signal.getsignal(signal.SIGTERM) is not torchs, "and it is ready for another"
    hold.close()
    assert signal.getsignal(signal.SIGTERM) is torchs


def test_a_second_signal_is_not_held_back(torchs, monkeypatch):
    monkeypatch.setattr(signals_module, "IMPATIENT_S", 0.0)
    hold = SignalHold()
    hold.poll(False)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.01)
    with pytest.raises(SignalException):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_while_the_handlers_are_given_back_is_not_lost(torchs):
    class Late(set):
        def __iter__(self):
            signal.raise_signal(signal.SIGTERM)
            return super().__iter__()

    hold = SignalHold()
    hold.poll(False)
    hold._taken = Late(hold._taken)
    with pytest.raises(SignalException):
        hold.release()


def test_only_torchs_handler_is_replaced_and_only_in_the_main_thread(handled, torchs):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold = SignalHold()
    hold.poll(False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, torchs)
    thread = threading.Thread(target=hold.poll, args=(False,))
    thread.start()
    thread.join(LONG_S)
    assert signal.getsignal(signal.SIGTERM) is torchs


def test_a_signal_that_was_held_back_is_forgotten_when_the_agent_leaves(torchs):
    hold = SignalHold()
    hold.poll(False)
    signal.raise_signal(signal.SIGTERM)
    hold.close()
    hold.release()
    assert signal.getsignal(signal.SIGTERM) is torchs
