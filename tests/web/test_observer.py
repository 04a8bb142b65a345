"""An observer sees what happens in real runs, with one watch per run, and outlives their engines."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

from rdzv.config.settings import Settings
from rdzv.core.keys import Keys
from rdzv.engines.embedded.inside import InsideSession
from rdzv.engines.embedded.server import Server
from rdzv.engines.port import EngineReset, Get, Put
from rdzv.errors import Unreachable
from rdzv.operate import commands, journal
from rdzv.operate.run_viewer import RunViewer
from rdzv.web import metrics, observer
from rdzv.web.observer import RunsObserver
from rdzv.web.serving import WebServer
from rdzv.web.sources import EndpointSource, ServerSource
from support.embedded_server import serving, session_to
from support.ports import free_port
from support.web_pages import Listener, fetch, scene, until


def viewing(port):
    return Settings.make(f"127.0.0.1:{port}", run_id="dashboard", min_nodes=1, max_nodes=1, is_host=False, read_timeout=1)


async def test_a_loss_a_leader_change_and_a_newcomer_are_counted_as_they_happen():
    async with scene() as made:
        made.go("a", "b", "c")
        model = (await made.until_round(1, 3)).model
        leader = model.status.leader
        await made.kill(next(host for host in "abc" if host != leader))
        await made.until_round(2, 2)
        member = made.members[leader][0]
        await until(lambda: member.state.holds is not None and member.state.holds.number == 2, "the leader has the round, too")
        await made.leave(leader)
        await until(lambda: model.counters.leader_changes, "another leader")
        made.go("d")
        await made.until_round(3, 2)
        counters = model.counters
        assert (counters.sealed, counters.evictions, counters.leader_changes) == (3, 1, 1)
        assert counters.broken == {"lost": 1, "left": 1}
        assert sum(counters.form.counts) == 1
        assert sum(counters.restart.counts) == 2
        async with session_to(made.server.port) as session:
            (history,) = await journal.read(session, "job")
        assert sum(counters.lost_s.values()) == pytest.approx(history.cost.seconds, abs=0.01)
        assert {lane.name: len(lane.stays) for lane in model.lanes()[0]} == dict.fromkeys("abcd", 1)
        assert {blame.last for blame in model.blame()} == {"lost", "left"}


async def test_the_figures_are_those_of_status():
    async with scene() as made:
        made.go("a", "b", "c", nodes=(2, 3))
        await made.until_round(1, 3)
        made.go("d", nodes=(2, 3))
        await until(lambda: len(made.run().model.status.members) == 4)
        async with session_to(made.server.port) as session:
            status = await RunViewer(session, "job", time.monotonic).look()
        (figures,) = metrics.take(made.page.observer).runs
        assert (figures.phase, figures.round, figures.nodes_min, figures.nodes_max) == ("sealed", 1, 2, 3)
        assert {state: count for state, count in figures.members.items() if count} == {"in": 3, "spare": 1}
        assert made.run().model.status.members == status.members
        assert made.run().model.status.events == status.events


async def test_the_age_of_the_last_renewal_is_known_inside_the_server():
    async with scene() as made:
        made.go("a", "b", nodes=(2, 2), lease=1.5)
        follower = await made.until_round(1, 2)
        assert len(follower.renewal_ages()) == 2
        assert all(-0.1 <= age < 1.6 for age in follower.renewal_ages().values())


async def test_an_embedded_server_pays_one_watch_however_many_browsers_look():
    async with scene() as made:
        made.go("a", "b", nodes=(2, 2))
        await made.until_round(1, 2)
        run = made.server.runs["job"]
        before, connections = (run.targets, run.prefixes), len(run.sessions)
        page = WebServer(EndpointSource(viewing(made.server.port)), ("127.0.0.1", 0))
        await page.start()
        listeners = []
        await until(lambda: "job" in page.observer.runs and page.observer.runs["job"].model.counters.sealed)
        for _ in range(5):
            listeners.append(await Listener.open(page.port, "/events?run=job"))
            assert (await listeners[-1].next())[1]["round"] == 1
        # One watch, of the group and of the progress of its workers.
        assert (run.targets - before[0], run.prefixes - before[1], len(run.sessions) - connections) == (2, 2, 1)
        assert page.observer.runs["job"].model.status.members == made.run().model.status.members
        assert made.page.observer.source.figures().connections == 3
        await page.stop()
        await until(lambda: (run.targets, run.prefixes) == before)
        for one in listeners:
            one.writer.close()


async def test_a_run_that_is_gone_is_shown_for_a_while_and_goes_on_when_it_is_back(monkeypatch):
    async with scene() as made:
        made.go("a", nodes=(1, 1), closed_for=0.3)
        follower = await made.until_round(1, 1)
        listener = await Listener.open(made.port, "/events?run=job")
        async with session_to(made.server.port) as session:
            assert await commands.close(session, "job", "enough", "an operator")
        await until(lambda: follower.model.status.phase == "closed")
        await made.leave("a")
        monkeypatch.setattr(type(made.server.runs["job"].engine), "__len__", lambda _: 0)
        await until(lambda: follower.gone_at is not None)
        assert follower.model.status.phase == "closed", "how it ended can still be seen"
        monkeypatch.undo()
        assert made.page.observer.runs["job"] is follower
        await until(lambda: made.run() is not follower)
        assert made.run().model is follower.model
        gone = []
        while gone != [False, True, False]:  # A page that is open sees it go and come back.
            seen = (await listener.next())[1]
            gone += [is_gone for is_gone in [seen.get("glance", seen).get("gone")] if is_gone not in (None, *gone[-1:])]
        listener.writer.close()
        monkeypatch.setattr(observer, "KEPT_S", 0.0)
        made.server.runs["job"].forget()
        del made.server.runs["job"]
        await until(lambda: not made.page.observer.runs)


async def test_at_most_so_many_runs_are_watched(monkeypatch, caplog):
    monkeypatch.setattr(observer, "RUNS_MAX", 1)
    async with scene() as made:
        made.go("a", nodes=(1, 1))
        made.go("b", nodes=(1, 1), run_id="other")
        made.go("c", nodes=(1, 1), run_id="third")
        await until(lambda: made.page.observer.unwatched == 2)
        assert len(made.page.observer.runs) == 1
        assert "2 of 3 runs are not shown" in caplog.text


async def test_an_engine_that_is_away_is_not_ready_and_is_found_again():
    port = free_port()
    page = WebServer(EndpointSource(viewing(port)), ("127.0.0.1", 0))
    await page.start()
    page.observer.source.poll_s = 0.1
    await until(lambda: page.observer.trouble.startswith("engine"))
    status, _, body = await fetch(page.port, "/readyz")
    assert (status, b"does not answer" in body) == (503, True)
    assert (await fetch(page.port, "/healthz"))[0] == 200
    assert b"rdzv_engine_up 0.0" in (await fetch(page.port, "/metrics"))[2]
    async with serving(port=port):
        await until(lambda: page.observer.is_up)
        assert (await fetch(page.port, "/readyz"))[0] == 200
    await until(lambda: not page.observer.is_up)
    await page.stop()


async def test_one_run_can_be_followed_through_a_restart_of_its_server():
    port = free_port()
    server = Server(("127.0.0.1", port))
    await server.start()
    async with session_to(port) as session:
        await session.txn(then=[Put(Keys("job").settings, b"x")])
    source = EndpointSource(viewing(port), "job")
    watching = RunsObserver(source)
    source.poll_s = 0.1
    watching.start()
    await until(lambda: "job" in watching.runs and watching.runs["job"].model.status is not None)
    assert "cannot be read" in watching.runs["job"].model.status.reason
    await server.stop()
    await until(lambda: not watching.is_up)
    server = Server(("127.0.0.1", port))
    await server.start()
    await until(lambda: watching.is_up and watching.runs["job"].gone_at is not None, "the run is gone")
    await watching.stop()
    await server.stop()


async def test_the_reason_of_a_run_that_waits_is_kept_up_to_date(monkeypatch):
    monkeypatch.setattr(observer, "LOOK_AGAIN_S", 0.1)
    async with scene() as made:
        made.go("a", "b", nodes=(2, 3), last_call=30)
        await until(lambda: "job" in made.page.observer.runs)
        seen = set()
        await until(lambda: seen.add(made.run().model.status and made.run().model.status.reason) or len(seen) > 3, "it counts")


async def test_a_defect_is_logged_and_the_run_is_followed_again(monkeypatch, caplog):
    async with scene() as made:
        monkeypatch.setattr(observer.RunFollower, "_note_leader", lambda *_: 1 / 0)
        made.go("a", nodes=(1, 1))
        await until(lambda: "a defect in the observer of run 'job'" in caplog.text)
        assert "its log says more" in made.run().trouble
        monkeypatch.undo()
        await made.until_round(1, 1)
        assert made.run().trouble == ""


async def test_a_defect_that_comes_again_and_again_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(observer, "RETRY_S", (0.0, 0.0))
    tries = []
    monkeypatch.setattr(observer.RunFollower, "_note_leader", lambda *_: tries.append(1) or 1 / 0)
    async with scene() as made:
        made.go("a", nodes=(1, 1))
        await until(lambda: len(tries) > 5)
    assert caplog.text.count("ZeroDivisionError: ") == 1


class FailingSource(ServerSource):
    """Fails to tell its runs, as often as it is told to."""

    def __init__(self, server, problem, times):
        super().__init__(server, "it")
        self.problem, self.times = problem, times

    async def runs(self):
        if self.times:
            self.times -= 1
            raise self.problem
        return await super().runs()


async def test_a_look_that_fails_as_nobody_foresaw_is_logged_and_the_next_one_is_made(caplog):
    async with serving() as server:
        watching = RunsObserver(FailingSource(server, OSError("stale file handle"), 1))
        troubles = []
        watching.listeners.append(lambda _: troubles.append((watching.is_up, watching.trouble)))
        watching.start()
        await until(lambda: watching.is_up, "it is asked again")
        await watching.stop()
    assert troubles == [(False, observer.DEFECT), (True, "")]
    assert "a defect in the observer of it" in caplog.text
    assert "stale file handle" in caplog.text


async def test_an_engine_that_was_away_for_hours_is_found_again(monkeypatch):
    monkeypatch.setattr(observer, "RETRY_S", (0.0, 0.0))
    async with serving() as server:
        watching = RunsObserver(FailingSource(server, Unreachable("it", "it is away"), 1100))
        watching.start()
        await until(lambda: watching.is_up, "it is asked again")
        await watching.stop()


async def test_a_session_inside_ends_with_its_run():
    async with serving() as server:
        run = server.open_run("job")
        heard_at = run.heard_at
        source = ServerSource(server, "it")
        session = await source.connect("job")
        lease = await session.grant(5.0)
        await session.renew(lease)
        await session.txn(then=[Put("a/b", b"1", lease)])
        watch = session.watch(["a/"], 0)
        assert (await anext(watch)).events[0].key == "a/b"
        assert session.renewal_ages("a/").keys() == {"b"}
        await session.revoke(lease)
        assert (await session.txn(then=[Get("a/b")])).item(0) is None
        assert run.heard_at == heard_at, "an observer is no sign that members can reach the server"
        with pytest.raises(Unreachable):
            await source.connect("other")
        run.forget()
        del server.runs["job"]
        assert await source.runs() == []
        with pytest.raises(EngineReset):
            await asyncio.wait_for(anext(aiter(session.watch(["a/"], 0))), 5)
        with pytest.raises(EngineReset):
            await session.txn()
        inside = InsideSession(server, server.open_run("job"))
        watch = inside.watch(["a/"], 0)
        await inside.close()
        with pytest.raises(Unreachable):
            await anext(aiter(watch))
        with pytest.raises(Unreachable):
            await inside.txn()


async def test_a_session_inside_that_was_closed_is_not_kept():
    async with serving() as server:
        server.open_run("job")
        source = ServerSource(server, "it")
        kept = await source.connect("job")
        closed = weakref.ref(await source.connect("job"))
        await closed().close()
        await source.runs()
        gc.collect()
        assert closed() is None
        await kept.txn()


async def test_an_operators_note_is_in_the_journal_and_the_oldest_of_many_is_overwritten(monkeypatch):
    monkeypatch.setattr(commands, "NOTES_MAX", 2)
    async with scene() as made:
        made.go("a", nodes=(1, 1))
        follower = await made.until_round(1, 1)
        async with session_to(made.server.port) as session:
            for index in range(3):
                await commands.note(session, "job", "anna", f"note {index}")
            await commands.note(session, "other", "anna", "there is no such run")
            await session.txn(then=[Put(Keys("garbage").head, b"?")])
            await commands.note(session, "garbage", "anna", "nobody can read its head")
            (history,) = await journal.read(session, "job")
        assert [step.text for step in history.steps[1:]] == ["note 1", "note 2"]
        assert history.steps[-1].entry.by == "anna"
        await follower.refresh()
        assert follower.model.lines()[0]["text"] == "note 2"
