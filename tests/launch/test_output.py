from __future__ import annotations

import os
import threading

import pytest

from rdzv.errors import SettingsError
from rdzv.launch.output import LINE_MAX, TAIL_MAX, Console, Destinations, LogFile, OutputCopy, PrefixedLines, log_folder

LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([b"one\ntwo\n"], b"> one\n> two\n"),
        ([b"o", b"ne", b"\n"], b"> one\n"),
        ([b"one\ntw", b"o\nthr", b"ee"], b"> one\n> two\n> three\n"),
        ([b"10%\r20%\r", b"done\n"], b"> 10%\r> 20%\r> done\n"),
        ([b"\n\n"], b"> \n> \n"),
        ([b"caf\xc3", b"\xa9\n\xff\n"], b"> caf\xc3\xa9\n> \xff\n"),
        ([], b""),
    ],
)
def test_each_line_gets_the_prefix_however_the_output_is_cut(parts, shown):
    lines = PrefixedLines(b"> ")
    assert b"".join(map(lines.feed, parts)) + lines.end() == shown


def test_a_line_without_end_is_shown_in_parts():
    lines = PrefixedLines(b"> ")
    assert lines.feed(b"x" * LINE_MAX) == b""
    assert lines.feed(b"yz") == b"> " + b"x" * LINE_MAX + b"yz\n"
    assert lines.end() == b""


class Broken:
    """A sink that takes nothing."""

    def write(self, data):
        raise OSError(28, "No space left on device")

    def close(self):
        raise AssertionError("it was given up")


def copied(data, sinks):
    copy = OutputCopy("stderr of rank 3", sinks)
    with open(copy.pipe, "wb", closefd=False) as pipe:
        pipe.write(data)
    copy.started()
    copy.finish(LIMIT_S)
    return copy


def test_output_goes_to_all_its_places_and_one_that_fails_stops_no_other(tmp_path, caplog):
    reader, writer = os.pipe()
    data = b"a line\n" * 50_000
    with open(reader, "rb") as pipe:  # noqa: PTH123
        shown = []
        reading = threading.Thread(target=lambda: shown.append(pipe.read()), daemon=True)
        reading.start()
        copy = copied(data, [Broken(), LogFile(tmp_path / "new" / "log"), Console(writer, threading.Lock(), "[3] ")])
        os.close(writer)
        reading.join(LIMIT_S)
    assert (tmp_path / "new" / "log").read_bytes() == data
    assert shown == [b"[3] a line\n" * 50_000]
    assert copy.tail == data[-TAIL_MAX:]
    assert [record.getMessage() for record in caplog.records] == [
        "the stderr of rank 3 is no longer written to one of its places: No space left on device"
    ]


def test_a_copy_without_a_thread_leaves_no_pipe(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    pipes, real = [], os.pipe
    monkeypatch.setattr(os, "pipe", lambda: pipes.append(real()) or pipes[-1])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        OutputCopy("stderr of rank 3", [])
    for end in pipes.pop():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_a_log_goes_on_where_an_earlier_run_of_the_same_id_ended(tmp_path):
    for text in (b"first\n", b"second\n"):
        copied(text, [LogFile(tmp_path / "log")])
    assert (tmp_path / "log").read_bytes() == b"first\nsecond\n"


@pytest.mark.parametrize(
    ("run_id", "folder"),
    [("job-17", "job-17"), ("a/../b c", "a-..-b-c-9f3fd56c"), ("..", "run-5ec1f7e7"), ("é", "run-4a99557e")],
)
def test_files_are_named_by_run_round_and_rank_and_stay_below_the_folder(run_id, folder):
    assert str(Destinations(run_id, "/logs").file(2, 5, "err")) == f"/logs/{folder}/round-2/rank-5.err"


@pytest.mark.parametrize(
    ("log_dir", "tee", "prefixed", "kinds", "copies_stdout"),
    [
        (False, False, False, [Console], False),
        (False, False, True, [Console], True),
        (True, False, True, [LogFile], True),
        (True, True, False, [Console, LogFile], True),
    ],
)
def test_the_options_choose_between_console_and_files(tmp_path, log_dir, tee, prefixed, kinds, copies_stdout):
    chosen = Destinations("job", str(tmp_path) if log_dir else "", tee=tee, prefixed=prefixed)
    sinks = chosen.sinks(1, 0, 2)
    assert [type(sink) for sink in sinks] == kinds
    assert chosen.copies_stdout is copies_stdout
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize("two", [("job/1", "job-1"), ("实验一", "实验二"), ("..", "run"), ("a b", "a/b"), ("\udcff", "\udcfe")])
def test_two_runs_never_share_a_folder_for_logs(tmp_path, two):
    files = [Destinations(run_id, str(tmp_path)).file(1, 0, "out") for run_id in two]
    assert files[0] != files[1]
    assert all(file.is_relative_to(tmp_path) and len(file.relative_to(tmp_path).parts) == 3 for file in files)


def test_a_folder_for_logs_is_made_or_refused_before_anything_runs(tmp_path):
    assert log_folder("") == ""
    assert log_folder(str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"--log-dir is .*file/x', where no file can be written: Not a directory"):
        log_folder(str(tmp_path / "file" / "x"))
