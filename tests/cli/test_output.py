"""What commands print: lines without escapes for people, and JSON that loses nothing for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.cli.output import complain, json_text, say


@given(st.dictionaries(st.text(), st.text()))
def test_json_is_printable_and_comes_back_as_it_was(value):
    text = json_text(value)
    assert text.isprintable()
    assert json.loads(text) == value


def test_signs_beyond_16_bits_are_escaped_as_two():
    assert json_text(["\U000e0001", "\x9b", "é"]) == '["\\udb40\\udc01","\\u009b","é"]'


def test_lines_are_clean(capsys):
    say("one\x1b[2J\ntwo\r")
    complain("three\nfour")
    assert capsys.readouterr() == ("one [2J\ntwo \n", "rdzv: three four\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_that_the_encoding_of_stdout_does_not_have_are_escaped_as_json_is(encoding):
    program = "from rdzv.cli.output import *\nwith usable_stdout(): say(json_text(['\u00e9', '\u65e5', '\U0001f600']))"
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True).stdout
    assert json.loads(shown.decode(encoding)) == ["\u00e9", "\u65e5", "\U0001f600"]


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["runs", "memory://"]], ids=" ".join)
def test_a_full_disk_is_said_in_one_line(words):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rdzv", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "rdzv: the output cannot be written: No space left on device\n")


def test_a_reader_that_goes_away_ends_a_command_in_silence():
    with subprocess.Popen(
        [sys.executable, "-m", "rdzv", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        command.stdout.close()
        assert (command.wait(60), command.stderr.read()) == (1, "")


@pytest.mark.parametrize(
    ("words", "code"),
    [("--version", 0), ("runs memory://", 0), ("status memory:// --run-id t", 7), ("join nonsense:// --nnodes 1", 2)],
)
def test_a_command_whose_output_is_closed_ends_as_it_does_otherwise(words, code):
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["/bin/sh", "-c", f"exec {sys.executable} -m rdzv {words} {closed}"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (closed, done.stderr)
