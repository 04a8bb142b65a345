"""Additions to the protocol: both sides name what they know, and a peer of release 0.1.0 is met as ever."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rdzv.engines.embedded import features, frames
from rdzv.engines.embedded.features import FEATURES
from support.releases import ROOT, previous_source, running
from support.sans_io import Core, Pair

NEW = ROOT / "src"


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    return previous_source(tmp_path_factory.mktemp("previous"))


def test_client_and_server_tell_each_other_which_additions_they_know():
    pair = Pair(Core(), features.mark("s"))
    assert pair.session.session == "s"
    assert pair.session.features == FEATURES
    assert pair.client.features == FEATURES
    assert pair.welcome.features == tuple(sorted(FEATURES))


def test_an_addition_is_used_only_if_both_know_it():
    pair = Pair(Core(), features.mark("s", frozenset({"made_up", *FEATURES})))
    assert pair.session.features == FEATURES
    assert Pair(Core(), features.mark("s", frozenset())).session.features == frozenset()


def test_a_client_without_a_mark_gets_the_welcome_of_release_0_1_0():
    core = Core()
    session = Pair(core).session
    assert (session.session, session.features) == ("s", None)
    sent = core._welcome(session, "i")
    assert type(sent) is frames.Welcome
    assert len(msgspec.msgpack.decode(frames.encoder.encode(sent))) == 1 + 12


def test_a_welcome_without_features_is_that_of_a_server_of_release_0_1_0():
    sent = frames.encoder.encode(frames.Welcome("s", "i", "p", 1, 1))
    assert features.welcome_decoder.decode(sent).features is None


def test_a_session_that_comes_back_is_known_by_its_id_whatever_it_names():
    core = Core()
    first = Pair(core, features.mark("s"), attempt=1)
    Pair(core, features.mark("s", frozenset({"more"})), attempt=2)
    assert first.session.transport.closed
    assert list(core.runs["job"].sessions) == ["s"]


def rounds_of(members):
    return sorted([int(word) for word in member.line()] for member in members)


@pytest.mark.parametrize("server", ["old", "new"])
def test_members_of_both_releases_form_rounds_on_a_server_of_either(old, server):
    sources = {"old": old, "new": NEW}
    with running((sources[server], ("serve",))) as (serving,):
        (endpoint,) = serving.line()
        # Two of each: the leader may be of either release, and follows are led by the other one.
        with running(*((source, ("member", endpoint, "4")) for source in (old, NEW, NEW, old))) as members:
            for number in (1, 2):
                assert rounds_of(members) == [[number, rank, 4, (rank + 1) % 4] for rank in range(4)]
                for member in members:
                    member.go_on()
            rounds_of(members)
