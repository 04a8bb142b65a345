"""Additions to the protocol: both sides name what they know, and a peer of release 0.1.0 is met as ever."""

from __future__ import annotations

import msgspec

from rdzv.engines.embedded import features, frames
from rdzv.engines.embedded.client import RemoteWatch
from rdzv.engines.embedded.features import FEATURES
from rdzv.engines.port import Batch, Event, Item
from support.sans_io import Core, Pair


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


class Link:
    """A connection to a server with these features, as a watch sees it."""

    def __init__(self, *known):
        self.features, self.told = frozenset(known), []
        self.tell = self.told.append


def test_a_server_of_release_0_1_0_watches_everything_and_the_client_drops_the_puts():
    watch, link = RemoteWatch(lambda _: None, 3, ("head",), 5, ("own",)), Link()
    watch.start(link)
    assert link.told == [frames.WatchStart(3, ("head", "own"), 5)]
    put, end = Event("own", 6, Item("own", b"", 6, 6)), Event("own", 7, None)
    watch.deliver(Batch(6, (put,)))
    assert (watch.take(), watch.seen) == (None, 6)
    watch.deliver(Batch(7, (Event("head", 7, Item("head", b"", 7, 7)), end)))
    assert [event.key for event in watch.take().events] == ["head", "own"]


def test_a_watch_that_began_with_a_transaction_goes_on_by_another_connection_with_what_was_found():
    watch, link = RemoteWatch(lambda _: None, 3, ("head",), 0, ("own",), begun=False), Link(features.WATCH)
    watch.begin(9, ("found",))
    watch.start(link)
    assert link.told == [features.EndsWatchStart(3, ("head",), 9, ("own", "found"))]
