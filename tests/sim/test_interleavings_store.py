"""Holes of the protocol's first draft that concern settings, lives of a run id and stores, played with the real member.

The numbers are those of the list of holes that the protocol was attacked with; T-numbers are those of docs/protocol.md.
"""

from __future__ import annotations

import msgspec

from rdzv.core import rules, wire
from rdzv.core.model import Era, Head, Phase
from rdzv.engines.port import Created, Delete, Empty, Get, List, Put
from rdzv.errors import Closed, RoundOver, SettingsError
from rdzv.member import registration as arrival_module
from rdzv.member import store_calls
from rdzv.member.presence import Presence
from rdzv.member.registration import Registration
from rdzv.member.store import AsyncStore
from support.scripted_members import KEYS, record, stored
from support.scripted_simulation import EPSILON_S, by_hand, in_rules


def values(hands, table):
    """The values of that table's store by key."""
    prefix = KEYS.kv(table) + "value/"
    return {item.key[len(prefix) : -1]: item.value for item in hands.read(List(prefix)).reads[0]}


# ---- H14: two opinions in one run


async def leave_settings_behind(hands):
    """A run whose only member has gone: nobody lives who agreed on its settings."""
    (x,) = await hands.form_by_hand("x")
    await hands.all(x.leave())
    assert not hands.present


def settings_are_not_compared():
    right = Registration.ways

    def ways(self, seen):
        mine = 1 if self._record.name == "j" else 0
        return [(compares[mine:], writes) for compares, writes in right(self, seen)]

    return [(Registration, "ways", ways)]


@by_hand(min_nodes=1, max_nodes=3, catches={settings_are_not_compared: "expected SettingsError"})
async def test_h14_settings_replaced_under_a_member_that_is_coming_in_are_not_agreed_to(hands):
    """J agrees with the settings that are there. Before its key is, K, who may, replaces them (T1)."""
    await leave_settings_behind(hands)
    j = hands.player("j")
    gate = j.hold(lambda request: record(request) and KEYS.settings not in request.puts)
    joining = j.join()
    await hands.until(lambda: gate.held)
    await hands.come("k", last_call=22.0)
    assert hands.settings.last_call == 22.0
    gate.open()
    refused = await hands.raises(SettingsError, joining)
    assert "last_call is 3 here and 22 in the run" in str(refused)
    assert list(hands.present) == ["k"]


def members_are_not_compared():
    return [(arrival_module, "Empty", lambda _prefix: Empty("no such prefix"))]


@by_hand(min_nodes=1, max_nodes=3, catches={members_are_not_compared: "expected SettingsError"})
async def test_h14_settings_are_not_replaced_once_somebody_agreed_to_them(hands):
    """J has seen that nobody lives, and is about to replace the settings; before that K comes in, who agrees with them."""
    await leave_settings_behind(hands)
    j = hands.player("j", last_call=22.0)
    gate = j.hold(lambda request: record(request) and any(isinstance(one, Empty) for one in request.compares))
    joining = j.join()
    await hands.until(lambda: gate.held)
    await hands.come("k")
    gate.open()
    await hands.raises(SettingsError, joining)
    assert (hands.settings.last_call, list(hands.present)) == (3.0, ["k"])


# ---- H15: lives of one run id


def all_lives_have_one_name():
    right = rules.first_head

    def first_head(view):
        verdict, era = right(view), Era(1, "life")
        if verdict.act is None:
            return verdict
        head = msgspec.structs.replace(verdict.act.head, run="life", era=era, next_era=era)
        return msgspec.structs.replace(verdict, act=msgspec.structs.replace(verdict.act, head=head))

    return [in_rules({right: first_head})]


@by_hand(min_nodes=2, max_nodes=2, closed_for=4.0, catches={all_lives_have_one_name: "looks like the former one"})
async def test_h15_a_closed_run_is_refused_for_a_while_and_then_begins_a_new_life(hands):
    """Same id, another incarnation: round 1 again, but of another run, with another table and an empty store."""
    a, b = await hands.form("a", "b")
    await hands.all(a.on(a.world.store.set("x", "former")))
    await hands.operate("close", "wrong data", "operator")
    closed_at = await hands.until(lambda: a.ended and b.ended)
    assert (a.kinds, b.kinds) == (["closed"], ["closed"])
    await hands.raises(Closed, hands.player("c").join())
    await hands.until(lambda: hands.head is None)
    assert 4.0 <= hands.now - closed_at + EPSILON_S < 6.0
    d, e = await hands.form("d", "e")
    assert (d.world.round, e.world.round) == (1, 1)
    assert d.world.incarnation != a.world.incarnation, "the new life looks like the former one"
    assert d.world.table != a.world.table
    (keys,) = await hands.all(d.on(d.world.store.num_keys()))
    assert keys == 0, "d reads what was stored in a round of a former life"


def anybody_may_begin_a_new_life():
    right = Registration.replace_closed

    def replace(self, seen, nobody, compares):
        item = None if seen is None else seen.item(1)
        if nobody and item is not None and wire.decode(Head, item.value).phase is Phase.CLOSED:
            return [Delete(KEYS.head)]
        return right(self, seen, nobody, compares)

    return [(Registration, "replace_closed", replace)]


