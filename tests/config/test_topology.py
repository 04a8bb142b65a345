"""The path of a node: from a setting, a file, a command, the environment and Slurm."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import pytest

from rdzv.config.settings import Settings
from rdzv.config.topology import COMMAND_S, OUTPUT_MAX, locate
from rdzv.errors import SettingsError
from support.processes import is_alive


def make(**options):
    return Settings.make("n1", run_id="job", min_nodes=1, max_nodes=8, **options)


def located(host="n7", **options):
    return locate(make(**options), host).topology


def refused(host="n7", **options):
    with pytest.raises(SettingsError) as caught:
        located(host, **options)
    return caught.value.sentence


@pytest.mark.parametrize(
    ("given", "path"), [("b1/r2", "b1/r2"), ("/b1//r2/", "b1/r2"), (" b1 / r2 ", "b1/r2"), ("", ""), ("/", "")]
)
def test_a_path_is_tidied(given, path):
    assert located(topology=given) == path


@pytest.mark.parametrize("given", ["1/2/3/4/5/6/7/8", "x" * 257, "a\nb", 7])
def test_what_is_no_path_is_refused(given):
    assert "it must be a path of less than 8 parts such as 'block/rack'" in refused(topology=given)


@pytest.mark.parametrize(
    ("address", "pattern", "path"),
    [
        ("s0.s4.n7", "switch.switch.node", "s0/s4"),
        ("s0.s4.n7", "", "s0/s4"),
        ("block3.n7", "block.node", "block3"),
        # The name of the node may have dots.
        ("s4.n7.cluster.example", "switch.node", "s4"),
        # Without a topology plug-in there is only the node.
        ("n7", "node", ""),
        ("n7.cluster.example", "node", ""),
    ],
)
def test_slurm_tells_the_switches_above_a_node(address, pattern, path):
    environ = {"SLURM_NODEID": "3", "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    made = make(environ=environ)
    assert (made.topology, made.order) == (path, "3")


def test_what_is_given_goes_before_what_the_environment_says():
    environ = {"SLURM_TOPOLOGY_ADDR": "s1.n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    assert make(environ={**environ, "RDZV_TOPOLOGY": "zone/rack"}).topology == "zone/rack"
    assert make(environ=environ, topology="b1").topology == "b1"
    assert make(environ=environ, order="5").topology == "", "an order that the user gave is not overruled"
    assert make(environ={"RDZV_TOPOLOGY": "zone"}, order="5").topology == "zone"
    assert make(environ={"RDZV_TOPOLOGY": "zone"}, topology_file="/f").topology == ""
    assert make(environ=environ, topology_command="c").topology == ""


def test_a_file_names_the_path_of_each_host(tmp_path):
    file = tmp_path / "topology.json"
    file.write_text(json.dumps({"n7": "b1/r2", "n8.cluster.example": "b1/r3"}))
    assert located("n7", topology_file=file) == "b1/r2"
    assert located("n7.cluster.example", topology_file=file) == "b1/r2"
    assert located("n8.cluster.example", topology_file=file) == "b1/r3"
    assert refused("n9", topology_file=file) == f"topology_file {str(file)!r} has no path for host 'n9': add it"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON of the form {host: path}: Input data was truncated"),
        ('{"n7": "\udcff"}', "is not JSON of the form {host: path}: 'utf-8' codec can't decode byte 0xff"),
        ('{"n7": 5}', "is not JSON of the form {host: path}: Expected `str`, got `int` - at `$[...]`"),
        ('{"n7": "a/b/c/d/e/f/g/h/i"}', "gives the path 'a/b/c/d/e/f/g/h/i': it must be a path of less than 8 parts"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, problem):
    file = tmp_path / "topology.json"
    file.write_text(text, errors="surrogateescape")
    assert refused(topology_file=file).startswith(f"topology_file {str(file)!r} {problem}")


def test_a_file_that_is_missing_or_huge_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "topology.json"
    assert refused(topology_file=file) == f"topology_file {str(file)!r} cannot be read: No such file or directory"
    monkeypatch.setattr("rdzv.config.topology.FILE_MAX", 10)
    file.write_text(" " * 11)
    assert refused(topology_file=file).endswith("has more than 10 bytes")


def test_a_command_prints_the_path():
    assert located(topology_command="printf 'b1/r2\\nignored'") == "b1/r2"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("false", "failed with exit code 1"),
        ("sh -c 'echo no such rack >&2; exit 3'", "failed with exit code 3: no such rack"),
        ("true", "printed nothing: it must print the path of this node"),
        ("/no/such/program", "cannot be run: No such file or directory"),
        ("'unclosed", "cannot be run: No closing quotation"),
        ("echo 1/2/3/4/5/6/7/8", "gives the path '1/2/3/4/5/6/7/8': it must be a path of less than 8 parts"),
    ],
)
def test_a_command_that_does_not_tell_is_refused(command, problem):
    assert refused(topology_command=command).startswith(f"topology_command {command!r} {problem}")


def test_a_command_that_hangs_is_refused(monkeypatch):
    assert COMMAND_S == 10
    monkeypatch.setattr("rdzv.config.topology.COMMAND_S", 0.1)
    assert refused(topology_command="sleep 60") == "topology_command 'sleep 60' did not end within 0.1 s"


@pytest.mark.parametrize("command", ["yes", "sh -c 'yes >&2'"])
def test_a_command_that_prints_without_end_is_stopped_at_the_limit(command):
    began_at = time.monotonic()
    problem = f"topology_command {command!r} printed more than {OUTPUT_MAX} bytes: it must print the path of this node only"
    assert refused(topology_command=command) == problem
    assert time.monotonic() - began_at < COMMAND_S, "it was not read until it was too slow"


def test_a_command_that_is_stopped_takes_its_children_with_it(tmp_path):
    """The shell prints without end once its child runs."""
    told = tmp_path / "pid"
    command = f"sh -c 'sleep 600 <&- >&- 2>&- & echo $! > {told}; while :; do echo x; done'"
    assert "printed more than" in refused(topology_command=command)
    child, deadline = int(told.read_text()), time.monotonic() + 20
    try:
        while is_alive(child):
            assert time.monotonic() < deadline, "its child lives on"
            time.sleep(0.02)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_command_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    """A program of another user, such as sudo. Python warns of one that still runs."""
    started = []
    monkeypatch.setattr("rdzv.config.topology.END_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda group, _: started.append(group))
        assert "printed more than" in refused(topology_command="sh -c 'while :; do echo x; done; sleep 600'")
    with suppress(ProcessLookupError):  # Its last line may have met a closed pipe.
        os.killpg(started[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topology": "a", "topology_file": "/f"}, "topology and topology_file are given: give one of them"),
        ({"segment": 9}, "segment is 9: it must have a multiple from min_nodes 1 to max_nodes 8"),
        ({"segment": 2, "unit": 3}, "unit is 3 and segment is 2: unit must be 1 or a multiple of segment"),
        ({"segment": 4, "unit": 2}, "unit is 2 and segment is 4: unit must be 1 or a multiple of segment"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, problem):
    assert refused(**options) == problem


def test_the_largest_size_is_in_whole_units_and_segments():
    assert [make(segment=3).capacity, make(segment=2, unit=4).capacity, make(segment=2, unit=6).capacity] == [6, 8, 6]
    assert make(segment=3).agreed().segment == 3
