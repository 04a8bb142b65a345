"""Credentials: unusable files are named in the error."""

from __future__ import annotations

import pytest

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
