"""Runs the command `rdzv` as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress

QUICK = ["--conf", "last_call=0.3", "--conf", "settle=0.2", "--conf", "lease=3", "--conf", "grow_every=0"]
LIMIT_S = 60.0


def rdzv(*words, **options):
    """Run a command to its end."""
    command = [sys.executable, "-m", "rdzv", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **options)


@contextmanager
def running(*words, **environ):
    """Start a command, and kill it at the end of the block."""
    command = [sys.executable, "-m", "rdzv", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate(timeout=LIMIT_S)  # A child of its own may hold its output.


@contextmanager
def served():
    """Start `rdzv serve` on a free port, and yield its address."""
    with running("serve", "--bind", "127.0.0.1:0") as server:
        yield server.stdout.readline().split()[-1]
        server.terminate()
        assert server.wait(LIMIT_S) == 0


def worlds(process, until):
    """Read lines until a world matches, and return it."""
    for line in process.stdout:
        said = json.loads(line)
        if said["event"] == "world" and until(said):
            return said
    raise AssertionError(f"ended without it: {process.stderr.read()}")
