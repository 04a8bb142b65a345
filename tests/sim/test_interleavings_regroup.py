"""Interleavings that broke drafts of the protocol: the end of a round and the next one. Played with the real member.

H- and T-numbers are those of docs/protocol.md.
"""

from __future__ import annotations

import msgspec

from rdzv.core import rules, wire
from rdzv.core.member_rules import ChangeKind
from rdzv.core.member_state import Standing
from rdzv.core.model import Call, CauseKind, Phase
from rdzv.core.model import MemberRecord as Record
from rdzv.core.view import View
from rdzv.engines.port import Created, Get, Put
from rdzv.errors import Closed, Drained, Evicted, RoundOver
from rdzv.member.member import Member
from rdzv.member.presence import Presence
from rdzv.operate import commands
from support.scripted_members import KEYS, closing, record
from support.scripted_simulation import EPSILON_S, by_hand, in_rules, with_settings

# ---- H7: stragglers


def stragglers_are_waited_for_without_end():
    hour = {rule: with_settings(rule, regroup=3600.0) for rule in (rules.evict_stragglers, rules.keep_waiting)}
    return [in_rules(hour)]


@by_hand(min_nodes=2, max_nodes=4, regroup=8.0, catches={stragglers_are_waited_for_without_end: "did not happen within"})
async def test_h07_a_straggler_is_evicted_after_a_while_and_comes_back_as_new(hands):
    """B's agent hangs and keeps its lease. After regroup its key is deleted, and only then round 2 is sealed (T8)."""
    a, c, d = hands.start("a", "c", "d")
    b = hands.player("b")
    await hands.all(b.join())
    b.stop_s = 20.0
    d.crash()
    broken_at = await hands.until(lambda: hands.phase is Phase.BROKEN)
    sealed_at = await hands.until(lambda: hands.sealed == 2)
    waited_s = sealed_at - broken_at
    assert 8.0 * 0.98 < waited_s < 8.0 * 1.02 + EPSILON_S, f"sealed after {waited_s} s, when b was to be evicted after 8"
    assert b.key is None, "it was left out and yet stays present"
    await hands.until(lambda: a.is_in and c.is_in)
    await hands.until(lambda: b.look().kind is ChangeKind.EVICTED)
    assert "workers not stopped within 8 s" in b.look().reason
    await hands.pass_time(20.0)
    assert (hands.sealed, a.rounds) == (2, [1, 2])
    world, *_ = await hands.all(b.join())
    assert (world.round, hands.seated) == (3, ["a", "c", "b"])


# ---- H8: a close by somebody who has no say any more


def members_close_like_operators():
    async def close_run(self, reason=""):
        session = await self.driver.connect()
        await commands.close(session, self.run_id, reason, self.state.me.name)

    return [(Member, "close_run", close_run)]


@by_hand(min_nodes=2, max_nodes=4, regroup=8.0, catches={members_close_like_operators: "expected Evicted"})
async def test_h08_an_evicted_member_cannot_close_the_run(hands):
    """B sits in its exit barrier while the others evict it and go on; then it is finished and closes (T11)."""
    a, c, d = hands.start("a", "c", "d")
    b = hands.player("b")
    await hands.all(b.join())
    d.crash()
    await hands.until(lambda: hands.sealed == 2 and b.key is None)
    await hands.until(lambda: b.member.state.standing is Standing.EVICTED)
    await hands.raises(Evicted, b.close())
    await hands.pass_time(1.0)
    assert hands.phase is Phase.SEALED
    assert (a.kinds, c.kinds) == (["round"], ["round"])


def a_close_compares_no_key():
    return [(Presence, "own_guard", property(lambda _presence: Created("no such key", 0)))]


@by_hand(min_nodes=2, max_nodes=3, catches={a_close_compares_no_key: "expected Evicted"})
async def test_h08_a_member_evicted_while_its_close_is_under_way_cannot_close(hands):
    """B was present when it sent the close. The close compares B's key at the moment it would take effect."""
    a, c = hands.start("a", "c")
    b = hands.player("b")
    await hands.all(b.join())
    hands.before(closing, lambda _: b.expire())
    await hands.raises(Evicted, b.close())
    await hands.until(lambda: a.holds(2) and c.holds(2))
    assert hands.phase is Phase.SEALED


def any_round_may_be_closed():
    right = Presence.close_run
    return [(Presence, "close_run", lambda self, cause, _holds: right(self, cause, None))]


@by_hand(min_nodes=2, max_nodes=4, catches={any_round_may_be_closed: "expected RoundOver"})
async def test_h08_a_member_that_was_done_cannot_close_a_later_round(hands):
    """A is done with round 1, and alive; the others had to go on without it. Its round is not the head's."""
    a = hands.player("a")
    joining = a.join()
    b, c, d = hands.start("b", "c", "d")
    await hands.all(joining)
    await hands.until(lambda: b.is_in and c.is_in and d.is_in)
    await hands.all(a.done())
    d.crash()
    await hands.until(lambda: b.holds(2) and c.holds(2))
    await hands.raises(RoundOver, a.close())
    assert hands.phase is Phase.SEALED
    assert (b.kinds, c.kinds) == (["round"], ["round"])


