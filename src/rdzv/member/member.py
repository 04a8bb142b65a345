"""The member: one agent in one run. The asyncio API is this class.

The member's machine (`core/member.py`) decides; this runner carries out what it decides and tells it what came of that.
Control flows one way: something happens, `_on` takes the event to the machine, and its actions are carried out.

    calls of the holder ----+
    stay: connect, register +--> _on(event) --> step() --> actions
    presence: watch, renew -+

One task (`task`) keeps the member present on whatever engine instance answers: it connects, registers, and stays until
the machine ends that presence; then it comes again, or stops. What it does about trouble is the machine's choice:

- The engine is away: try again, and let the holder know once it has been away for too long (G7).
- Another instance answers at the same place: it came back empty. Register anew, and report what is held (T13).
- Another instance answers at another place: refuse it, if a round is known, unless an operator or the platform says that
  the former one is gone (T16).

All state is touched by one event loop only; `blocking` is the API for threads. The calls of the holder are the API; the
attributes are for the parts of the member and for tests, and may change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ..config import arguments
from ..config.settings import Settings
from ..core import member as machine
from ..core import member_actions as actions
from ..core import member_events as events
from ..core.acts import because
from ..core.drain_notice import notice_for
from ..core.keys import Keys
from ..core.member_rules import Change, ChangeKind, shares_address
from ..core.member_state import Holding, Identity, MemberState, Standing
from ..core.model import SEALED, CauseKind
from ..core.status import Status
from ..core.text import NAME_MAX, REASON_MAX, clip
from ..core.worker_messages import EndNotice
from ..engines.port import Driver, EngineReset, Get, ServerLife, Session
from ..errors import Evicted, NotJoined, RoundOver, Unreachable, Untrusted
from ..system.node import Node
from ..system.timers import OutOfTime, TimeLimit, TimerGroup, Wakeup, backoff_s, sleep, with_timeout
from .departure import say_goodbye
from .gate import Gate
from .log import is_logged
from .next_bootstrap import NextBootstrap
from .notices import Observer
from .notifier import Notifier
from .presence import Look, Presence
from .registration import member_name, record_for
from .run_status import read_status, read_status_from_outside, timed_out, unanswered
from .waiting import report_waiting
from .worker_notices import WorkerNotices
from .worker_watch import WorkerWatch
from .world import AsyncWorld

T = TypeVar("T")

CALL_S = 30.0
"""How long `drain` and `close_run` try if they are not told: torch's bound for closing a run."""
TELL_S = 5.0
"""After a signal: how long to try to tell the others. Workers need the rest of the time that the platform gives them."""
CONNECT_S = 10.0
"""How long `status` of a member that is not present may take to connect, beyond the time for one answer."""
LEAVE_S = 5.0
"""How long leaving may take. The end of the lease tells the others what could not be said by then."""
STOP_S = 2.0
"""How long the member tries to end a key of which it does not know whether it was put."""
PAUSE_S = (0.02, 0.5)
"""First and longest wait between two attempts to find the engine.

Short at first: nodes are started together, and each one quicker than the server's lost up to half a second."""


