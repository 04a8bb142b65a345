"""Registers in memory: one with the required methods, one with the optional ones too."""

from __future__ import annotations

import threading


class CellBackend:
    """A state with a version number for its token."""

    name = "cell"

    def __init__(self):
        self.lock = threading.Condition()
        self.state = None
        self.version = 0
        self.swaps = [0, 0]
        """Lost and won."""

    def get_state(self):
        with self.lock:
            return None if self.state is None else (self.state, self.version)

    def set_state(self, state, token=None):
        with self.lock:
            won = self.state is None if token is None else token == self.version and self.state is not None
            self.swaps[won] += 1
            if won:
                self.state = state
                self.version += 1
                self.lock.notify_all()
            return None if self.state is None else (self.state, self.version, won)

    def clear(self):
        with self.lock:
            self.state = None
            self.version += 1
            self.lock.notify_all()


class AbleBackend(CellBackend):
    """A backend that can wait and has counters."""

    def __init__(self):
        super().__init__()
        self.counters = {}

    def wait_state(self, token, timeout_s):
        with self.lock:
            self.lock.wait_for(lambda: self.version != token, timeout_s)

    def stop_waiting(self):
        with self.lock:
            self.version += 1  # The state stays, so nobody else is fooled.
            self.lock.notify_all()

    def beat(self, name):
        with self.lock:
            self.counters[name] = self.counters.get(name, 0) + 1

    def read_beats(self, names):
        with self.lock:
            return [self.counters.get(name, 0) for name in names]

    def drop_beat(self, name):
        with self.lock:
            self.counters.pop(name, None)
