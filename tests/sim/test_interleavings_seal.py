"""Interleavings that broke drafts of the protocol: sealing and taking a round. Played with the real member.

H- and T-numbers are those of docs/protocol.md.
"""

from __future__ import annotations

from contextlib import suppress

from rdzv.core import member as core_member
from rdzv.core import wire
from rdzv.core.model import Call, CauseKind, Head, Phase, RankEntry
from rdzv.core.view import View
from rdzv.engines.port import Get, List
from rdzv.errors import Drained, Evicted, JoinTimeout
from rdzv.member.leader import Leader
from rdzv.member.presence import Look, Presence
from support.scripted_members import KEYS, RUN_ID, leading, seal, take
from support.scripted_simulation import EPSILON_S, by_hand

# ---- H1: the seal does not look at the members it seals


@by_hand(min_nodes=2, max_nodes=4, catches={"ghost is sealed in": "assert 3 == 2"})
async def test_h01_a_member_that_dies_as_the_round_is_sealed_is_not_in_it(hands):
    """C's lease ends while the seal is on its way. The seal compares the key of every member, and is refused (T6)."""
    a, b, c = await hands.come("a", "b", "c")
    hands.before(seal, lambda _: (c.pause(), c.expire()))
    await hands.until(lambda: a.worlds and b.worlds)
    assert hands.seals()[0][1].size == 2, f"sealed in: {', '.join(hands.seated)}"
    assert (a.rounds, b.rounds, c.rounds) == ([1], [1], [])
    c.resume()
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))
    assert c.kinds == ["evicted"], "it was not told before it came in again"
    assert hands.seated == ["a", "b", "c"]


# ---- H3: sealed and broken before it was taken


@by_hand(
    min_nodes=2,
    max_nodes=3,
    grow="now",
    stars=False,
    catches={"round broken before it was taken is not given up": "did not happen within"},
)
async def test_h03_a_round_that_was_broken_before_it_was_taken_holds_up_nobody(hands):
    """No workers of round 1 run, so no member is told to stop them. A member that finds the round broken gives it up (T4)."""
    a, b = hands.player("a"), hands.player("b")
    gates = [player.hold(take) for player in (a, b)]
    a.start()
    b.start()
    await hands.until(lambda: hands.sealed == 1 and all(gate.held for gate in gates))
    (c,) = hands.start("c")
    await hands.until(lambda: hands.phase is Phase.BROKEN)
    c.crash()
    await hands.until(lambda: c.key is None)
    for gate in gates:
        gate.open()
    await hands.until(lambda: a.is_in and b.is_in)
    assert (a.rounds, b.rounds, hands.seated) == ([2], [2], ["a", "b"])


# ---- H4: a world is returned from memory


def broken_rounds_are_given():
    right = core_member.take_result

    def found(*given):
        result = right(*given)
        return core_member.GIVEN if result is core_member.GIVE_UP else result

    return [(core_member, "take_result", found)]


@by_hand(min_nodes=2, max_nodes=3, stars=False, catches={broken_rounds_are_given: "was given a round that was broken"})
async def test_h04_a_slow_member_is_not_given_a_round_that_broke_meanwhile(hands):
    """A saw the head sealed and reads late. The head in that very read counts (T3)."""
    (b,) = await hands.come("b")
    a = hands.player("a")
    gate = a.hold(take)
    a.start()
    (c,) = hands.start("c")
    await hands.until(lambda: gate.held and b.worlds and c.worlds)
    c.crash()
    await hands.until(lambda: hands.phase is Phase.BROKEN)
    gate.open()
    await hands.until(lambda: a.worlds and b.holds(2))
    assert a.rounds == [2], "a was given a round that was broken"


