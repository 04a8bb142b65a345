"""The runs of an engine are listed by what keeps them, with bounds, and without a trace in them."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import pytest

from rdzv.aio import AsyncRendezvous
from rdzv.config.settings import Settings
from rdzv.core.keys import Keys
from rdzv.engines.embedded import frames
from rdzv.engines.embedded.trust import Trust
from rdzv.engines.port import Put
from rdzv.errors import SettingsError, Unreachable, Untrusted
from rdzv.operate import runs
from rdzv.operate.runs import list_runs, look_at_runs
from support.embedded_server import Raw, serving
from support.ports import free_port

QUICK = {"min_nodes": 1, "max_nodes": 2, "last_call": 0, "lease": 3}
FULL = {**QUICK, "max_nodes": 1}  # No server waits for members that may come back.


def viewing(endpoint, **options):
    return Settings.make(str(endpoint), run_id="any", min_nodes=1, max_nodes=1, is_host=False, **options)


def fill(server, *names, keys=1):
    for name in names:
        engine = server.open_run(name).engine
        engine.txn([], [Put(f"{Keys(name).group}{number}", b"") for number in range(keys)], [])


def ids(listed):
    return [run.run_id for run in listed.runs]


async def test_a_server_lists_its_runs_page_by_page_and_none_of_them_notices():
    async with serving() as server:
        names = sorted(f"job/{number} ü" for number in range(600))
        fill(server, *names)
        server.open_run("asked for only")
        heard = {run.heard_at for run in server.runs.values()}
        listed = await list_runs(viewing(f"127.0.0.1:{server.port}"))
        assert (ids(listed), listed.more) == (names, False)
        assert all(run.age_s >= 0 and run.silent_s >= 0 for run in listed.runs)
        assert {run.heard_at for run in server.runs.values()} == heard
        assert "any" not in server.runs, "no run begins by a question"
        some = await list_runs(viewing(f"127.0.0.1:{server.port}"), limit=250)
        assert (ids(some), some.more) == (names[:250], True)
        server._forget(server.runs[names[0]])
        fill(server, "zzz")
        assert ids(await list_runs(viewing(f"127.0.0.1:{server.port}"))) == [*names[1:], "zzz"]


async def test_a_page_of_runs_is_bounded_in_bytes_and_in_work():
    async with serving() as server:
        long = sorted(f"{number:04}" + "€" * 1020 for number in range(50))
        fill(server, *long)
        page = server.list_runs()
        assert 0 < len(page.runs) < 50
        assert len(frames.encode(page)) <= frames.PAGE_BYTES
        fill(server, *[f"5{number:04}" for number in range(1000)])
        for number in range(3000):
            server.open_run(f"9{number:04}")
        found, after, pages = 0, "", 0
        while pages == 0 or after:
            page = server.list_runs(after)
            found, after, pages = found + len(page.runs), page.after, pages + 1
            assert len(page.runs) <= frames.PAGE_RUNS
        assert found == 1050
        assert server.list_runs("9").runs == (), "nothing is there but runs without keys"
        assert server.list_runs("9").after == f"9{frames.PAGE_LOOKS - 1:04}", "and not all of them were looked at"


async def test_only_holders_of_the_secret_are_told_which_runs_there_are():
    async with serving(trust=Trust.of(viewing("rdzv://", token="s3cret"))) as server:
        fill(server, "job")
        where = f"127.0.0.1:{server.port}"
        assert ids(await list_runs(viewing(where, token="s3cret"))) == ["job"]
        for wrong in ({}, {"token": "another"}):
            with pytest.raises(Untrusted):
                await list_runs(viewing(where, **wrong))
        raw = await Raw.connect(server.port)
        raw.write(frames.PREAMBLE, frames.RunsWanted())
        said = await raw.rest()
        assert b"job" not in said
        await raw.close()


async def test_a_server_that_does_not_know_yet_whether_it_is_meant_lists_nothing():
    async with serving(is_open=False) as server:
        fill(server, "job")
        with pytest.raises(Unreachable, match="just started"):
            await list_runs(viewing(f"127.0.0.1:{server.port}"))


async def test_an_older_server_is_named_as_what_it_is(monkeypatch):
    monkeypatch.setattr(frames, "first_decoder", msgspec.msgpack.Decoder(frames.Challenge | frames.Hello))
    async with serving() as server:
        with pytest.raises(Unreachable, match="older than this rdzv and cannot list its runs: name the run"):
            await list_runs(viewing(f"127.0.0.1:{server.port}"))


async def test_an_agent_that_serves_lists_its_one_run_and_is_named():
    where = f"127.0.0.1:{free_port()}"
    async with AsyncRendezvous(where, run_id="job", **FULL) as member:
        await member.join()
        (one,) = await look_at_runs(viewing(where), (await list_runs(viewing(where))).runs)
        assert one.run.run_id == "job"
        assert one.status.served_by == f"an agent of this run on {socket.gethostname()} at {where}"


async def test_a_false_server_cannot_keep_its_client_asking(monkeypatch):
    monkeypatch.setattr(runs, "READS_MAX", 20)
    async with serving() as server:
        asked = []

        def endless(after=""):
            asked.append(after)
            return frames.RunsListed((frames.RunListed("\x1b[31m", 0.0, 0.0, 0),), f"{len(asked):09}")

        monkeypatch.setattr(server, "list_runs", endless)
        listed = await list_runs(viewing(f"127.0.0.1:{server.port}"))
        assert (listed.runs, listed.more, len(asked)) == ((), True, 20)
        monkeypatch.setattr(server, "list_runs", lambda _after: frames.RunsListed((), "a"))
        assert await list_runs(viewing(f"127.0.0.1:{server.port}")) == runs.RunList(()), "a page that leads nowhere is the last"


@pytest.mark.parametrize("place", ["memory", "file"])
async def test_an_engine_that_keeps_all_keys_together_is_asked_for_the_first_key_of_each_run(place, tmp_path):
    endpoint = {"memory": "memory://many", "file": f"file://{tmp_path}/job"}[place]
    names = ["a", "a/b", "a0", "b"]
    members = [AsyncRendezvous(endpoint, run_id=name, **QUICK) for name in names]
    try:
        await asyncio.gather(*(member.join() for member in members))
        listed = await list_runs(viewing(endpoint))
        assert sorted(ids(listed)) == names
        assert not listed.more
        assert (await list_runs(viewing(endpoint), limit=2)).more
        seen = await look_at_runs(viewing(endpoint), listed.runs)
        assert [(one.run.run_id, one.status.phase, one.problem) for one in seen] == [
            (name, "sealed", "") for name in ids(listed)
        ]
    finally:
        await asyncio.gather(*(member.leave() for member in members))


async def test_files_beside_a_register_are_listed_if_they_are_registers(tmp_path):
    (tmp_path / "notes").write_text("nothing of rdzv's")
    (tmp_path / "job.lock").write_text("")
    async with AsyncRendezvous(f"file://{tmp_path}/one", run_id="first", **QUICK) as member:
        await member.join()
        (tmp_path / "copy").symlink_to(tmp_path / "one")
        (tmp_path / "bad\x1b[31m").write_bytes((tmp_path / "one").read_bytes())
        os.mkfifo(tmp_path / "pipe")
        listed = await list_runs(viewing(f"file://{tmp_path}/two"))
        assert [(run.run_id, str(run.endpoint)) for run in listed.runs] == [("first", f"file://{tmp_path}/one")]
        assert not (tmp_path / "two").exists(), "a question makes no file"
        (tmp_path / "two").write_text("a file of others")
        with pytest.raises(Exception, match="not rdzv's"):
            await list_runs(viewing(f"file://{tmp_path}/two"))
        (tmp_path / "broken").write_bytes(runs.MAGIC + b"?")
        assert ids(await list_runs(viewing(f"file://{tmp_path}/one"))) == ["first"]


async def test_a_file_that_the_system_refuses_to_look_for_is_unreachable():
    place = f"file:///tmp/{'a' * 300}"
    with pytest.raises(Unreachable) as refused:
        await list_runs(viewing(place))
    assert refused.value.sentence == f"engine {place} is unreachable: file name too long"


async def test_torchs_store_cannot_list_and_says_so():
    # `rdzv runs` has no --run-id itself.
    with pytest.raises(SettingsError, match=r"cannot list them: give its id to `rdzv status`, .* \(--run-id\)"):
        await list_runs(viewing("c10d://127.0.0.1:1"))


async def test_one_run_that_cannot_be_read_does_not_hide_the_others():
    async with serving() as server:
        where = f"127.0.0.1:{server.port}"
        async with AsyncRendezvous(where, run_id="job", is_host=False, **FULL) as member:
            await member.join()
            fill(server, "none", "strange")
            listed = await list_runs(viewing(where))
            seen = {one.run.run_id: one for one in await look_at_runs(viewing(where), listed.runs)}
            assert seen["job"].status.phase == "sealed"
            assert seen["job"].status.served_by == f"rdzv serve at {where}"
            assert seen["strange"].status is None, "it has keys, but not those of a run"
            assert "the run has no id" in seen["none"].problem