# ---- H22: several writers of one key


def an_operator_writes_the_members_record():
    async def drain(session, run_id, who, reason):
        listed = await session.txn(then=[commands.List(KEYS.members)])
        for item in listed.reads[0]:
            one = wire.decode(Record, item.value)
            if one.name == who:
                await session.txn(then=[Get(KEYS.settings)])
                await session.txn(then=[Put(item.key, wire.encode(msgspec.structs.replace(one, drain=reason)))])
        return [who]

    return [(commands, "drain", drain)]


@by_hand(min_nodes=2, max_nodes=3, catches={an_operator_writes_the_members_record: "expected Drained"})
async def test_h22_an_operators_drain_and_the_members_own_put_do_not_undo_each_other(hands):
    """The two cross: the operator asks while the member's ready put is under way. The request has a key of its own."""
    a, c = hands.start("a", "c")
    b = hands.player("b")
    await hands.all(b.join())
    own = b.hold(record)
    joining = b.join()
    await hands.until(lambda: own.held)
    lease = b.key.lease
    asking = hands.operate("drain", "b", "maintenance")
    await hands.until(lambda: asking.done() or hands.read(commands.List(KEYS.asks)).reads[0])
    own.open()
    assert await asking == ["b"]
    await hands.raises(Drained, joining)
    await hands.until(lambda: a.holds(2) and c.holds(2))
    assert hands.seated == ["a", "c"]
    assert b.key.lease == lease, "its lease was dropped"
    await hands.all(b.leave())
    assert b.key is None
    await hands.pass_time(1.0)
    assert (a.rounds, c.rounds) == ([1, 2], [1, 2])


def an_ask_is_not_heard():
    return [(View, "is_draining", lambda _view, live: bool(live.record.drain))]


@by_hand(min_nodes=2, max_nodes=3, catches={an_ask_is_not_heard: "sealed in: a, b, c"})
async def test_h22_a_member_asked_to_drain_after_its_ready_put_is_not_in_the_next_round(hands):
    """The other way round: its put has arrived, then the ask; the leader sees both, in two keys."""
    a, c = hands.start("a", "c")
    b = hands.player("b")
    await hands.all(b.join())
    a.stop_s = 3.0
    joining = b.join()
    await hands.until(lambda: b.record.left.number == 1)
    hands.put_ask(b, "maintenance")
    await hands.raises(Drained, joining)
    await hands.until(lambda: a.holds(2) and c.holds(2))
    assert hands.seated == ["a", "c"], f"sealed in: {', '.join(hands.seated)}"


# ---- H24: what a member is told is a function of the present


@by_hand(min_nodes=2, max_nodes=4, catches={"ready is not tied to a round": "told once|did not happen"})
async def test_h24_a_second_loss_while_the_first_is_dealt_with_costs_no_second_restart(hands):
    """D is lost, and while B stops its workers C is lost too: one break, one notice, one new round."""
    a, b, c, d = await hands.form("a", "b", "c", "d")
    b.stop_s = 4.0
    d.crash()
    await hands.until(lambda: a.told and b.told)
    await hands.pass_time(1.0)
    c.crash()
    await hands.until(lambda: a.is_in and b.is_in)
    await hands.pass_time(10.0)
    assert (a.kinds, a.rounds, b.kinds, b.rounds) == (["round"], [1, 2], ["round"], [1, 2]), "not told once"
    assert hands.seated == ["a", "b"]


@by_hand(min_nodes=2, max_nodes=3, settle=4.0, catches={"spare disturbs the round": "told of a spare"})
async def test_h24_nobody_is_told_of_newcomers_that_are_not_let_in(hands):
    """No notice while newcomers gather, nor when they leave before that is over, nor when there is no room for them."""
    a, b = await hands.form("a", "b")
    (c,) = await hands.come("c")
    await hands.pass_time(1.0)
    c.crash()
    await hands.pass_time(10.0)
    assert (a.kinds, b.kinds, hands.sealed) == ([], [], 1)
    hands.start("d")
    await hands.until(lambda: a.holds(2) and b.holds(2))
    hands.start("e", "f")
    await hands.pass_time(10.0)
    assert (a.kinds, b.kinds, hands.sealed) == (["round"], ["round"], 2), "told of a spare"


# ---- H25: leaving after success looks like a loss


def a_line_is_not_marked():
    right = Presence.go
    return [(Presence, "go", lambda self, table, _entry: right(self, table, None))]


@by_hand(min_nodes=2, max_nodes=2, catches={a_line_is_not_marked: "disturbed in its last step"})
async def test_h25_a_member_that_is_done_and_goes_is_not_lost(hands):
    """A marks its entry as it leaves. B, in its last step, hears nothing. When B is done too, the run closes with success."""
    a, b = await hands.form_by_hand("a", "b")
    await hands.all(a.done())
    await hands.all(a.leave())
    assert a.key is None
    await hands.pass_time(5.0)
    assert (b.told, hands.phase) == ([], Phase.SEALED), "b was disturbed in its last step"
    await hands.all(b.done())
    await hands.until(lambda: hands.phase is Phase.CLOSED)
    assert hands.head.cause.kind is CauseKind.SUCCESS
    await hands.pass_time(1.0)
    assert b.member.changed is None
    closed = await hands.raises(Closed, b.join())
    assert closed.success


