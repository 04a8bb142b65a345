"""A file as a register, in a directory that others can write to."""

from __future__ import annotations

import os

import pytest

from rdzv.engines.register.file import FileBackend


def test_a_link_in_place_of_the_new_file_is_not_followed(tmp_path):
    mine = tmp_path / "my notes"
    mine.write_text("dear diary")
    backend = FileBackend(str(tmp_path / "run"))
    (tmp_path / "run.new").symlink_to(mine)
    assert backend.set_state(b"one") == (b"one", b"one", True)
    assert mine.read_text() == "dear diary"
    assert not (tmp_path / "run").is_symlink()
    assert (tmp_path / "run").read_bytes() == b"one"


def test_a_link_that_comes_at_the_last_moment_is_refused(tmp_path, monkeypatch):
    mine = tmp_path / "my notes"
    mine.write_text("dear diary")
    backend = FileBackend(str(tmp_path / "run"))
    real = os.open

    def late(path, *args, **more):
        if str(path).endswith(".new"):
            path.symlink_to(mine)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(FileExistsError):
        backend.set_state(b"one")
    assert mine.read_text() == "dear diary"


def test_a_link_in_place_of_the_lock_is_refused(tmp_path):
    (tmp_path / "run.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileBackend(str(tmp_path / "run")).set_state(b"one")
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    (tmp_path / "run.new").write_bytes(b"half a sta")
    backend = FileBackend(str(tmp_path / "run"))
    assert backend.set_state(b"one") == (b"one", b"one", True)
    assert backend.get_state() == (b"one", b"one")


def test_a_process_forked_during_a_write_does_not_keep_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("rdzv.engines.register.file.LOCK_S", 0.1)
    backend = FileBackend(str(tmp_path / "run"))
    reader, writer = os.pipe()
    with backend._locked():
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)  # Until the test ends.
            os._exit(0)
    try:
        assert backend.set_state(b"one") == (b"one", b"one", True)
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)
