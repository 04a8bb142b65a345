"""Holes of the protocol's first draft that concern who lives, who is told what and what it costs, played with the real
member.

The numbers are those of the list of holes that the protocol was attacked with; T-numbers are those of docs/protocol.md.
"""

from __future__ import annotations

import msgspec
import pytest
from sim_form import count_traffic

from rdzv.core import member as core_member
from rdzv.core import member_events, wire
from rdzv.core.keys import Keys
from rdzv.core.member_rules import ChangeKind
from rdzv.core.member_state import Standing
from rdzv.core.model import Call, CauseKind
from rdzv.engines.embedded.frames import Renew
from rdzv.engines.port import Put
from rdzv.errors import Evicted, JoinTimeout, Unreachable
from rdzv.member import member as member_module
from rdzv.member import notifier, run_status
from rdzv.member.leader import Leader
from rdzv.member.presence import Presence
from rdzv.member.run_status import EXPLAIN_S
from rdzv.system.timers import sleep
from support.scripted_members import KEYS, leading
from support.scripted_simulation import EPSILON_S, Hands, by_hand, defect, tell

# ---- H12: a paused server condemns everyone


def an_unanswered_renewal_is_an_eviction():
    async def heartbeat(self):
        while True:
            await sleep(self.node, self.settings.lease / 3)
            try:
                await self.session.renew(self.lease)
            except Unreachable:
                self.emit(member_events.KeyGone("no answer"))
                return
            self.emit(member_events.Renewed(self.node.now()))

    return [(Presence, "heartbeat", heartbeat)]


@by_hand(
    min_nodes=3,
    max_nodes=3,
    catches={"outage is told at once": "was disturbed", an_unanswered_renewal_is_an_eviction: "was disturbed"},
)
async def test_h12_a_server_that_stops_for_three_leases_condemns_nobody(hands):
    """No member could renew meanwhile; the stall is credited to every lease, and what waits in the sockets is read first."""
    players = await hands.form("a", "b", "c")
    hands.fault("engine stall")
    hands.engine.pause()
    await hands.pass_time(18.0)
    hands.engine.resume()
    hands.fault("engine stall", stop=True)
    await hands.pass_time(30.0)
    for player in players:
        assert (player.kinds, player.is_in) == ([], True), f"{player.name} was disturbed"
    assert len(hands.heads) == 1, "the head was written in vain"


# ---- H20: a leader that is alive but stuck


def a_stuck_leader_renews_its_lease():
    return [(Leader, "idle", property(lambda _self: True, lambda _self, _value: None))]


@by_hand(min_nodes=3, max_nodes=4, lease=4.0, catches={a_stuck_leader_renews_its_lease: "did not happen within"})
async def test_h20_a_leader_that_is_stuck_loses_its_lease_and_another_leads(hands):
    """The leader's writes are never answered, its renewals are. But it renews only while its duty makes progress."""
    a, b, c, d = await hands.form("a", "b", "c", "d")
    gate = a.hold(leading)
    d.crash()
    stuck_at = await hands.until(lambda: gate.held)
    await hands.until(lambda: hands.leader != "a")
    # The last renewal comes up to a third of a lease after the last progress.
    assert hands.now - stuck_at < 4.0 * 4 / 3 * 1.02 + EPSILON_S
    await hands.until(lambda: b.told and c.told)
    await hands.until(lambda: a.told)
    assert a.kinds[-1] == "evicted"
    gate.open()
    await hands.until(lambda: a.is_in and b.is_in and c.is_in)
    assert (b.kinds, c.kinds) == (["round"], ["round"])
    assert sorted(hands.seated) == ["a", "b", "c"]


def a_failed_duty_keeps_the_lease():
    async def give_back(_self):
        pass

    return [(Presence, "give_back_lease", give_back)]