@by_hand(min_nodes=1, max_nodes=2, catches={"loss is not published": "did not happen within"})
async def test_h25_a_run_whose_members_all_crashed_goes_on_with_the_next_number(hands):
    """The head stays sealed. Who comes next leads, breaks it, and forms round 2."""
    a, b = await hands.form("a", "b")
    a.crash(silent=True)
    b.crash(silent=True)
    await hands.pass_time(20.0)
    assert hands.sealed == 1
    (c,) = hands.start("c")
    await hands.until(lambda: c.is_in)
    assert (c.rounds, c.world.incarnation) == ([2], a.world.incarnation)


# ---- a whole job is told to go


def drains_are_not_gathered():
    return [in_rules({rules.break_for_drains: with_settings(rules.break_for_drains, drain_settle=0.0)})]


@by_hand(min_nodes=2, max_nodes=4, catches={drains_are_not_gathered: "a doomed round"})
async def test_all_members_drain_at_once_and_no_doomed_round_is_formed(hands):
    """A scheduler signals all nodes within half a second. A round for those whose signal comes last would be in vain."""
    players = await hands.form_by_hand("a", "b", "c", "d")
    for player in players:
        if player.member.changed is not None:
            player.join()
        player.drain()
        await hands.pass_time(0.2)
    await hands.pass_time(3.0)
    assert (len(hands.breaks()), [player.kinds for player in players]) == (0, [[], [], [], []]), "a doomed round"
    await hands.all(*(player.leave() for player in players))
    assert [head.number for _, head in hands.seals()] == [1]


# ---- waits that are longer than they need to be


def a_quorum_waits_twice():
    return [(View, "first_call", property(lambda _view: (Call.NONE, 0.0)))]


@by_hand(min_nodes=2, max_nodes=4, last_call=5.0, seeds=3, catches={a_quorum_waits_twice: "sealed after"})
async def test_a_new_run_waits_for_the_last_call_and_no_more(hands):
    """The engine is young: members of an earlier life may come back. That wait and the last call run together (T2.6)."""
    hands.start("a", "b")
    sealed_at = await hands.until(lambda: hands.sealed == 1)
    assert 5.0 * 0.98 < sealed_at < 5.0 * 1.02 + EPSILON_S, f"sealed after {sealed_at} s"


@by_hand(min_nodes=2, max_nodes=4, last_call=1.0, seeds=3)
async def test_a_last_call_that_is_shorter_than_that_wait_is_over_with_it(hands):
    hands.start("a", "b")
    sealed_at = await hands.until(lambda: hands.sealed == 1)
    assert 3.0 * 0.98 < sealed_at < 3.0 * 1.02 + EPSILON_S, f"sealed after {sealed_at} s"


def members_that_come_back_count_as_new():
    return [(View, "former", property(lambda view: view.survivors))]


@by_hand(
    min_nodes=2, max_nodes=3, last_call=30.0, lease=3.0, seeds=3,
    catches={members_that_come_back_count_as_new: "did not happen within"},
)  # fmt: skip
async def test_after_a_cut_the_rest_of_a_round_regroups_without_a_last_call(hands):
    """The serving host was cut off from B and C. Only B comes back. It was in the round: no last call (T5.6)."""
    a, b, c = hands.start("a", "b", "c")
    await hands.until(lambda: a.is_in and b.is_in and c.is_in)
    b.cut()
    c.cut()
    await hands.until(lambda: hands.phase is Phase.BROKEN and b.key is None and c.key is None)
    c.crash()
    healed_at = hands.now
    b.heal()
    sealed_at = await hands.until(lambda: hands.sealed == 2, 15.0)
    assert sealed_at - healed_at < 3.0 + 8.0, "b needs up to 8 s to find its engine again, and c has 3 s to come too"
    await hands.until(lambda: a.is_in and b.is_in)
    assert hands.seated == ["a", "b"]


def nobody_else_comes_back():
    return [(View, "may_return", property(lambda _view: 0))]


@by_hand(min_nodes=2, max_nodes=3, last_call=30.0, lease=3.0, seeds=3, catches={nobody_else_comes_back: "in two rounds"})
async def test_members_that_come_back_one_after_the_other_are_one_round(hands):
    """B is back a moment before C. The round waits for C (T6.15), or all would restart once more."""
    a, b, c = hands.start("a", "b", "c")
    await hands.until(lambda: a.is_in and b.is_in and c.is_in)
    b.cut()
    c.cut()
    await hands.until(lambda: hands.phase is Phase.BROKEN and b.key is None and c.key is None)
    b.heal()
    await hands.until(lambda: b.key is not None)
    await hands.pass_time(1.0)
    c.heal()
    await hands.until(lambda: hands.phase is Phase.SEALED and c.is_in)
    assert hands.sealed == 2, "they came back in two rounds"
    assert sorted(hands.seated) == ["a", "b", "c"]
