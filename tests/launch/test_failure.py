from __future__ import annotations

import subprocess
import sys

import pytest

from rdzv.launch.failure import Failure, exception_of_error_file, last_exception


def stderr_of(program):
    """What a real Python writes."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False).stderr


RAISED = stderr_of("raise ValueError('bad')")
CHAINED = stderr_of("try:\n  raise ValueError('first')\nexcept ValueError as e:\n  raise RuntimeError('second: two') from e")


@pytest.mark.parametrize(
    ("stderr", "exception"),
    [
        (RAISED, "ValueError: bad"),
        (f"warning: low on memory\n{RAISED}and a line of the exit handlers\n", "ValueError: bad"),
        (CHAINED, "RuntimeError: second: two"),
        (stderr_of("assert 1 == 2"), "AssertionError"),
        (stderr_of("raise KeyboardInterrupt"), "KeyboardInterrupt"),
        (stderr_of("raise OSError(2, 'gone\\nfor ever')"), "FileNotFoundError: [Errno 2] gone"),
        (stderr_of("import json; json.loads('{')"),
         "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("".join(f"[rank3]: {line}\n" for line in RAISED.splitlines()), "ValueError: bad"),
        ("    | Traceback (most recent call last):\n    |   File 'x', line 1\n    | TypeError: two\n    +---\n",
         "TypeError: two"),
        (f"{RAISED}{RAISED.replace('bad', 'worse')}", "ValueError: worse"),
        ("Traceback (most recent call last):\n  File 'x', line 1", ""),
        ("error: no such file\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_last_exception_is_found_among_all_that_a_program_says(stderr, exception):
    assert last_exception(stderr) == exception


def test_a_long_exception_is_cut_and_cannot_steer_a_terminal():
    found = last_exception(f"Traceback (most recent call last):\nValueError: \x1b[31m{'x' * 5000}\n")
    assert found.startswith("ValueError:  [31mxxx")
    assert len(found) == 300


@pytest.mark.parametrize(
    ("data", "exception"),
    [
        (b'{"message": {"message": "ValueError: bad", "extraInfo": {"timestamp": "1"}}}', "ValueError: bad"),
        (b'{"message": "ValueError: bad\\nmore"}', "ValueError: bad"),
        (b'{"message": {"other": 1}}', ""),
        (b'{"other": 1}', ""), (b"[]", ""), (b"3", ""), (b"", ""), (b"{", ""), (b"\xff", ""),
        (b'{"message": "\xff"}', ""), (b"[" * 100_000, ""),
    ],
)  # fmt: skip
def test_an_error_file_of_torch_is_read_and_any_other_ignored(data, exception):
    assert exception_of_error_file(data) == exception


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(1, 1, "exit code 1"), (-9, 137, "killed by SIGKILL"), (-6, 134, "killed by SIGABRT"), (-63, 191, "killed by signal 63")],
)
def test_a_failure_names_rank_end_and_exception(code, exit_code, words):
    failure = Failure(5, 1, 77, code, "ValueError: bad", "logs/rank-5.err")
    assert failure.exit_code == exit_code
    assert failure.reason == f"rank 5: {words}: ValueError: bad"
    assert failure.sentence == f"the program failed: {failure.reason} (local rank 1, pid 77, log logs/rank-5.err)"
    assert Failure(5, 1, 77, code).sentence == f"the program failed: rank 5: {words} (local rank 1, pid 77)"