def a_world_is_given_from_memory():
    right = Presence.examine

    async def examine(self, table):
        seen = await self.session.txn(then=[Get(self.keys.head), Get(self.keys.entry(table, self.id))])
        head, item = seen.item(0), seen.item(1)
        with suppress(Evicted):
            await right(self, table)
        return Look(wire.decode(Head, head.value), item, wire.decode(RankEntry, item.value), seen.revision)

    async def why_gone(self):
        return Evicted(RUN_ID, self.record.name, "nobody heeds it")

    return [(Presence, "examine", examine), (Presence, "why_gone", why_gone), *a_member_trusts_answers_of_any_age()]


@by_hand(min_nodes=2, max_nodes=3, stars=False, catches={a_world_is_given_from_memory: "was given a round of the past"})
async def test_h04_a_member_paused_between_seeing_a_round_and_taking_it_is_evicted(hands):
    """Round 2 was sealed without it meanwhile. Its question compares its own key, which is gone."""
    (b,) = await hands.come("b")
    a = hands.player("a")
    gate = a.hold(lambda request: take(request) and request.compares)
    a.start()
    (c,) = hands.start("c")
    await hands.until(lambda: gate.held and b.worlds and c.worlds)
    a.pause()
    await hands.until(lambda: b.holds(2) and c.holds(2))
    gate.open()
    a.resume()
    await hands.until(lambda: a.told or a.worlds)
    assert (a.rounds, a.kinds) == ([], ["evicted"]), "a was given a round of the past"
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))
    assert hands.sealed == 3


def a_member_trusts_answers_of_any_age():
    return [(core_member, "is_fresh", lambda _state, _now: True)]


@by_hand(min_nodes=2, max_nodes=3, stars=False, catches={a_member_trusts_answers_of_any_age: "was given a round of the past"})
async def test_h04_a_member_paused_with_the_answer_on_its_way_is_evicted(hands):
    """A asked in time and gets the answer after its lease. By its own clock it knows that it must ask again."""
    b, c = await hands.come("b", "c")
    a = hands.player("a")
    hands.before(lambda request: take(request) and request.actor == "a", lambda _: a.pause())
    a.start()
    await hands.until(lambda: b.holds(2) and c.holds(2))
    a.resume()
    await hands.until(lambda: a.told or a.worlds)
    assert (a.rounds, a.kinds) == ([], ["evicted"]), "a was given a round of the past"
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))


def a_member_trusts_what_it_was_shown_at_any_time():
    return [(core_member, "unrenewed_s", lambda _state, _now: 0.0)]


@by_hand(min_nodes=2, max_nodes=3, catches={a_member_trusts_what_it_was_shown_at_any_time: "was given a round of the past"})
async def test_h04_a_member_paused_while_it_is_shown_a_round_is_evicted(hands):
    """The watch has shown a time when A's key still stood. That may be over even before its lease ends by its own clock. So A
    must ask, and is given nothing while the engine does not answer."""
    b, a = await hands.come("b", "a")
    await hands.pass_time(0.1)
    hands.before(seal, lambda _: a.pause())
    hands.after(lambda head: head.phase is Phase.SEALED, lambda: hands.loop.call_later(0.1, a.cut))
    (c,) = hands.start("c")
    await hands.until(lambda: b.holds(1) and c.holds(1))
    await hands.pass_time(0.5)
    a.expire()
    await hands.until(lambda: b.holds(2) and c.holds(2))
    await hands.pass_time(0.6 * a.settings.lease - 0.5)
    a.resume()
    assert a.member.presence.is_fresh
    await hands.pass_time(1.0)
    assert (a.rounds, a.kinds) == ([], []), "a was given a round of the past"
    a.heal()
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))
    assert a.kinds == ["evicted"]


@by_hand(min_nodes=3, max_nodes=3, writes_max=2)
async def test_a_round_is_taken_as_it_is_shown_also_if_its_lines_came_ahead(hands):
    """No member asks: what a watch has shown of head, own key and own entry counts as a read of all three (T3)."""
    asked = []
    hands.before(take, asked.append)
    a, b, c = await hands.form("a", "b", "c")
    assert (a.rounds, b.rounds, c.rounds, asked) == ([1], [1], [1], [])
    assert hands.read(Get(KEYS.head)).item(0).modified > hands.read(List(KEYS.table(hands.head.table))).reads[0][0].modified


