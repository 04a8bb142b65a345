"""`rdzv.jax` with a JAX that only remembers how it was called. tests/launch/test_real_jax.py has the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENVIRON = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:4711", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
PROGRAM = """
import atexit, sys, types
jax = sys.modules["jax"] = types.ModuleType("jax")
jax.distributed = types.SimpleNamespace(initialize=lambda **given: print(given))
atexit.register(lambda: print("JAX waits", file=sys.__stdout__))
import rdzv.jax
rdzv.jax.initialize({options})
atexit.register(lambda: print("the program's own"))
{end}
"""


def run(options="", end="", **environ):
    program = PROGRAM.format(options=options, end=end)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env={**ENVIRON, **environ}
    )


@pytest.mark.parametrize(
    ("environ", "options", "devices", "address"),
    [
        ({}, "", "None", "10.0.0.1:4711"),
        ({"JAX_LOCAL_DEVICE_IDS": "1"}, "", "[1]", "10.0.0.1:4711"),
        ({"JAX_LOCAL_DEVICE_IDS": "1"}, "local_device_ids=[0, 1], coordinator_address='x:1'", "[0, 1]", "x:1"),
    ],
)
def test_jax_is_told_all_by_the_launcher_and_detects_nothing_itself(environ, options, devices, address):
    done = run(options, **environ)
    assert done.stderr == ""
    given, *later = done.stdout.splitlines()
    assert given == (
        f"{{'coordinator_address': '{address}', 'num_processes': 3, 'process_id': 2, 'local_device_ids': {devices}, "
        "'cluster_detection_method': 'deactivate'}"
    )
    assert later == ["the program's own", "JAX waits"]


def test_an_exception_ends_the_process_before_jax_waits_for_the_others():
    done = run(end="raise ValueError('bad')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: bad\n")
    assert done.stdout.splitlines()[1:] == ["the program's own"]


@pytest.mark.parametrize("stdout", ["None", "open('/dev/full', 'w')"], ids=["closed", "full"])
def test_an_exception_ends_the_process_at_once_where_its_output_cannot_be_written(stdout):
    done = run(end=f"sys.stdout = {stdout}\nprint('lost')\nraise ValueError('bad')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: bad\n")
    assert "JAX waits" not in done.stdout


def test_a_program_that_rdzv_run_did_not_start_is_told_so():
    done = run(JAX_PROCESS_ID="", JAX_NUM_PROCESSES="")
    assert done.returncode == 1
    assert "SettingsError: JAX_NUM_PROCESSES and JAX_PROCESS_ID not set: start the program with `rdzv run " in done.stderr