class Member:
    """One agent in one run, for one event loop. Nothing happens before the first call."""

    def __init__(self, driver: Driver, settings: Settings, node: Node, *listeners: Observer | None) -> None:
        self.run_id = settings.run_id
        self.driver = driver
        self._settings = settings
        self._node = node
        self.bell = Wakeup(node)
        """Rings when the state may have changed."""
        self._limits = TimerGroup(node, self.bell.ring)
        """Time limits of calls, and an alarm that rings when a join may have waited for too long: nearly none has."""
        me = Identity(
            run_id=settings.run_id, name=member_name(settings, node), endpoint=driver.endpoint, lease=settings.lease,
            outage_grace=settings.outage_grace, closed_for=settings.closed_for, capacity=settings.capacity,
        )  # fmt: skip
        trouble = f"engine {driver.endpoint} has not answered yet; `rdzv doctor` on this node tells more"
        self.state = MemberState(me, trouble=trouble)
        self._notifier = Notifier(me.run_id, me.name, node.now, [one for one in listeners if one is not None])
        self.presence: Presence | None = None
        """Where the member is registered at present."""
        self.task: asyncio.Task[None] | None = None
        """Keeps the member present, from the first join on."""
        self.world: AsyncWorld | None = None
        self._told_of: Exception | None = None
        """The error that the holder was told of last. An eviction is told once, by `changed` or by the next call."""
        self._coming: Presence | None = None
        """The presence that the machine may end: the present one, or the one that is being registered."""
        self._former: Presence | None = None
        """The last presence, if the end of its instance ended it."""
        self._life: ServerLife | None = None
        """The server on which the member was present last, if the platform gave it a name (T16.4)."""
        self._early: asyncio.Task[Session] | None = None
        self._taking: tuple[Presence, Look] | None = None
        """The read that the machine is being told of."""
        self._boot = NextBootstrap(node, settings.bootstrap_port)
        self._gate = Gate(settings, node, self._check_again)
        self._unsure = False
        """The outcome of the last put of the own record is unknown."""
        self._pauses = 0
        self._leaving: asyncio.Task[bool] | None = None
        self._workers: WorkerWatch | None = None
        self._notices: asyncio.Task[None] | None = None
        self.reached: Callable[[int], int] = lambda _round: -1
        """Tells the highest step of the workers in a round; -1: they told none."""

    def __repr__(self) -> str:
        return f"<Rendezvous {self.run_id!r} at {self.driver.endpoint}: {machine.summary(self.state)}>"

    # ---- calls of the holder

    @property
    def changed(self) -> Change | None:
        """Why the world that is held no longer stands, or None while it does. A local read, from any thread.

        Reading an eviction acknowledges it: the next `join` does not raise Evicted. After `leave` its kind is LEFT.
        """
        end = self.state.end  # Read first: the holder should rather be told twice of an eviction that comes in between.
        change = machine.change_to_tell(self.state)
        if change is not None and change.kind is ChangeKind.EVICTED:
            self._told_of = end
        return change

    async def wait_changed(self, timeout_s: float | None = None) -> Change | None:
        """Wait for a change and return it; None: the time ran out first. The member's own leave is a change, too."""
        limit_s = arguments.seconds_or_none("wait_changed", timeout_s)
        deadline = None if limit_s is None else self._node.now() + limit_s
        while machine.change_to_tell(self.state) is None:
            left_s = None if deadline is None else deadline - self._node.now()
            if not await self.bell.wait(left_s, self.bell.rings):
                break
        return self.changed

    async def prepare(self) -> None:
        """Connect already, and serve if that is this node's to do, without taking part: `join` is quicker then.

        It does not wait for that. Whatever comes of it, `join` will say.
        """
        refused = machine.unusable(self.state, "prepare")
        if refused is not None:
            raise refused
        if self.task is None and self._early is None:
            dialling = self.driver.connect()
            self._early = asyncio.get_running_loop().create_task(dialling, name=f"rdzv dials {self._node.host}")

    async def join(self, timeout_s: float | None = None, *, workers: int = 0, role: str = "") -> AsyncWorld:
        """Wait until a round is sealed with this member in it. The call says that no worker of an earlier round runs.

        The time (default: `join_timeout`) counts only while the run has no sealed round: a spare waits as long as it
        must. While the engine is away the time counts, too; finding out the reason takes at most two seconds more.
        `workers`: how many workers this member will start, in that role; `world.worker_ranks` then says which ranks they
        have.
        Raises JoinTimeout, Closed, Evicted (join again), Drained, Banned, SettingsError, Untrusted, EngineMoved.
        """
        wanted_s = arguments.seconds_or_none("join", timeout_s)
        count, named = arguments.whole("join", "workers", workers), arguments.text("join", "role", role)
        refused = machine.join_refusal(self.state, self._told_of)
        if refused is not None:
            self._told_of = refused
            raise refused
        limit_s = self._settings.join_timeout if wanted_s is None else wanted_s
        if self.task is not None and self.state.standing in (Standing.EVICTED, Standing.ENDED):
            ending = asyncio.wait([self.task])  # The former presence may still be giving back its lease.
            if await with_timeout(self._node, limit_s, ending, "rdzv ends a presence") is None:
                raise unanswered(self._settings, self._node, self.state, limit_s)
        if self._notifier.hears("joining"):
            self._tell_of_join()
        if self.state.holding is Holding.HOLDING or self.state.standing not in (Standing.AWAY, Standing.PRESENT):
            self._gate.begin()
        self._on(events.Join(clip(named, NAME_MAX), max(count, 0)))
        if not is_logged("waiting"):
            return await self._wait_for_world(limit_s)
        reports = asyncio.ensure_future(report_waiting(self._node, self.status, limit_s, self._tell_waiting))
        try:
            return await self._wait_for_world(limit_s)
        finally:
            reports.cancel()

    async def done(self, timeout_s: float | None = None) -> None:
        """Say that the work here succeeded, and stay. When all of the round are done, the run closes with success.

        Raises Unreachable if the engine is away for `timeout_s` (default: `outage_grace`).
        """
        wanted_s = arguments.seconds_or_none("done", timeout_s)
        self.check("done", self.state.holding is Holding.HOLDING)
        self._on(events.WorkDone())
        limit_s = self._settings.outage_grace if wanted_s is None else wanted_s
        await self._within(limit_s, self.insist("done", lambda presence: presence.put_record(done=True)))
        self._notice("done", "its work succeeded")

    async def drain(self, reason: str = "asked to go", timeout_s: float = CALL_S, *, grace_s: float | None = None) -> None:
        """Say that this member is about to go, so that the others re-form now. Unreachable: away for `timeout_s`.

        `grace_s` (default: `drain_grace`): how long the workers have to save, if the run has a `drain_notice` and this is less.
        Await `wait_drained` before the workers of this member are stopped.
        """
        why = clip(arguments.text("drain", "reason", reason)) or "no reason was given"
        limit_s = arguments.seconds("drain", timeout_s)
        given_s = arguments.seconds_or_none("drain", grace_s)
        grace = self._settings.drain_grace if given_s is None else max(given_s, 0.001)
        grace = min(grace, self._settings.drain_notice)
        self.check("drain", self.task is not None)
        self._on(events.Draining(why, grace))
        await self._within(limit_s, self.insist("drain", lambda presence: presence.put_record(drain=why, grace=grace)))
        self._notice("drained", reason)

    @property
    def drain_left_s(self) -> float:
        """How long a member that drains should still keep its workers, because they are saving; 0: stop them. A local read."""
        return machine.drain_left_s(self.state, self._node.now(), self._settings.drain_notice)

    async def wait_drained(self) -> None:
        """Wait, after `drain`, until the workers of the run have saved or have had their time: at once without a notice."""
        while (left_s := self.drain_left_s) > 0:
            await self.bell.wait(left_s, self.bell.rings)

    @property
    def notice(self) -> EndNotice | None:
        """The notice that the round held will end, until `saved` answers it. A local read, from any thread."""
        presence, head = self.presence, self.state.head
        given = notice_for(self.state.holds, head)
        if given is None or head is None or presence is None or presence.record.saved == head.call_seq:
            return None
        left_s = given.limit_s - presence.tracker.ages()[0]
        return EndNotice(given.reason, max(0.0, left_s), head.call_seq)

    async def saved(self) -> None:
        """Answer the notice: what this member would lose with the round is saved. Without a notice it does nothing.

        Raises Unreachable if the engine is away for as long as the notice lasts.
        """
        notice = self.notice
        if notice is not None:
            answer = self.insist("saved", lambda presence: presence.put_record(saved=notice.id))
            await self._within(max(notice.seconds, 1.0), answer)

    async def close_run(self, reason: str = "finished", timeout_s: float = CALL_S) -> None:
        """End the run for everybody. Raises RoundOver if the others have gone on without this member.

        Raises Unreachable if the engine is away, or knows nothing of the run, for `timeout_s`. It may be closed all the same.
        """
        arguments.text("close_run", "reason", reason)
        limit_s = arguments.seconds("close_run", timeout_s)
        self.check("close_run", self.task is not None)
        name, holds = self.state.me.name, None if self.state.holds is None else self.state.holds.round
        cause = because(CauseKind.CLOSED, f"{clip(reason, REASON_MAX // 2)} (by {name})", [name])
        closing = self.insist("close_run", lambda presence: presence.close_run(cause, holds))
        if not await self._within(limit_s, closing):
            raise RoundOver(holds.number if holds else 0, "the others have gone on, so it is not ours to close the run")

    async def leave(self, *, failed: bool = False, reason: str = "") -> bool:
        """Go, for good. The run goes on for the others. Takes a few seconds at most, and raises only WrongArgument.

        Returns False if the engine is away, so that the others learn of it by the end of the lease only. A process that
        serves the run stays for up to `serve_on` seconds.

        `failed` says that the work cannot be done here: if quorum is then out of reach, the run is closed with this
        reason (unless on_failure=wait).
        """
        arguments.flag("leave", "failed", failed)
        arguments.text("leave", "reason", reason)
        if self._leaving is None:
            # A task of its own: a caller that stops waiting must not leave half a member behind.
            leaving = self._leave(failed, reason)
            self._leaving = asyncio.get_running_loop().create_task(leaving, name=f"rdzv leave {self.state.me.name}")
        await asyncio.wait([self._leaving])
        return self._leaving.result()

    def keep_out(self, reason: str) -> None:
        """Take no part in rounds that follow the next `join`, while the reason is not empty: be present, and say why.

        A member that has said ready in a join does not take it back.
        """
        self._gate.keep_out(clip(reason))

    async def serve_workers(self) -> str:
        """Open the channel for this member's workers, and return the path for their variable `RDZV_WORKER`.

        It stays open until the member leaves. The path is empty if no socket could be made; the log says why.
        """
        refused = machine.unusable(self.state, "serve_workers")
        if refused is not None:
            raise refused
        if self._workers is None:
            place, bell = lambda: (self.world, self.presence), self.bell.ring
            self._workers = WorkerWatch(self._node, place, self._settings.stall, bell)
            self.reached = self._workers.channel.reached
            if self._settings.drain_notice:
                passing_on = self._pass_on_notices(WorkerNotices(self._workers.channel, self._node.now))
                self._notices = asyncio.get_running_loop().create_task(passing_on, name="rdzv notices")
        return await self._workers.start()

    async def _pass_on_notices(self, notices: WorkerNotices) -> None:
        """Tell the workers when their round will end, and the leader when all of them have saved."""
        while True:
            rings = self.bell.rings
            if notices.look(self.world, self.notice, self.state.workers):
                await self.answer_notice()
            await self.bell.wait(None, rings)

    async def answer_notice(self) -> None:
        """Answer the notice as the workers have done."""
        # `saved` would raise an eviction here, and count it as told: the holder would join again without having heard of it.
        presence, notice = self.presence, self.notice
        while notice is not None and presence is not None and self.presence is presence and not presence.is_over:
            try:
                await presence.put_record(saved=notice.id)
            except (Unreachable, EngineReset):
                await sleep(self._node, 0.1 + 0.2 * self._node.jitter())
            except Evicted:
                await sleep(self._node, 1.0)  # The machine knows, and the next call of the holder raises it.
            else:
                return

    async def status(self) -> Status:
        """The whole run, with the reason for what it waits for. Remote, O(n).

        Raises Unreachable after `read_timeout`; a member that has not joined may need ten seconds more, to connect.
        """
        present = self.presence
        if present is not None:
            return await self._within(self._settings.read_timeout, read_status(self._settings, present.session, present))
        asking = read_status_from_outside(self._settings, self.driver)
        return await self._within(self._settings.read_timeout + CONNECT_S, asking)

    # ---- carrying out

    def _on(self, event: events.MemberEvent) -> None:
        """Take an event to the machine, and carry out what it decides."""
        # By `type(...) is`, the most frequent first: 1,000 members in one process would notice a slower pattern match.
        for action in machine.step(self.state, event, self._node.now()):
            if type(action) is actions.Wake:
                self.bell.ring()
            elif type(action) is actions.Tell:
                self._notice(action.kind, action.reason)
            elif type(action) is actions.TellHead:
                self._notifier.tell_of_head(action.old, action.new)
            elif type(action) is actions.GiveRound:
                self._give(action)
            elif type(action) is actions.Bind:
                self._boot.bind(action.addr, self.state.heard)
            elif type(action) is actions.Connect:
                self.task = asyncio.get_running_loop().create_task(self._stay(), name=f"rdzv member {self._node.host}")
            elif type(action) is actions.EndPresence and self._coming is not None:
                self._coming.end()
            elif type(action) is actions.ForgetShown and self.presence is not None:
                self.presence.forget_shown()
            elif type(action) is actions.MoveWorld and self.world is not None and self.presence is not None:
                self.world.moved_to(self.presence)
            elif type(action) is actions.EndWorld and self.world is not None:
                self.world.end(action.reason)
                if self.state.holds is None:
                    # The holder gives the round up. Until it does, it may be about to take the socket of a round that ended.
                    self.world.bootstrap.release()
                    self.world = None

    def _give(self, given: actions.GiveRound) -> None:
        assert self._taking is not None, "a round is given by a read of the present presence"
        presence, look = self._taking
        presence.take(look)
        address = self._boot.take(given.head.boot, given.entry.rank)
        self.world = AsyncWorld(presence, given.head, given.entry, address)

    def _notice(self, kind: str, reason: str) -> None:
        self._notifier.tell(kind, self.state.heard, reason, holds=self.state.holds if kind == "given" else None)

    def _tell_of_join(self) -> None:
        change, low, high = self.state.change, self._settings.min_nodes, self._settings.max_nodes
        wanted = f"{low} node{'s' if low > 1 else ''}" if low == high else f"{low} to {high} nodes"
        reason = change.reason if change is not None else f"at engine {self.driver.endpoint}, for rounds of {wanted}"
        kind = "" if change is None else "replaced" if change.kind is ChangeKind.ROUND else change.kind.value
        self._notifier.tell("joining", self.state.heard, reason, cause=kind)

    def _tell_waiting(self, text: str, waited_s: float) -> None:
        self._notifier.tell("waiting", self.state.heard, text, seconds=waited_s)

    # ---- being present

    async def _stay(self) -> None:
        """Connect and be present, again and again, for as long as the machine wants."""
        try:
            while self.state.standing is Standing.AWAY:
                session = await self._connect()
                if session is not None:
                    try:
                        await self._be_present(session)
                    finally:
                        await session.close()
        except Exception as error:  # noqa: BLE001  Even a defect must reach the next caller, not vanish in a task.
            self._on(events.Failed(error))

    async def _be_present(self, session: Session) -> None:
        """One presence, from its registration to its end. Returns when the machine, or its instance, has ended it."""
        addr = self._settings.local_addr or session.local_host or self._node.host
        self._on(events.Connected(addr, session.place))
        record = record_for(self._settings, self._node, self.state, addr, self._boot.address, self._boot.same_port)
        if self.state.holds is None:
            record = msgspec.structs.replace(record, unhealthy=self._gate.problem)
        self._unsure = bool(record.unhealthy)  # Then it is to be checked, and to say so.
        presence = self._coming = Presence(session, self._settings, self._node, record, self.state, self._on)
        try:
            asked_at = await self._register(presence)
            if not presence.is_over:  # Else the first head that it saw has ended it.
                self.presence, self._former, self._pauses = presence, None, 0
                brought = presence.record.holds is not None
                self._follow(session.life)
                named = ("", 0.0) if session.life is None else (session.life.name, session.life.began_at)
                self._on(events.Registered(presence.created, brought, asked_at, session.place, *named))
            await presence.run()
            await presence.give_back_lease()
        except EngineReset:
            # Only a new instance has forgotten this member, so it matters which one answers next (`_end_former`).
            self._former = self.presence or self._former
            self._on(events.EngineAway("the engine was restarted"))
        except Evicted:
            await presence.give_back_lease()
        except asyncio.CancelledError:
            if self.presence is None:  # The key may be there without the answer having come.
                await presence.give_back_lease()
            raise
        finally:
            self.presence = self._coming = None

    async def _connect(self) -> Session | None:
        """Try until an engine answers that may be followed. None: the member's standing has changed meanwhile."""
        while True:
            session: Session | None = None
            try:
                session = await self._dial()
                problem = await self._why_not_follow(session)
                if problem is None:
                    followed, session = session, None
                    return followed
                self._on(events.Elsewhere(session.place, problem))
            except (Unreachable, Untrusted) as error:
                # A member that comes for the first time is told at once that it is not trusted, since waiting mends
                # nothing. One that has been in goes on as through any outage: it was trusted before, and its workers
                # run (G7).
                if isinstance(error, Untrusted) and not self.state.place:
                    raise
                self._on(events.EngineAway(error.sentence))
            except EngineReset as error:
                self._on(events.EngineAway(str(error)))
            finally:
                if session is not None:  # It is not followed, or this member is leaving.
                    await session.close()
            if self.state.standing is not Standing.AWAY:
                return None
            await self._pause()

    async def _dial(self) -> Session:
        early = self._early
        if early is not None:
            await asyncio.wait([early])  # If this is cancelled, the member leaves, and ends what came of it.
            self._early = None
            with suppress(Unreachable, Untrusted):  # What was wrong then need not be now.
                return early.result()
        return await self.driver.connect()

    async def _why_not_follow(self, session: Session) -> str | None:
        """T16: None if the engine runs where the member's last one did, or an operator or the platform lets members follow it.

        Otherwise the reason, which is empty if the platform has promised nothing about this engine.
        """
        if not machine.is_elsewhere(self.state, session.place):
            return None
        if (await session.txn(then=[Get(Keys(self.run_id).adopt)])).item(0) is not None:
            return None
        former, life = self._life, session.life
        if former is None or life is None:
            return ""
        problem = machine.successor_problem(self.state, life.name, life.began_at)
        if problem is None and await former.answers(life.began_at):
            both = f"still answers at {former.address}, and the new one is at {life.address}"
            problem = f"the former server of place {life.name!r} {both}: the platform started it too early, so end one of them"
        return problem

    def _follow(self, life: ServerLife | None) -> None:
        self._life = life
        if life is not None:
            life.follow()

    async def _register(self, presence: Presence) -> float:
        """T1, until it is certain: under one id, so that no attempt whose answer was lost stays behind as a ghost."""
        while True:
            try:
                await self._end_former(presence)
                return await presence.begin(*machine.reports(self.state))
            except Unreachable as error:
                self._on(events.EngineAway(error.sentence))
                await self._pause()

    async def _end_former(self, presence: Presence) -> None:
        """Tell a known instance from an emptied one (T13.3, seed 4780).

        Only a new instance has forgotten this member. If the old one answers again, after another engine answered for a
        while, nobody needs to be told of the round, and the former key is a ghost, if it is there at all. It is ended
        first, so that it cannot be sealed in.
        """
        former, session = self._former, presence.session
        if former is None or former.session.instance != session.instance:
            return
        await session.revoke(former.lease)
        self._former = None
        reason = "it was led to another engine for a while, and could not renew its lease"
        self._on(events.KeyGone(reason))
        raise Evicted(self.run_id, self.state.me.name, reason)

    async def _pause(self) -> None:
        pause_s = backoff_s(self._pauses, PAUSE_S, self._node.jitter())
        self._pauses += 1
        await sleep(self._node, pause_s)

    async def _leave(self, failed: bool, reason: str) -> bool:
        """Go, and return whether the others could be told, or had nothing to be told of."""
        present = self.presence
        told = present is None and not (self.task is not None and self.state.standing is Standing.AWAY)
        if self.state.drain and not failed:
            reason = f"{self.state.drain}; {reason}" if reason else self.state.drain
        why = clip(reason) or "no reason was given"
        if self.task is not None:
            self._notifier.tell("leaving", self.state.heard, why, cause="gave_up" if failed else "left")
        self._on(events.Leave())
        if present is not None:
            goodbye = say_goodbye(present, failed, why)
            with suppress(Exception):
                told = bool(await with_timeout(self._node, LEAVE_S, goodbye, "rdzv goodbye"))
        if self._workers is not None:
            self._workers.stop()
        if self._notices is not None:
            self._notices.cancel()
        if self.task is not None:
            self.task.cancel()
            timer = self._node.call_later(STOP_S, self.task.cancel)
            await asyncio.wait([self.task])
            timer.cancel()
        if self._early is not None:
            self._early.cancel()
            await asyncio.wait([self._early])
            if not self._early.cancelled() and self._early.exception() is None:
                await self._early.result().close()
        await self.driver.close()
        self._limits.close()
        self._boot.release()
        if self.world is not None:
            self.world.bootstrap.release()
        self._on(events.Left())
        self._notifier.close()
        return told

    # ---- T3, T4: waiting

    async def _wait_for_world(self, limit_s: float) -> AsyncWorld:
        began_at = self._node.now()
        while True:
            rings = self.bell.rings
            self.check("join")
            # If there is a world already, another join that is under way was given it, for all of them.
            world = self.world or await self._try_take(began_at, limit_s)
            if world is not None:
                return world
            heard, now = self.state.heard, self._node.now()
            if heard is not None and heard.phase is SEALED and not machine.away_s(self.state, now):
                began_at = now
            waited_s = now - began_at
            if waited_s >= limit_s:
                raise await timed_out(self._settings, self._node, self.state, self.presence, waited_s)
            self._limits.be_set(limit_s - waited_s + 0.001)
            await self.bell.wait(None, rings)

    async def _try_take(self, began_at: float, limit_s: float) -> AsyncWorld | None:
        """Do what a waiting join does now, within its time. Returns the world, if it is this member's to take."""
        presence = self.presence
        announced = None if presence is None else presence.record
        wanted = machine.next_step(self.state, self._node.now(), announced, unsure=self._unsure)
        if type(wanted) is actions.Raise:
            raise wanted.error
        if wanted is None or presence is None:
            return None
        try:
            if type(wanted) is actions.Examine and presence.shows(wanted.table):
                await self._examine(presence, wanted.table)  # Without a request, so it needs no time limit.
                return self.world
            with TimeLimit(self._limits, max(began_at + limit_s - self._node.now(), 0.0)):
                if type(wanted) is actions.Examine:
                    await self._examine(presence, wanted.table)
                else:
                    await self._put_ready(presence)
        except OutOfTime:
            raise unanswered(self._settings, self._node, self.state, self._node.now() - began_at) from None
        except (EngineReset, Unreachable):
            await sleep(self._node, 0.1 + 0.1 * self._node.jitter())
            self.bell.ring()
        except Evicted:
            pass  # The machine knows.
        return self.world

    async def _examine(self, presence: Presence, table: str) -> None:
        look = await presence.examine(table)
        if presence is not self.presence or presence.is_over:
            self.bell.ring()
            return
        self._taking = presence, look
        self._on(events.Examined(table, look.head, look.entry, presence.created))
        self._taking = None
        if look.head is not None and shares_address(presence.record, look.head):
            self.bell.ring()  # The table may not be this member's, which must then announce another address.

    async def _put_ready(self, presence: Presence) -> None:
        """T4: one put per member and round, with a fresh bootstrap socket, once the node was checked."""
        # Once in a join: a member that has said ready may be sealed in at any moment, and must not take it back.
        unhealthy = await self._gate.judge() if self._gate.problem else ""
        record, state, boot = presence.record, self.state, self._boot
        owes = state.holding is Holding.OWING
        left = state.left if owes else record.left
        # Nothing is bound anew for a repetition after an unknown outcome: what was announced must be bound (seed 2619).
        if not boot.address or (boot.address == record.boot and record.left < left):
            boot.bind(record.addr, state.heard)
        elif not owes and not self._unsure and state.head is not None and shares_address(record, state.head):
            boot.bind(record.addr, state.heard, keep=True)
        heard = record.heard or record.holds
        self._unsure = True
        reached = self.reached(left.number) if self._settings.futile_rounds else -1
        await presence.put_record(
            left=left, boot=boot.address, same_port=boot.same_port, role=state.role, workers=state.workers,
            holds=None, heard=heard, done=False, unhealthy=unhealthy, stalled=None, saved=0, reached=reached,
        )  # fmt: skip
        self._unsure = False
        if presence is self.presence:
            self._on(events.ReadyPut(left))

    def _check_again(self) -> None:
        self._unsure = True  # The record says unhealthy, which may no longer be so.
        self.bell.ring()

    # ---- helpers

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, T]) -> T:
        """Await the work of one call. Raises Unreachable when its time is over: the engine did not answer."""
        try:
            with TimeLimit(self._limits, limit_s):
                return await work
        except OutOfTime:
            problem = "no answer" if self.presence is not None else f"away all the time; {self.state.trouble}"
            raise Unreachable(self.driver.endpoint, problem, limit_s) from None

    def check(self, call: str, joined: bool = True) -> None:
        """Raise, before any call is answered, if the member has left, was evicted or met something final."""
        refused = machine.refusal(self.state, call)
        if refused is not None:
            self._told_of = refused
            raise refused
        if not joined:
            raise NotJoined(self.run_id, call)

    async def insist(self, call: str, act: Callable[[Presence], Awaitable[T]]) -> T:
        """Do it on the present presence, waiting for one if need be. What is done here is safe to do twice."""
        while True:
            self.check(call)
            presence = self.presence
            if presence is None or presence.is_over:
                await self.bell.wait(1.0)
                continue
            try:
                return await act(presence)
            except (Unreachable, EngineReset):
                await sleep(self._node, 0.1 + 0.2 * self._node.jitter())
            except Evicted:
                pass  # The machine knows, and the next check raises it.
