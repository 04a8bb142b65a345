"""Credentials: unusable files are named in the error, and a process that outlives this one gets what it needs."""

from __future__ import annotations

import os

import msgspec
import pytest

from rdzv.engines.etcd.client.channels import Files
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.errors import SettingsError


def test_the_error_names_an_unusable_file(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(SettingsError, match=r"^tls_ca is '.*missing', which cannot be read: No such file or directory "):
        Credentials(tls=True, ca=missing).files()
    long = tmp_path / "long"
    long.write_bytes(b"x" * 5000)
    with pytest.raises(SettingsError, match=r"^token_file has 5000 bytes, a password at most 4096 "):
        Credentials(user="me", password_file=str(long)).login()


def test_files_in_the_memory_of_a_process_are_given_by_content_to_one_that_outlives_it(tmp_path):
    file = os.memfd_create("key")
    os.write(file, b"secret")
    path = f"/proc/{os.getpid()}/fd/{file}"
    here = Credentials(tls=True, ca=path, cert=path, key=path)
    given = msgspec.msgpack.decode(msgspec.msgpack.encode(here.outliving()), type=Credentials)
    os.close(file)
    assert given.files() == Files(b"secret", b"secret", b"secret")
    assert "secret" not in repr(given)
    (tmp_path / "key").write_bytes(b"old")
    on_disk = Credentials(tls=True, ca=str(tmp_path / "key"), key=str(tmp_path / "key")).outliving()
    (tmp_path / "key").write_bytes(b"renewed")
    assert on_disk.files() == Files(b"renewed", b"renewed", None), "files on disk are read when they are used"