@by_hand(min_nodes=1, max_nodes=2, lease=4.0, catches={a_failed_duty_keeps_the_lease: "after a had failed"})
async def test_h20_a_duty_that_fails_gives_the_lease_back(hands):
    """A defect of ours in the leader's duty must not leave a leader that leads nobody: B leads within a moment, not a lease."""
    hands.accepted.append("a was told of an outage")
    a, b = await hands.form("a", "b")
    right = Leader._view
    hands.fault("defect", a)
    with defect(lambda: [(Leader, "_view", lambda self, mirror: 1 // (self._node is not a.node) and right(self, mirror))]):
        hands.start("c")
        failed_at = await hands.until(lambda: a.told)
    assert "ZeroDivisionError" in a.told[0].reason
    await hands.until(lambda: b.is_in and hands.sealed == 2)
    waited_s = hands.now - failed_at
    assert waited_s < 1.0, f"b led {waited_s} s after a had failed"


# ---- H21: nothing that grows with the number of members


def everybody_watches_everybody():
    right = Keys.watched_by
    return [(Keys, "watched_by", lambda self, *given: (*right(self, *given), KEYS.members))]


def costs(members):
    """Operations, messages and bytes of the busiest follower: to join, to be idle for a minute, to re-form."""
    hands = Hands(min_nodes=members - 1, max_nodes=members, grow="never")
    counters, found = count_traffic(hands.network), []

    def count(names):
        whats = ("operations", "received", "bytes")
        found.extend(max(getattr(counters[name], what) for name in names) for what in whats)
        for one in counters.values():
            one.operations = one.received = one.bytes = 0

    async def story():
        players = hands.start(*(f"m{number}" for number in range(members)))
        await hands.until(lambda: all(player.worlds for player in players))
        others = [player.name for player in players if player.name != hands.leader]
        await hands.pass_time(1.0)
        count(others)
        await hands.pass_time(60.0)
        count(others)
        # One that somebody watches, who then looks again: that is part of the cost.
        watched = {player.member.presence.predecessor for player in players}
        gone = next(hands.players[name] for name in others if hands.players[name].key.key in watched)
        gone.crash()
        others = [name for name in others if name not in (gone.name, hands.leader)]
        await hands.until(lambda: all(hands.players[name].holds(2) for name in others))
        count(others)

    hands.loop.run(story())
    assert not hands.wrong()
    return found


@pytest.mark.seeds
def test_h21_what_a_member_costs_does_not_grow_with_the_number_of_members():
    """Twenty, forty or eighty: everybody watches the head, its own key and one who came earlier, and nobody all members."""
    few, more, many = (costs(members) for members in (20, 40, 80))
    for one, two, four in zip(few, more, many, strict=True):
        assert two <= one * 1.1 + 2, (few, more, many)
        assert four <= one * 1.1 + 2, (few, more, many)


@pytest.mark.seeds
def test_h21_costs_that_grow_would_be_seen():
    """If all members watched all others, eighty members would be told four times as much as twenty."""
    with defect(everybody_watches_everybody):
        few, many = costs(20), costs(80)
    assert many[1] > 3 * few[1]
    assert many[2] > 2 * few[2]


# ---- H27: the server knows more than a member's clock


def own_key_is_not_compared():
    async def put(self, **changes):
        self.record = msgspec.structs.replace(self.record, **changes)
        await self.session.txn(then=[Put(self.keys.member(self.id), wire.encode(self.record))])

    return [(Presence, "put_record", put)]


@by_hand(min_nodes=2, max_nodes=3, catches={own_key_is_not_compared: "expected Evicted"})
async def test_h27_a_member_whose_connection_broke_unnoticed_is_not_saved_by_its_clock(hands):
    """The server saw its connection end and dropped it after the linger; the member saw nothing and by its own clock
    has seconds left. What it says then is refused: truth is the compare."""
    a, c = hands.start("a", "c")
    b = hands.player("b")
    await hands.all(b.join())
    await hands.until(lambda: a.is_in and c.is_in)
    session = b.member.presence.session
    connection = session._link.transport.connection
    hands.fault("half open", b)
    hands.engine.hung_up(connection)
    await hands.until(lambda: b.key is None)
    assert b.member.presence.is_fresh
    assert b.member.changed is None
    hands.loop.call_soon(connection.client_lost, "the connection is lost", context=b.node.context)
    await hands.pass_time(0.0001)
    assert session._link is None
    await hands.raises(Evicted, b.done())
    await hands.until(lambda: a.holds(2) and c.holds(2))
    assert b.key is None


# ---- H29: notices


def every_head_is_a_notice():
    right = notifier.about_head
    return [(notifier, "about_head", lambda run_id, member, _old, new: right(run_id, member, None, new))]


@by_hand(min_nodes=2, max_nodes=3, catches={every_head_is_a_notice: "noticed twice"})
async def test_h29_each_phase_of_a_round_is_noticed_once_however_often_it_is_seen(hands):
    """Watches break off, connections are lost, timers are set in the head: none of that is another notice."""
    a, b = await hands.form("a", "b")
    for _ in range(4):
        hands.fault("watch gap")
        hands.engine.drop_watches()
        hands.fault("watch gap", stop=True)
        await hands.pass_time(0.2)
        hands.fault("reset all")
        hands.network.reset()
        hands.fault("reset all", stop=True)
        await hands.pass_time(0.5)
        if hands.sealed == 1 and len(hands.players) == 2:
            hands.start("c")
    await hands.until(lambda: a.is_in and b.is_in and hands.sealed == 2)
    for player in (a, b):
        seen = [(one.kind, one.round) for one in player.notices if one.kind in ("sealed", "broken", "closed")]
        assert seen == [("sealed", 1), ("broken", 1), ("sealed", 2)], f"noticed twice: {seen}"


def a_leader_sees_the_head_first():
    return [(Leader, "_show", lambda self, mirror, revision: self._presence.show_head(mirror.head_item, revision))]


@by_hand(min_nodes=2, max_nodes=4, seeds=8, catches={a_leader_sees_the_head_first: "heard before"})
async def test_h29_a_member_paused_for_longer_than_its_lease_hears_of_its_eviction_first(hands):
    """The others have broken the round and sealed the next meanwhile. A led, C did not; neither hears of anything of
    that before it hears that it was evicted."""
    a, b, c, d = await hands.form("a", "b", "c", "d")
    known = {player: len(player.notices) for player in (a, c)}
    # C first: if A were lost while C's key still stood, that would be what C hears first, and rightly so.
    c.pause()
    await hands.pass_time(2.5)
    a.pause()
    await hands.until(lambda: b.is_in and d.is_in and hands.sealed > 1)
    await hands.pass_time(5.0)
    a.resume()
    c.resume()
    await hands.until(lambda: a.told and c.told)
    for player in (a, c):
        assert player.kinds[0] == "evicted", f"{player.told[0]} was heard before the eviction"
        heard = [notice.kind for notice in player.notices[known[player] :]]
        assert heard[0] == "evicted", f"{heard[0]} was heard before the eviction"
    await hands.until(lambda: all(player.is_in for player in (a, b, c, d)))


def every_silence_is_an_outage():
    def away_s(state, now):
        return now - state.renewed_at if state.standing is Standing.PRESENT else 0.0

    return [(core_member, "away_s", away_s)]


@by_hand(min_nodes=2, max_nodes=4, seeds=8, outage_grace=15.0, catches={every_silence_is_an_outage: "heard before"})
async def test_h29_a_member_paused_for_longer_than_the_grace_hears_of_its_eviction_first(hands):
    """The engine has not answered for longer than outage_grace by the member's clock; but the member stood still. A was
    stopped while it waited for an answer, C's connection breaks as it wakes up: neither says anything of the engine."""
    a, b, c, d = await hands.form("a", "b", "c", "d")
    c.pause()

    def stop(actor, frame):
        if actor == "a" and isinstance(frame, Renew) and a.node.held is None:
            a.pause()

    hands.engine.arrivals.append(stop)
    await hands.until(lambda: a.node.held is not None)
    hands.engine.arrivals.remove(stop)
    await hands.pass_time(40.0)
    hands.network.reset(c.node)
    a.resume()
    c.resume()
    await hands.until(lambda: a.told and c.told)
    for player in (a, c):
        assert player.kinds[0] == "evicted", f"{player.told[0]} was heard before the eviction"
    await hands.until(lambda: all(player.is_in for player in (a, b, c, d)))


# ---- outages


@by_hand(min_nodes=2, max_nodes=2, outage_grace=30.0, catches={"outage is told at once": "was disturbed"})
async def test_an_outage_shorter_than_the_grace_is_told_nobody(hands):
    """The engine is gone for twenty seconds and comes back empty; both go on with their round as if nothing had been."""
    a, b = await hands.form("a", "b")
    hands.fault("engine crash")
    hands.engine.crash()
    await hands.pass_time(20.0)
    hands.engine.restart()
    hands.fault("engine crash", stop=True)
    await hands.pass_time(40.0)
    for player in (a, b):
        assert (player.kinds, player.is_in) == ([], True), f"{player.name} was disturbed"
    assert "engine away" in [notice.kind for notice in a.notices]


@by_hand(min_nodes=2, max_nodes=2, outage_grace=30.0, catches={"outage is told at once": "was disturbed"})
async def test_an_engine_that_nobody_can_reach_for_a_while_forgets_nobody(hands):
    """The engine keeps its memory, and cannot tell its own isolation from the death of all members. Then all are back."""
    a, b = await hands.form("a", "b")
    a.cut()
    b.cut()
    await hands.pass_time(20.0)
    a.heal()
    b.heal()
    await hands.pass_time(40.0)
    for player in (a, b):
        assert (player.kinds, player.is_in) == ([], True), f"{player.name} was disturbed"
    assert len(hands.heads) == 1


def an_outage_is_never_told():
    right = core_member.Change
    return [(core_member, "Change", lambda kind, reason: None if kind is ChangeKind.OUTAGE else right(kind, reason))]


@by_hand(min_nodes=2, max_nodes=2, outage_grace=10.0, catches={an_outage_is_never_told: "did not happen within"})
async def test_an_outage_longer_than_the_grace_is_told(hands):
    """The workers are stopped then. When the engine is back, the members form the next round."""
    hands.accepted.append("was told of an outage")
    a, b = await hands.form("a", "b")
    hands.fault("engine crash")
    hands.engine.crash()
    gone_at = hands.now
    await hands.until(lambda: a.told and b.told, 20.0)
    assert (a.kinds, b.kinds) == (["outage"], ["outage"])
    # Counted from the last renewal, which was at most a third of a lease before.
    assert all(10.0 * 0.98 - 2.1 < at - gone_at < 10.0 * 1.02 + 2.0 for at in (*a.told_at, *b.told_at))
    assert "the engine has been away for" in a.told[0].reason
    await hands.pass_time(10.0)
    hands.engine.restart()
    hands.fault("engine crash", stop=True)
    await hands.until(lambda: a.is_in and b.is_in)
    assert (a.rounds, b.rounds) == ([1, 2], [1, 2])


@by_hand(min_nodes=2, max_nodes=2)
async def test_joining_while_the_engine_is_away_ends_at_its_deadline(hands):
    """The error says that the engine is missing, not members."""
    hands.fault("engine crash")
    hands.engine.crash()
    a = hands.player("a")
    late = await hands.raises(JoinTimeout, a.join(timeout_s=8.0))
    assert "the engine is away" in late.reason
    assert 8.0 * 0.98 < hands.now < 8.0 * 1.02 + EPSILON_S


def who_finds_nobody_rests():
    return [(member_module, "PAUSE_S", (0.5, 0.5))]


@by_hand(min_nodes=1, max_nodes=1, catches={who_finds_nobody_rests: "it looked too late"})
async def test_who_comes_a_moment_before_the_engine_is_in_a_moment_after_it(hands):
    """Nodes of a job are started together, and the one that serves is not always the first."""
    hands.engine.crash()
    a = hands.player("a")
    joining = a.join()
    await hands.pass_time(0.05)
    hands.engine.restart()
    back_at = hands.now
    await hands.all(joining)
    assert hands.now - back_at < 0.2, "it looked too late"


def an_explanation_is_waited_for():
    return [(run_status, "EXPLAIN_S", 60.0)]


@by_hand(min_nodes=2, max_nodes=2, catches={an_explanation_is_waited_for: "took too long to explain itself"})
async def test_a_join_whose_engine_falls_silent_before_its_deadline_ends_soon_after_it(hands):
    """The member would name who is missing, but cannot ask."""
    a = hands.player("a")
    joining = a.join(timeout_s=8.0)
    await hands.until(lambda: a.key is not None)
    await hands.pass_time(7.0)
    hands.fault("engine stall")
    hands.engine.pause()
    late = await hands.raises(JoinTimeout, joining)
    assert hands.now < (8.0 + EXPLAIN_S) * 1.02 + EPSILON_S, "it took too long to explain itself"
    assert "the engine does not answer" in late.reason
    hands.engine.resume()
    hands.fault("engine stall", stop=True)


# ---- one-way partitions


@pytest.mark.seeds
@pytest.mark.parametrize("victim", ["a", "c"], ids=["leader", "follower"])
@pytest.mark.parametrize("way", ["requests", "answers"])
def test_a_partition_in_one_direction_is_a_loss_for_the_others_and_an_eviction_for_the_victim(way, victim):
    """Whether what it says or what it is told gets lost: the others go on without it, and it hears of nothing but that.

    A leader that is not answered cannot know what became of its writes, and reads before it decides again.
    """

    async def story(hands):
        players = await hands.form("a", "b", "c", "d")
        cut = hands.players[victim]
        others = [player for player in players if player is not cut]
        cut.cut(way)
        cut_at = hands.now
        await hands.until(lambda: all(player.is_in for player in others) and hands.sealed == 2)
        # A connection that is not answered is given up after ten seconds, and only then nothing renews the lease any
        # more.
        assert hands.now - cut_at < (10.0 if way == "answers" else 0.0) + 6.0 * 1.02 + 1.0 + EPSILON_S
        assert cut.kinds == [], "it knew of nothing"
        await hands.pass_time(20.0)
        cut.heal(way)
        await hands.until(lambda: all(player.is_in for player in players))
        assert cut.kinds == ["evicted"]
        assert [player.kinds for player in others] == [["round", "round"]] * 3
        assert hands.breaks()[0][1].cause.kind is CauseKind.LOST

    for seed in range(1, 4):
        tell(story, {"seed": seed, "min_nodes": 2, "max_nodes": 4})


# ---- clocks


@by_hand(
    min_nodes=2, max_nodes=4, last_call=6.0,
    catches={"last-call age is taken from another machine's clock": "the last call took"},
)  # fmt: skip
async def test_clocks_that_drift_apart_disturb_nobody(hands):
    """One runs a fifth slow, one a quarter fast, and all began billions of seconds apart. The last call is measured by
    the leader's own clock, also by one that took over; leases are measured by the engine's; and nobody is taken for
    lost."""
    rates = {"a": 1.25, "b": 0.8, "c": 1.0, "d": 1.25}
    a, *others = [hands.player(name, rate=rate) for name, rate in rates.items()]
    await hands.come(a, *others[:2])
    began_at = await hands.until(lambda: hands.head is not None and hands.head.call is Call.LAST)
    rest_s = 6.0 - hands.head.waited
    a.crash()
    others[2].start()
    await hands.until(lambda: hands.sealed == 1)
    took_s = hands.now - began_at
    assert abs(took_s - rest_s / rates["b"]) < 0.2, f"the last call took {took_s} s"
    await hands.until(lambda: all(player.is_in for player in others))
    await hands.pass_time(180.0)
    assert [(player.kinds, player.is_in) for player in others] == [([], True)] * 3