@by_hand(min_nodes=1, max_nodes=2, catches={anybody_may_begin_a_new_life: "expected Closed"})
async def test_h15_a_higher_incarnation_begins_a_new_life_at_once(hands):
    """A higher incarnation is a new attempt at the same job, but only after the members of the former one are gone."""
    (a,) = await hands.form("a")
    await hands.operate("close", "wrong data", "operator")
    await hands.until(lambda: a.ended)
    await hands.raises(Closed, hands.player("early", incarnation=1).join())
    await hands.all(a.leave())
    await hands.raises(Closed, hands.player("any").join())
    c = hands.player("c", incarnation=1)
    world, *_ = await hands.all(c.join())
    assert (world.round, hands.head.incarnation) == (1, 1)
    assert world.incarnation != a.world.incarnation
    await hands.operate("close", "wrong again", "operator")
    await hands.all(c.leave())
    await hands.raises(Closed, hands.player("same", incarnation=1).join())


@by_hand(min_nodes=2, max_nodes=2, closed_for=4.0)
async def test_h15_a_member_that_slept_through_the_end_of_its_run_is_no_member_of_the_next_life(hands):
    """A holds round 1, and the head says sealed 1 when it wakes up; but that is another life. It is told, and waits as a spare.

    Its key and the incarnation both say so; if only the number were compared, nothing would seem to have happened.
    """
    a, b = await hands.form("a", "b")
    a.pause()
    await hands.operate("close", "wrong data", "operator")
    await hands.until(lambda: b.ended)
    await hands.all(b.leave())
    while hands.head is not None or hands.present:
        # Somebody looks at it now and then: an engine that hears of nobody lets no time pass.
        await hands.operate("drain", "nobody", "")
        await hands.pass_time(1.0)
    c, d = await hands.form("c", "d")
    a.resume()
    await hands.until(lambda: a.told)
    assert a.kinds[0] in ("evicted", "closed")
    await hands.pass_time(20.0)
    assert (a.rounds, c.kinds, d.kinds, hands.seated) == ([1], [], [], ["c", "d"])


@by_hand(min_nodes=2, max_nodes=2)
async def test_h15_holders_that_come_to_an_engine_with_a_new_life_are_evicted(hands):
    """The engine came back empty, and newcomers that fill the run were there first: they need not wait (T2). A and B hold
    the same number of another run. They do not disturb it, and learn that their round is over."""
    a, b = await hands.form("a", "b")
    a.cut()
    b.cut()
    hands.restart()
    c, d = await hands.form("c", "d")
    assert c.world.incarnation != a.world.incarnation
    a.heal()
    b.heal()
    await hands.until(lambda: a.told and b.told)
    assert (a.kinds, b.kinds) == (["evicted"], ["evicted"])
    await hands.pass_time(20.0)
    assert (a.rounds, b.rounds, c.kinds, d.kinds) == ([1], [1], [], [])


# ---- H16: a round's store


@by_hand(min_nodes=2, max_nodes=3, catches={"late writer reaches the store": "expected RoundOver"})
async def test_h16_a_write_that_arrives_after_the_next_seal_is_refused(hands):
    """C's trainer wrote in round 1; the write arrives when round 2 is sealed and the old store is gone, and so it stays."""
    a, b = hands.start("a", "b")
    c = hands.player("c")
    world, *_ = await hands.all(c.join())
    gate = c.hold(stored("x"))
    writing = c.on(world.store.set("x", "late"))
    await hands.until(lambda: gate.held)
    await hands.all(c.join())
    await hands.until(lambda: a.holds(2) and b.holds(2))
    gate.open()
    await hands.raises(RoundOver, writing)
    assert (values(hands, world.table), values(hands, hands.head.table)) == ({}, {})


def own_key_is_not_compared():
    return [(Presence, "own_guard", property(lambda _presence: Created("no such key", 0)))]


@by_hand(min_nodes=2, max_nodes=3, catches={own_key_is_not_compared: "expected RoundOver"})
async def test_h16_a_write_of_an_evicted_member_is_refused_before_the_next_seal_too(hands):
    """The member's entry is still there, since the others have not heard of the loss yet; but its key is gone."""
    a, b = hands.start("a", "b")
    c = hands.player("c")
    world, *_ = await hands.all(c.join())
    hands.before(stored("x"), lambda _: c.expire())
    await hands.raises(RoundOver, c.on(world.store.set("x", "late")))
    assert values(hands, world.table) == {}
    await hands.until(lambda: a.holds(2) and b.holds(2))


def marks_are_not_read():
    return [(store_calls, "_decode", lambda _data: store_calls._Mark("", b""))]


@by_hand(min_nodes=2, max_nodes=2, catches={marks_are_not_read: "counted twice"})
async def test_h16_an_add_whose_answer_was_lost_is_counted_once(hands):
    """The add took effect, but the answer was lost. The mark beside the value tells."""
    a, b = await hands.form("a", "b")
    hands.before(stored("n"), lambda _: hands.network.break_next(a.node, hands.engine, "answers"))
    (result,) = await hands.all(a.on(a.world.store.add("n", 1)))
    assert (result, values(hands, a.world.table)) == (1, {"n": b"1"}), "counted twice"
    (second,) = await hands.all(b.on(b.world.store.add("n", 1)))
    assert second == 2