def what_was_shown_counts_for_ever():
    return [(Presence, "forget_shown", lambda _presence: None)]


@by_hand(min_nodes=2, max_nodes=3, catches={what_was_shown_counts_for_ever: "was given a round of the past"})
async def test_h04_a_member_that_is_shown_a_round_and_the_end_of_its_key_at_once_is_evicted(hands):
    """A was out of touch. Its watch shows all that it missed: the round, and the end of its own key."""
    b, c = await hands.come("b", "c")
    a = hands.player("a")
    hands.before(seal, lambda _: a.cut())
    a.start()
    await hands.until(lambda: b.worlds and c.worlds)
    stuck = b.hold(leading)
    a.expire()
    a.heal()
    await hands.until(lambda: a.told or a.worlds)
    assert (a.rounds, a.kinds) == ([], ["evicted"]), "a was given a round of the past"
    stuck.open()
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))


@by_hand(min_nodes=2, max_nodes=2, catches={what_was_shown_counts_for_ever: "by what was shown before it was called"})
async def test_h04_a_join_does_not_take_what_was_shown_before_it_was_called(hands):
    """A world must have stood at a moment of the call itself. So A asks, as it has seen nothing since the call."""
    asked = []
    hands.before(take, asked.append, times=9)
    a = hands.player("a")
    await hands.raises(JoinTimeout, a.join(timeout_s=1.0))
    b = hands.player("b")
    await hands.all(b.join())
    await hands.pass_time(1.0)
    assert (a.rounds, asked) == ([], [])
    await hands.all(a.join())
    assert [request.actor for request in asked] == ["a"], "a was given a round by what was shown before it was called"


# ---- H5: former life

ONE_ID = "a was given round 2 by a read at which its key did not live"
"""The checkers tell lives apart by their ids, which the product never uses twice; only here it is made to."""


def a_former_life_counts_as_in_the_table():
    def in_table(view):
        return {live.id: live for live in view.members.values() if live.id in view.entries}

    return [(View, "in_table", property(in_table))]


@by_hand(min_nodes=2, max_nodes=3, catches={a_former_life_counts_as_in_the_table: "did not happen within|not seen as lost"})
async def test_h05_a_leader_that_lists_is_not_deceived_by_a_new_life_of_a_key(hands):
    """A was lost and is back, under its old id even, before the leader has read anew after a gap. Its line names the create
    revision of its former key, so the loss is seen all the same."""
    hands.accepted.append(ONE_ID)
    b, a, c = await hands.form("b", "a", "c")
    former = a.key.key
    a.node.token = lambda: former[len(KEYS.members) :]
    listing = b.hold(lambda request: List(KEYS.group) in request.operations)
    hands.engine.drop_watches()
    await hands.until(lambda: listing.held)
    a.expire()
    await hands.until(lambda: a.key is not None)
    assert a.key.key == former
    listing.open()
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))
    broken = hands.breaks()[0][1]
    assert (broken.cause.kind, broken.cause.members) == (CauseKind.LOST, ("a",)), "a was not seen as lost"
    assert (a.rounds, b.rounds, c.rounds) == ([1, 2], [1, 2], [1, 2])
    assert a.kinds == ["evicted"]


def a_former_life_is_given_its_round():
    right = core_member.take_result

    def found(head, table, line, created):
        return right(head, table, line, created if line is None else line.created)

    return [(core_member, "take_result", found)]


