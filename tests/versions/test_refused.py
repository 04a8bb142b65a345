"""A version that cannot meet another is refused, and the sentence names both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.member_processes import Process, ProcessSet, is_change
from support.releases import OLD, MixedRun, Release, on, program

PROTOCOL = ("rdzv.engines.embedded.frames", "VERSION = 2", "VERSION = 3")
RECORDS = ("rdzv.core.wire", "VERSION = 1", "VERSION = 2")
REGISTER = ("rdzv.engines.register.document", "VERSION = 1", "VERSION = 2")
SENTENCE = "it is of version {there}, this is version {own}: all members of a run need one version"
SPEAKS = "it speaks protocol version {there} of rdzv, this is version {own}: all need one version of rdzv"


def refusal(member: Process) -> str:
    return member.until(lambda line: line["event"] == "refused", "that it is refused")["error"]


def test_a_client_of_a_later_protocol_is_told_both_versions_and_so_is_the_operator_of_the_server(processes: ProcessSet):
    server, endpoint = processes.serve(on=on(OLD))
    run = MixedRun(processes, endpoint, "1:2", "join_timeout=2")
    assert SPEAKS.format(there=2, own=3) in refusal(run.member("a", PROTOCOL))
    assert SPEAKS.format(there=3, own=2) in server.errors()


def test_a_client_of_the_previous_release_is_told_the_version_of_a_later_server(processes: ProcessSet):
    server, endpoint = processes.serve(on=on(PROTOCOL), before=program(PROTOCOL))
    run = MixedRun(processes, endpoint, "1:2", "join_timeout=2")
    assert SPEAKS.format(there=3, own=2) in refusal(run.member("a", OLD))
    assert SPEAKS.format(there=2, own=3) in server.errors()


@pytest.mark.parametrize("here", [OLD, RECORDS], ids=["later", "earlier"])
def test_a_member_with_records_of_another_version_is_refused_and_the_run_goes_on(processes: ProcessSet, here: Release):
    _, endpoint = processes.serve()
    run = MixedRun(processes, endpoint, "1:3")
    run.member("a", here)
    first = run.round("a")
    comes, there, own = (RECORDS, 1, 2) if here == OLD else (OLD, 2, 1)
    assert SENTENCE.format(there=there, own=own) in refusal(run.member("b", comes))
    run.member("c", here)
    run.round("a", "c", after=first)
    assert not run.members["a"].said(is_change("refused", "closed", "evicted"))


@pytest.mark.parametrize("here", [OLD, REGISTER], ids=["later", "earlier"])
def test_a_member_that_finds_a_register_of_another_version_is_refused(processes: ProcessSet, tmp_path: Path, here: Release):
    run = MixedRun(processes, f"file://{tmp_path}/register", "1:2", "lease=10")
    run.member("a", here)
    run.round("a")
    if here == OLD:
        assert SENTENCE.format(there=1, own=2) in refusal(run.member("b", REGISTER))
    else:  # Release 0.1.0 shows only the version that it found.
        assert "register 2" in refusal(run.member("b", OLD))
