"""Quarantine: with real processes on hosts of their own names, and over a change of leaders and on etcd."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest

from rdzv.config.settings import Settings
from rdzv.core.keys import Keys
from rdzv.core.status import Status
from rdzv.engines.port import List
from rdzv.errors import SettingsError
from rdzv.operate import commands
from support.member_processes import ProcessSet, is_world
from support.memory_members import LONG_S, Party, join, kill, run, until

BROKE = "broke 3 rounds within 1 h, kept out for 10 min"


def on(host: str) -> list[str]:
    """Return the command prefix that gives a process a host name of its own."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]


def rdzv(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "rdzv", *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="host names of their own need root and unshare")
def test_a_host_that_breaks_three_rounds_is_out_and_back_when_it_is_needed_or_unbanned():
    with ProcessSet() as party:
        _, place = party.serve()
        start = {"settings": ("quarantine=3/1h", "linger=0.2", "settle=0.1")}
        a, b = (party.member(name, place, "2:3", *start["settings"], on=on(name)) for name in "ab")
        c = party.member("c", place, "2:3", *start["settings"], on=on("c"))
        for _ in range(3):
            round = a.world(3)["round"]
            c.world(3)
            c.kill()
            a.world(2, after=round)
            c = party.member("c", place, "2:3", *start["settings"], on=on("c"))
        shown = seen(place, lambda status: any(one["state"] == "quarantined" for one in status["members"]))
        assert [(one["host"], one["problem"]) for one in shown["members"] if one["state"] == "quarantined"] == [("c", BROKE)]
        assert shown["size"] == 2
        assert f"c quarantined: {BROKE}" in shown["reason"]
        assert BROKE in rdzv("journal", place, "--run-id", "job")

        round = shown["round"]
        b.kill()  # Too few others are left.
        assert {a.world(2, after=round)["round"], c.world(2)["round"]} == {round + 1}
        b = party.member("b", place, "2:3", *start["settings"], on=on("b"))
        assert {a.world(2, after=round + 1)["round"], b.world(2)["round"]} == {round + 2}

        assert json.loads(rdzv("unban", "c", place, "--run-id", "job", "--json"))["done"] == "unbanned"
        assert {one.world(3, after=round + 2)["round"] for one in (a, b, c)} == {round + 3}


def seen(place: str, holds) -> dict:
    for _ in range(100):
        status = json.loads(rdzv("status", place, "--run-id", "job", "--json"))
        if holds(status):
            return status
    raise AssertionError(status)


async def break_round(member, others):
    """The member's workers fail: it joins again, and the others are told."""
    again = asyncio.create_task(member.join())
    for other in others:
        await other.wait_changed(LONG_S)
    return again


def test_strikes_are_counted_over_a_change_of_leaders_and_the_end_comes_by_itself():
    async def scenario():
        async with Party(1, 3, quarantine="2/1h/2s") as party:
            (a, b, c), _ = await party.form("a", "b", "c")
            again = await break_round(c, [a, b])
            await asyncio.gather(again, join(a, b))
            await kill(a)  # It led, and counted the first one.
            await b.wait_changed(LONG_S)
            await c.wait_changed(LONG_S)
            await join(b, c)
            again = await break_round(c, [b])
            assert (await b.join()).size == 1
            status: Status = await b.status()
            assert [one.problem for one in status.of("quarantined")] == ["broke 2 rounds within 1 h, kept out for 2 s"]
            # The lease of the quarantine ends, and nobody has to do anything.
            await b.wait_changed(LONG_S)
            assert {(await b.join()).size, (await again).size} == {2}

    run(scenario)


def test_a_host_that_quorum_needs_is_not_kept_out_and_unban_forgets_its_strikes():
    async def scenario():
        async with Party(2, 2, quarantine="1/1h") as party:
            (a, b), _ = await party.form("a", "b")
            again = await break_round(b, [a])
            assert {(await a.join()).size, (await again).size} == {2}
            assert await commands.unban(party.operator, "job", "b")
            assert not await commands.unban(party.operator, "job", "b")
            left = await party.operator.txn(then=[List(Keys("job").strikes), List(Keys("job").quarantines)])
            assert left.reads == ((), ())

    run(scenario)


def test_members_with_another_quarantine_do_not_meet():
    async def scenario():
        async with Party(1, 2) as party:
            await party.form("a")
            with pytest.raises(SettingsError, match=r"quarantine is 3/3600s/600s here and None in the run"):
                await party.member("b", quarantine="3/1h").join()
            await until(party.head)

    run(scenario)


@pytest.mark.parametrize("text", ["3", "0/1h", "21/1h", "3/1h/10m/1", "3/0s", "3/2d", "3/1h/0.5s", "x/1h", 3])
def test_a_wrong_value_is_refused_with_an_example(text):
    with pytest.raises(SettingsError, match=r"quarantine is .*: it must be ROUNDS/TIME such as '3/1h'"):
        Settings.make("memory://", run_id="job", min_nodes=1, max_nodes=1, quarantine=text)


@pytest.mark.parametrize(("text", "shown"), [
    ("3/1h", "3/3600s/600s"), (" 2/90/30m ", "2/90s/1800s"), ("off", "None"), ("", "None"), (None, "None")
])  # fmt: skip
def test_a_value_is_read_as_people_write_it(text, shown):
    settings = Settings.make("memory://", run_id="job", min_nodes=1, max_nodes=1, quarantine=text)
    assert str(settings.quarantine) == shown
    again = Settings.make("memory://", run_id="job", min_nodes=1, max_nodes=1, quarantine=settings.quarantine)
    assert again.quarantine == settings.quarantine


def test_with_one_spare_a_job_of_real_processes_runs_at_full_size_and_never_with_a_node_whose_check_fails(tmp_path):
    """Also when a member of the round is lost: the spare comes in, and the sick node does not."""
    with ProcessSet() as party:
        _, place = party.serve()
        sick = party.member("sick", place, "2:2", "linger=0.2", f"check=cat {tmp_path}/healthy")
        a, b, spare = (party.member(name, place, "2:2", "linger=0.2") for name in ("a", "b", "spare"))
        seen(place, lambda status: {"unhealthy", "in", "spare"} <= {one["state"] for one in status["members"]})
        first = next(one for one in (a, b, spare) if one.said(is_world()))
        round = first.world(2)["round"]
        first.kill()
        left = [one for one in (a, b, spare) if one is not first]
        assert {one.world(2, after=round)["round"] for one in left} == {round + 1}
        assert sick.said(is_world()) == []
        assert sick.lives