@by_hand(
    min_nodes=2,
    max_nodes=3,
    stars=False,
    catches={a_former_life_is_given_its_round: "was given the round of its former life"},
)
async def test_h05_a_member_is_not_given_the_round_of_its_former_life(hands):
    """A's key ended after the seal and before it took the round. It comes again under the same id while the head still says
    sealed: the line is not its own."""
    hands.accepted.append(ONE_ID)
    (b,) = await hands.come("b")
    a = hands.player("a")
    gate = a.hold(take)
    a.start()
    (c,) = hands.start("c")
    await hands.until(lambda: gate.held and b.worlds and c.worlds)
    former = a.key.key
    a.node.token = lambda: former[len(KEYS.members) :]
    stuck = b.hold(leading)
    a.expire()
    gate.open()
    await hands.until(lambda: stuck.held and a.key is not None)
    await hands.pass_time(1.0)
    assert (hands.sealed, a.rounds, a.kinds) == (1, [], ["evicted"]), "a was given the round of its former life"
    stuck.open()
    await hands.until(lambda: all(player.is_in for player in (a, b, c)))
    assert hands.sealed == 2


# ---- H19: timers after a change of leader


def a_new_leader_starts_the_timer_anew():
    right = Leader.__init__

    def init(self, presence, made_settings):
        right(self, presence, made_settings)
        presence.tracker._call_at = presence.node.now()

    return [(Leader, "__init__", init)]


@by_hand(
    min_nodes=2, max_nodes=20, last_call=13.0, catches={a_new_leader_starts_the_timer_anew: "after the last call began"}
)
async def test_h19_leaders_that_die_one_after_the_other_do_not_put_off_the_seal(hands):
    """Each measures the last call from the moment it saw it begin, on its own clock, and its successor goes on from there."""
    hands.start(*(f"m{number}" for number in range(8)))
    began_at = await hands.until(lambda: hands.head is not None and hands.head.call is Call.LAST)
    for _ in range(5):
        await hands.pass_time(1.6)
        hands.players[hands.leader].crash()
    await hands.until(lambda: hands.sealed == 1)
    waited_s = hands.now - began_at  # Three seconds of the last call had passed when the head was made (T2.6).
    assert waited_s < 10.0 * 1.02 + EPSILON_S, f"sealed {waited_s} s after the last call began"
    assert len(hands.seated) == 3


# ---- H23: the bootstrap address


@by_hand(min_nodes=2, max_nodes=4, catches={"ghost is sealed in": "address is that of a"})
async def test_h23_rank_0_dies_before_the_seal_and_the_address_is_the_new_ones(hands):
    """The seal compares rank 0's key, and copies the address of whoever is rank 0 then."""
    (b,) = await hands.come("b")
    a, c = hands.start("a", "c")
    addresses = []
    hands.before(seal, lambda request: (addresses.append(request.head.boot), a.crash(silent=True), a.expire()))
    await hands.until(lambda: b.worlds and c.worlds)
    assert addresses[0].startswith("a:"), "a was to be rank 0"
    assert str(c.world.bootstrap) == str(b.world.bootstrap) == b.record.boot, "the address is that of a dead one"
    assert hands.seated == ["b", "c"]


def rank_0_is_not_compared():
    right = Leader.members_unchanged
    return [(Leader, "members_unchanged", lambda self, act, view: right(self, act, view)[:1])]


@by_hand(min_nodes=2, max_nodes=4, catches={rank_0_is_not_compared: "sealed in: a, b, c"})
async def test_h23_rank_0_writes_its_record_before_the_seal_and_it_is_read_again(hands):
    """The leader's view of rank 0 is old when the seal arrives: rank 0 has said that it is about to go."""
    b = hands.player("b")
    gate = b.hold(seal)
    await hands.come(b)
    a = hands.player("a")
    joining = a.join()
    (c,) = hands.start("c")
    await hands.until(lambda: gate.held)
    await hands.all(a.drain())
    gate.open()
    await hands.until(lambda: b.worlds and c.worlds)
    assert hands.seated == ["b", "c"], f"sealed in: {', '.join(hands.seated)}"
    assert str(c.world.bootstrap) == b.record.boot
    await hands.raises(Drained, joining)
