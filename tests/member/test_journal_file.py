"""The journal file of an agent: its place, its bounds, its lines, and that it never disturbs a run."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import stat
import threading

import msgspec
import pytest

import rdzv.aio
from rdzv.member import journal_file
from rdzv.member.journal_file import JournalFile, state_folder
from rdzv.member.notices import Notice

LONG_S = 20.0


def notice(kind="given", number=1, **fields):
    return Notice(kind, "job", number, "n1", "why", **fields)


def journal(folder, **options):
    return JournalFile(folder, "job/1", "n1", lambda: 5.0, lambda: "now", **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_has_a_header_and_a_line_per_notice_and_is_the_users_alone(tmp_path):
    one = journal(tmp_path / "new" / "folder")
    one(notice(rank=0, size=2, seconds=1.5))
    one(notice("lost", cause="lost"))
    one(notice("drained", cause="drained"))
    one(notice("drained"))
    one.close()
    assert re.fullmatch(rf"job-1_n1_{os.getpid()}(-\d+)?\.rdzv\.jsonl", one.path.name)
    assert journal(tmp_path).path.name != one.path.name, "two agents in one process"
    header, given, drained = lines_of(one.path)
    assert header == {
        "rdzv_journal": 1, "run_id": "job/1", "member": "n1", "pid": os.getpid(), "stamp": "now", "continued": False
    }  # fmt: skip
    assert (given["at"], given["stamp"], given["notice"]["seconds"]) == (0.0, "now", 1.5)
    assert drained["notice"]["kind"] == "drained"
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(one.path.parent.stat().st_mode) == 0o700


def test_a_notice_for_which_no_thread_can_be_started_does_not_stop_those_after_it(tmp_path, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    one = journal(tmp_path)
    monkeypatch.setattr(journal_file, "_writers", {})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):  # The notifier logs it.
        one(notice())
    assert not journal_file._writers, "lines would be given to a thread that never runs"
    one.close()


def test_nothing_is_made_before_the_first_notice(tmp_path):
    one = journal(tmp_path / "folder")
    one.close()
    assert not (tmp_path / "folder").exists()


def test_a_file_stays_within_its_size_and_has_the_newest_lines(tmp_path):
    one = journal(tmp_path, size_max=8000)
    for number in range(200):
        one(notice(number=number))
    one.close()
    old = one.path.with_name(f"{one.path.name}.old")
    assert sorted(tmp_path.iterdir()) == [one.path, old]
    assert one.path.stat().st_size + old.stat().st_size <= 8000
    assert lines_of(one.path)[0]["continued"] is True
    kept = [line["notice"]["round"] for path in (old, one.path) for line in lines_of(path)[1:]]
    assert kept == list(range(200 - len(kept), 200))


def test_only_so_many_files_are_kept_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_file, "FILES_MAX", 3)
    (tmp_path / "other").touch()
    for number in range(5):
        path = tmp_path / f"old{number}.rdzv.jsonl"
        path.touch()
        os.utime(path, (number, number))
    one = journal(tmp_path, own_folder=True)
    one(notice())
    one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["old3.rdzv.jsonl", "old4.rdzv.jsonl", one.path.name, "other"]
    )


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    one = journal(tmp_path / "file")
    one(notice())
    one(notice())
    one.close()
    assert caplog.text.count("cannot be written, and the run goes on without: ") == 1


def test_a_file_that_cannot_be_closed_ends_no_other_journal(tmp_path, monkeypatch, caplog):
    full, well = journal(tmp_path / "full"), journal(tmp_path / "well")
    full(notice())

    def closes_badly(_one):
        monkeypatch.undo()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(JournalFile, "_shut", closes_badly)
    full.close()
    assert full._over.is_set()
    assert "cannot be written, and the run goes on without: Input/output error" in caplog.text
    well(notice())
    well.close()
    assert len(lines_of(well.path)) == 2


def test_a_link_is_not_followed(tmp_path, caplog):
    one = journal(tmp_path)
    one.path.symlink_to(tmp_path / "elsewhere")
    one(notice())
    one.close()
    assert "cannot be written" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_that_hangs_holds_up_nobody(tmp_path, monkeypatch):
    hangs, really_open = threading.Event(), JournalFile._open

    def opens_late(one, **how):
        assert hangs.wait(LONG_S)
        really_open(one, **how)

    monkeypatch.setattr(journal_file, "CLOSE_S", 0.01)
    monkeypatch.setattr(JournalFile, "_open", opens_late)
    one = journal(tmp_path)
    one(notice())
    one.close()
    assert not one.path.exists()
    hangs.set()
    assert one._over.wait(LONG_S)
    assert len(lines_of(one.path)) == 2, "what was told is written when it can be"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_all_journals_of_a_process_have_one_thread_and_a_forked_process_has_its_own(tmp_path):
    files = [journal(tmp_path / f"{number}") for number in range(20)]
    for one in files:
        one(notice())
    assert [thread.name for thread in threading.enumerate()].count("rdzv journal") == 1
    child = os.fork()
    if not child:
        forked = journal(tmp_path / "forked")
        forked(notice())
        forked.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for one in files:
        one.close()
    assert all(len(lines_of(path)) == 2 for path in tmp_path.glob("*/*"))
    assert len(list(tmp_path.glob("*/*"))) == 21


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/rdzv"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/rdzv"),
        ({"HOME": "/h"}, "/h/.local/state/rdzv"),
        ({}, ""),
    ],
)
def test_the_state_folder_follows_the_rules_of_xdg(environ, folder):
    assert state_folder(environ) == folder


async def test_a_program_keeps_a_journal_if_it_names_a_folder(tmp_path):
    for folder in ("", str(tmp_path)):
        options = {"run_id": "job", "min_nodes": 1, "max_nodes": 1, "journal_dir": folder}
        async with rdzv.aio.Rendezvous("memory://", **options) as member:
            await member.join()
    (path,) = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    lines = [msgspec.json.decode(raw, type=journal_file.JournalLine) for raw in path.read_bytes().splitlines()[1:]]
    kinds = [line.notice.kind for line in lines]
    assert kinds[0] == "joining"
    assert kinds[-1] == "leaving"
    assert "given" in kinds
    assert lines[-1].notice.totals.rounds == 1