@by_hand(min_nodes=2, max_nodes=2, catches={marks_are_not_read: "counted twice|undone"})
async def test_h16_an_operation_whose_answer_was_lost_is_not_repeated_over_what_others_wrote(hands):
    """A's set and add took effect, then B's did; what A reads afterwards are B's values, and its own marks."""
    a, b = await hands.form("a", "b")
    hands.before(stored("x"), lambda _: hands.network.break_next(a.node, hands.engine, "answers"))
    writing = a.on(a.world.store.set("x", "first"))
    await hands.until(lambda: values(hands, a.world.table))
    await hands.all(b.on(b.world.store.set("x", "second")))
    await hands.all(writing)
    assert values(hands, a.world.table) == {"x": b"second"}, "what b wrote was undone"
    hands.before(stored("n"), lambda _: hands.network.break_next(a.node, hands.engine, "answers"))
    adding = a.on(a.world.store.add("n", 1))
    await hands.until(lambda: "n" in values(hands, a.world.table))
    await hands.all(b.on(b.world.store.add("n", 1)))
    (result,) = await hands.all(adding)
    assert (result, values(hands, a.world.table)["n"]) == (1, b"2"), "counted twice"


def marks_are_not_compared():
    right = store_calls.StoreCalls.guarded

    def guarded(self, presence, compares, writes, otherwise):
        return right(self, presence, tuple(one for one in compares if "/mark/" not in one.key), writes, otherwise)

    return [(store_calls.StoreCalls, "guarded", guarded)]


@by_hand(min_nodes=2, max_nodes=2, lease=60.0, stars=False, catches={marks_are_not_compared: "took effect late"})
async def test_h16_an_operation_that_was_given_up_and_arrives_late_does_nothing(hands):
    """A's request is stuck in the network; A gives up, tries again on a new connection and goes on. Then the first arrives."""
    a, _b = await hands.form("a", "b")
    store, connection = a.world.store, a.member.presence.session._link.transport.connection
    a.cut("requests")
    setting, adding = a.on(store.set("x", "1")), a.on(store.add("n", 1))
    await hands.until(lambda: not connection.open)
    hands.network.cuts.clear()
    await hands.all(setting, adding)
    assert adding.result() == 1
    await hands.all(a.on(store.set("x", "2")))
    late = []
    hands.before(lambda request: stored("x")(request) or stored("n")(request), late.append, times=2)
    connection.requests.heal()
    await hands.until(lambda: late)
    await hands.pass_time(1.0)
    hands.fault("cut", a, stop=True)
    assert values(hands, a.world.table) == {"x": b"2", "n": b"1"}, "what was given up took effect late"


def rounds_do_not_end_waits():
    return [(AsyncStore, "end", lambda _self, _reason: None)]


@by_hand(min_nodes=2, max_nodes=3, catches={rounds_do_not_end_waits: "did not happen within"})
async def test_h16_a_wait_in_a_store_ends_when_the_round_breaks(hands):
    """The member that would set the key is gone."""
    a, b, c = await hands.form("a", "b", "c")
    waiting = a.on(a.world.store.get("never"))
    await hands.pass_time(1.0)
    c.crash()
    await hands.raises(RoundOver, waiting)
    assert hands.now - hands.breaks()[0][0] < EPSILON_S
    await hands.until(lambda: a.is_in and b.is_in)


# ---- T12.2: what outlives its writer


def the_runs_lease_is_not_known():
    right = Presence.take

    def take(self, look):
        right(self, look)
        self.use_run_lease(0)

    return [(Presence, "take", take)]


async def one_gives_up(hands):
    a, b = await hands.form_by_hand("a", "b")
    marks = []
    hands.before(lambda request: request.actor == "b" and Delete(b.key.key) in request.operations, marks.append)
    await hands.all(b.leave(failed=True, reason="exit code 1"))
    (mark,) = [one for one in marks[0].operations if isinstance(one, Put) and one.key.startswith(KEYS.ranks)]
    assert mark.lease == hands.read(Get(KEYS.settings)).item(0).lease != 0, "its mark hangs on no lease"
    assert a.member.presence.run_lease == mark.lease


@by_hand(min_nodes=1, max_nodes=2, last_call=1, catches={the_runs_lease_is_not_known: "its mark hangs on no lease"})
async def test_the_mark_of_one_that_goes_hangs_on_the_runs_lease(hands):
    """The member knows the lease from its entry. Without the lease, a run that all have left would stay for ever."""
    await one_gives_up(hands)


@by_hand(
    min_nodes=1, max_nodes=2, last_call=1, stars=False, catches={the_runs_lease_is_not_known: "its mark hangs on no lease"}
)
async def test_the_mark_of_one_that_asked_for_its_line_hangs_on_the_runs_lease(hands):
    """The member knows the lease from its entry, however it got that."""
    await one_gives_up(hands)
