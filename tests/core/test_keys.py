"""Keys: two runs never share one, and nothing a user names can reach out of its place."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rdzv.core.keys import ROOT, Keys
from rdzv.core.model import JOURNAL_MAX
from rdzv.engines.port import STORED

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


def every_key(keys: Keys) -> dict[str, str]:
    return {
        "settings": keys.settings,
        "head": keys.head,
        "member": keys.member("m1"),
        "entry": keys.entry("t1", "m1"),
        "ask": keys.ask("m1"),
        "ban": keys.ban("node7"),
        "strike": keys.strike("node7", "t1"),
        "quarantine": keys.quarantine("node7"),
        "adopt": keys.adopt,
        "journal": keys.journal_entry(1),
        "kv": keys.kv("t1") + "x",
    }


def test_every_key_is_where_the_protocol_says():
    assert every_key(Keys("job")) == {
        "settings": "rdzv/job/group/settings",
        "head": "rdzv/job/group/round",
        "member": "rdzv/job/group/members/m1",
        "entry": "rdzv/job/group/ranks/t1/m1",
        "ask": "rdzv/job/group/asks/m1",
        "ban": "rdzv/job/group/ban/node7",
        "strike": "rdzv/job/group/strikes/node7/t1",
        "quarantine": "rdzv/job/group/quarantine/node7",
        "adopt": "rdzv/job/adopt",
        "journal": "rdzv/job/journal/001",
        "kv": "rdzv/job/kv/t1/x",
    }


def test_one_watch_of_the_group_shows_all_that_the_leader_decides_on_and_nothing_busy():
    keys = Keys("job")
    inside = {name for name, key in every_key(keys).items() if key.startswith(keys.group)}
    assert inside == {"settings", "head", "member", "entry", "ask", "ban", "strike", "quarantine"}


@pytest.mark.parametrize("prefix", ["run", "group", "members", "ranks", "asks", "bans", "strikes", "quarantines", "journal"])
def test_a_prefix_ends_where_a_name_begins(prefix):
    assert getattr(Keys("job"), prefix).endswith("/")
    assert Keys("job").table("t1").endswith("/t1/")
    assert Keys("job").kv("t1").endswith("/t1/")


@given(ids, ids)
def test_two_runs_have_no_key_in_common(one, other):
    assume(one != other)
    a, b = Keys(one), Keys(other)
    assert not a.run.startswith(b.run)
    assert set(every_key(a).values()).isdisjoint(every_key(b).values())


@given(ids)
def test_no_run_id_reaches_out_of_its_place(run_id):
    run = Keys(run_id).run
    assert run.startswith(ROOT)
    assert run.count("/") == 2
    assert run.isascii()


@given(ids, ids)
def test_two_hosts_have_two_bans(one, other):
    assume(one != other)
    keys = Keys("job")
    assert keys.ban(one) != keys.ban(other)
    assert "/" not in keys.ban(one).removeprefix(keys.bans)
    assert keys.host_of_ban(keys.ban(one)) == one


@given(ids, ids)
def test_the_keys_of_a_host_name_it(host, table):
    keys = Keys("job")
    assert keys.host_of_quarantine(keys.quarantine(host)) == host
    assert keys.of_strike(keys.strike(host, table)) == (host, table)
    assert keys.strike(host, table).startswith(keys.strikes_of(host))


def test_the_journal_is_a_ring():
    keys = Keys("job")
    newest = [keys.journal_entry(seq) for seq in range(5, 5 + JOURNAL_MAX)]
    assert len(set(newest)) == JOURNAL_MAX
    assert keys.journal_entry(5 + JOURNAL_MAX) == newest[0]


def test_the_keys_of_the_journal_sort_as_their_numbers_do():
    keys = [Keys("job").journal_entry(seq) for seq in range(JOURNAL_MAX)]
    assert keys == sorted(keys)


def test_engines_tell_what_a_program_keeps_in_a_store_from_the_records_of_its_run():
    keys = Keys("a/kv/b")
    hosts = [keys.ban("/kv/"), keys.strike("/kv/", "t1"), keys.quarantine("/kv/")]
    stored = [one for one in (*every_key(keys).values(), *hosts, keys.progress_of("m1"), keys.notes) if STORED in one]
    assert stored == [every_key(keys)["kv"]]
