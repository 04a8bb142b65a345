"""Versions of etcd: how they are read, and which are new enough."""

from __future__ import annotations

import pytest

from rdzv.engines.etcd.client.diagnose import too_old, version_of


@pytest.mark.parametrize(
    ("version", "enough"), [("3.4.0", True), ("3.6.1-rc.0", True), ("4.0.0", True), ("3.3.27", False), ("", False)]
)
def test_versions_from_3_4_on_are_enough(version, enough):
    assert (too_old(version) == "") is enough


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"no", b'{"a":' + b"[" * 8000 + b"]" * 8000 + b"}"])
def test_a_reply_that_is_not_etcds_has_no_version(body):
    assert version_of(body) == ""
