"""The member: one agent in a run. It follows the rules; it makes none.

It stays present (`attendance`), waits for rounds and takes them, and always knows what its holder must be told (`changed`).
All its state is touched by one event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from ..config.settings import Settings
from ..core.acts import because
from ..core.member import Change, ChangeKind, TakeResult, WaitingStep, change_for, report, still_ours, waiting_step
from ..core.model import NO_ROUND, CauseKind, Head, Phase, RankEntry, RoundReport
from ..core.model import MemberRecord as Record
from ..core.status import Status, describe
from ..core.text import REASON_MAX, clip
from ..engines.port import Driver, EngineReset, Session
from ..errors import (
    Closed,
    Drained,
    EngineMoved,
    Evicted,
    JoinTimeout,
    LeftAlready,
    NotJoined,
    RdzvError,
    RoundOver,
    Unreachable,
)
from ..system import bootstrap
from ..system.bootstrap import Bootstrap
from ..system.node import Node
from ..system.timers import CoalescingTimer, Wakeup, sleep, with_timeout
from .departure import say_goodbye
from .notices import Log, Notice, Observer, about_head, hand_over
from .presence import Presence
from .presence_loop import PresenceLoop, RunReplaced
from .registration import member_name
from .run_snapshot import read_run
from .world import AsyncWorld

T = TypeVar("T")

EXPLAIN_S = 2.0
"""How long a join that has failed may take to find out why, beyond the time it was given."""
LEAVE_S = 5.0
"""How long leaving may take; what could not be said by then, the lease will say."""


class Member:
    """One agent in one run. Not safe to share between event loops; `blocking` is the face for threads."""

    def __init__(
        self, driver: Driver, settings: Settings, node: Node, observer: Observer | None = None
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._node = node
        self._observer = observer
        self._name = member_name(settings, node)
        self._log = Log()
        self._bell = Wakeup(node)
        self._attendance = PresenceLoop(driver, settings, node, self)
        # What we know of rounds, over all presences.
        self._holds: RoundReport | None = None
        self._line: RankEntry | None = None
        self._world: AsyncWorld | None = None
        self._heard: Head | None = None
        self._heard_rank = -1
        self._left = NO_ROUND
        self._examined = ""
        self._is_spare = False
        """The round we examined last was full without us."""
        self._silent = False
        """The engine we are present on does not answer, and our observer knows."""
        self._boot: Bootstrap | None = None
        self._owes_ready = False
        """Our presence has a line in the table of a round we gave up, and has not said so yet (T4)."""
        self._done = False
        self._drain = ""
        # What the caller must hear.
        self._changed: Change | None = None
        self._evicted: Evicted | None = None
        self._told_of: Evicted | None = None
        """The eviction that the caller knows of; its next join is that of a new member."""
        self._fatal: RdzvError | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None

    # ---- what others call

    @property
    def changed(self) -> Change | None:
        """What is wrong with the world we hold, or None. A local read, which other threads may make too."""
        evicted = self._evicted  # Read first: of an eviction that comes in between the caller is rather told twice.
        told = self._changed
        if evicted is not None and told is not None and told.kind is ChangeKind.EVICTED:
            self._told_of = evicted
        return told

    async def wait_changed(self, timeout_s: float | None = None) -> Change | None:
        """The change, as soon as there is one; None when the time ran out first, or we leave."""
        deadline = None if timeout_s is None else self._node.now() + timeout_s
        while self._changed is None and self._leaving is None:
            left_s = None if deadline is None else deadline - self._node.now()
            if not await self._bell.wait(left_s, self._bell.rings):
                break
        return self.changed

    def prepare(self) -> None:
        """Connect already, without taking part; and serve, if that is ours to do."""
        self._check_usable("prepare")
        self._attendance.prepare()

    async def join(self, timeout_s: float | None = None) -> AsyncWorld:
        """Wait until a round is sealed with us in it. Calling it says that no worker of an earlier round runs any more.

        The time counts only while the run has no sealed round: a spare waits as long as it must. Raises JoinTimeout, Closed,
        Evicted (join again), Drained, Banned, SettingsError, Untrusted, EngineMoved.
        """
        self._check_usable("join")
        if self._evicted is not None and self._told_of is not self._evicted:
            self._told_of = self._evicted
            raise self._evicted
        await self._be_ready()
        limit_s = self._settings.join_timeout if timeout_s is None else timeout_s
        alarm = CoalescingTimer(self._node, self._bell.ring)
        began_at = self._node.now()
        try:
            while True:
                rings = self._bell.rings
                self._check("join")
                # If there is a world already, another join that is under way was given it, for all of us.
                world = self._world or await self._try_take()
                if world is not None:
                    return world
                if self._heard is not None and self._heard.phase is Phase.SEALED and self._attendance.away_s() == 0:
                    began_at = self._node.now()
                waited_s = self._node.now() - began_at
                if waited_s >= limit_s:
                    raise await self._timed_out(waited_s)
                alarm.be_set(limit_s - waited_s + 0.001)
                await self._bell.wait(None, rings)
        finally:
            alarm.cancel()

    async def done(self) -> None:
        """Our work succeeded. We stay until the others are done too, or until we leave."""
        self._check_joined("done", self._holds)
        self._done = True
        await self._insist("done", lambda presence: presence.put_record(done=True))
        self._notice("done", "its work succeeded")

    async def drain(self, reason: str = "asked to go") -> None:
        """Say that we are about to go, so that the others re-form without waiting for us to be gone."""
        self._check_joined("drain", self._attendance.started or None)
        self._drain = clip(reason) or "no reason was given"
        await self._insist("drain", lambda presence: presence.put_record(drain=self._drain))
        self._notice("drained", reason)

    async def close_run(self, reason: str = "closed by a member") -> None:
        """End the run for everybody. Raises RoundOver if the others have gone on without us."""
        self._check_joined("close_run", self._attendance.started or None)
        cause = because(CauseKind.CLOSED, f"{clip(reason, REASON_MAX // 2)} (by {self._name})", [self._name])
        holds = None if self._holds is None else self._holds.round
        if not await self._insist("close_run", lambda presence: presence.close_run(cause, holds)):
            raise RoundOver(holds.number if holds else 0, "the others have gone on, so it is not ours to close the run")

    async def leave(self, *, failed: bool = False, reason: str = "") -> None:
        """Go. The run goes on for the others; `failed` says that we gave up, and why. Never raises, takes at most LEAVE_S."""
        if self._leaving is None:
            # A task of its own: a caller that stops waiting must not leave half a member behind.
            leaving = self._leave(failed, reason)
            self._leaving = asyncio.get_running_loop().create_task(leaving, name=f"rdzv leave {self._name}")
        await asyncio.wait([self._leaving])

    async def _leave(self, failed: bool, reason: str) -> None:
        if self._world is not None:
            self._world.end("this member has left")
        self._bell.ring()
        if self._presence is not None:
            goodbye = say_goodbye(self._presence, self._holds, failed, reason)
            with suppress(Exception):
                await with_timeout(self._node, LEAVE_S, goodbye, "rdzv goodbye")
        await self._attendance.stop()
        self._release_boot()
        self._bell.ring()

    async def status(self) -> Status:
        """Who is in, ready, waiting, spare, done, lost, and the reason. Remote, O(n). Raises Unreachable."""
        presence = self._presence
        if presence is not None:
            return await self._status(presence.session, presence)
        session = await self._driver.connect()
        try:
            return await self._status(session, None)
        finally:
            await session.close()

    # ---- being present

    @property
    def _presence(self) -> Presence | None:
        return self._attendance.presence

    async def _be_ready(self) -> None:
        """T4: give up the round we hold, and see to it that a presence says we are ready."""
        if self._evicted is not None:
            await self._attendance.over()
        if self._presence is not None:
            self._presence.overlook()
        if self._holds is not None:
            self._owes_ready = self._evicted is None
            self._give_up(self._holds)
        self._evicted, self._done = None, False
        if not self._attendance.running and not isinstance(self._fatal, Closed):
            self._fatal = None
            self._attendance.start()
        self.refresh()

    def _give_up(self, told: RoundReport | Head) -> None:
        self._left = max(self._left, told.round)
        if self._world is not None:
            self._world.end(self._changed.reason if self._changed else "this member joined again")
        self._holds = self._line = self._world = self._changed = None

    def introduce(self, record: Record) -> Record:
        """A new presence has a fresh bootstrap socket and no line in any table of this engine yet."""
        self._release_boot()
        self._boot = self._node.bind(record.addr, self._settings.bootstrap_port)
        self._examined = ""
        self._owes_ready = False
        return msgspec.structs.replace(record, boot=str(self._boot), drain=self._drain, done=self._done)

    def recall(self) -> tuple[RoundReport | None, RoundReport | None, RankEntry | None]:
        """What an emptied engine must be told (T13)."""
        heard = None if self._heard is None else report(self._heard, self._heard_rank, self._left)
        return self._holds, heard, self._line

    def arrived(self, presence: Presence) -> None:
        """If we came with a round that was given up meanwhile, the engine does not know that yet."""
        self._owes_ready = presence.record.holds is not None and self._holds is None
        self._notice("present", f"on engine {self._driver.endpoint}")
        if self._holds is not None and presence.line is not None:
            self._line = presence.line
            if self._world is not None:
                self._world.moved_to(presence)
        self.refresh()

    def lost_touch(self, trouble: str) -> None:
        """The workers go on; only the observer hears of it for now."""
        self._notice("engine away", trouble)

    def ended(self, error: Exception) -> None:
        """Evicted, or something final."""
        if isinstance(error, Evicted):
            self._evict(error)
        elif isinstance(error, RdzvError):
            self._fatal = error
            self._notice("ended", error.sentence)
        else:
            self._failed = error
        self.refresh()

    def leads(self) -> None:
        """Nobody who came before us is there any more."""
        self._notice("leading", "of those who are here it came first")

    def _evict(self, evicted: Evicted) -> None:
        if self._evicted is None:
            self._evicted = evicted
            if self._leaving is None:  # Else it is our own goodbye that ended our key.
                self._notice("evicted", evicted.reason)

    # ---- heads

    def saw_head(self, presence: Presence, old: Head | None, new: Head | None) -> None:
        """The head as this presence saw it change; some changes end the presence."""
        if new is None:
            presence.end(self._without_head(presence, old))
            return
        if self._heard is not None and self._heard.run != new.run:
            self._heard_rank, self._left = -1, NO_ROUND
            if self._holds is not None:
                presence.end(self._evicted_by("the run id has begun a new life without it"))
                return
            if old is not None:
                presence.end(RunReplaced())
        if self._heard is None or self._heard.table != new.table:
            self._heard_rank = -1
        self._heard = new
        if self._holds is not None and old is None and not still_ours(self._holds, new):
            presence.end(self._evicted_by(f"the others went on to round {new.number} while it was away"))
            return
        for notice in about_head(self._settings.run_id, self._name, old, new):
            self._tell(notice)
        if old is not None or new.phase is not Phase.OPEN:
            self.refresh()  # Else the run begins, which gives nobody anything to do; thousands may hear of it at once.

    def _without_head(self, presence: Presence, old: Head | None) -> Exception:
        """The head is gone. If it was closed, it has expired, and nobody may take us for a member of the next life."""
        if old is not None and old.phase is Phase.CLOSED:
            return presence.closed(old)
        return RunReplaced() if self._holds is None else self._evicted_by("the run's records are gone")

    def _evicted_by(self, reason: str) -> Evicted:
        return Evicted(self._settings.run_id, self._name, reason)

    def refresh(self) -> None:
        """T10: what the holder is told is a function of the present, computed anew."""
        self._tell_of_silence()
        told: Change | None = None
        if self._evicted is not None:
            told = Change(ChangeKind.EVICTED, self._evicted.reason)
        elif self._fatal is not None and not (isinstance(self._fatal, Closed) and self._fatal.success):
            kinds = {Closed: ChangeKind.CLOSED, EngineMoved: ChangeKind.OUTAGE}
            told = Change(kinds.get(type(self._fatal), ChangeKind.REFUSED), self._fatal.sentence)
        elif self._failed is not None:
            told = Change(ChangeKind.REFUSED, f"this member has failed: {self._failed!r}")
        elif self._holds is not None:
            if self._heard is not None:
                told = change_for(self._holds, self._heard)
            if told is None and self._attendance.away_s() >= self._settings.outage_grace:
                away = self._attendance
                told = Change(ChangeKind.OUTAGE, f"the engine has been away for {away.away_s():.0f} s: {away.trouble}")
        self._changed = told
        if told is not None and self._world is not None:
            self._world.end(told.reason)
        self._bell.ring()

    def _tell_of_silence(self) -> None:
        """Of an engine that is there but does not answer; one that is gone, or is another, is noticed by connecting to it."""
        silent = self._presence is not None and self._attendance.away_s() > 0
        if silent != self._silent:
            self._silent = silent
            if silent:
                self._notice("engine away", self._attendance.trouble)
            elif self._presence is not None:
                self._notice("engine back", "it answers again")

    # ---- T3, T4: waiting

    async def _try_take(self) -> AsyncWorld | None:
        """One look at the head; the world if it is ours to take."""
        presence = self._presence
        if presence is None:
            return None
        if presence.asked or self._drain:
            raise Drained(self._settings.run_id, self._name, presence.asked or self._drain)
        head = presence.sight.head
        if head is not None and head.phase is Phase.CLOSED:
            raise presence.closed(head)
        try:
            if self._owes_ready:
                await self._put_ready(presence)
            elif (
                presence.is_fresh
                and head is not None
                and waiting_step(head, self._left, self._examined) is WaitingStep.EXAMINE
            ):
                return await self._examine(presence, head.table)
        except (EngineReset, Unreachable):
            await sleep(self._node, 0.1 + 0.1 * self._node.jitter())
            self._bell.ring()
        except Evicted as evicted:
            self._evict(evicted)
        return None

    async def _examine(self, presence: Presence, table: str) -> AsyncWorld | None:
        result, head = await presence.examine(table)
        over = presence is not self._presence or presence.over is not None or self._leaving is not None
        # An answer that we were too slow to hear may be of a time when our key still stood: ask again once that is certain.
        if head is None or result is TakeResult.LOOK_AGAIN or over or not presence.is_fresh:
            self._bell.ring()
            return None
        if result is TakeResult.GIVEN:
            return self._take(presence, head)
        self._examined = table
        self._is_spare = result is TakeResult.NOT_OURS and head.size >= self._settings.capacity
        if result is TakeResult.GIVE_UP:
            self._left = max(self._left, head.round)
            self._owes_ready = True
            await self._put_ready(presence)
        return None

    def _take(self, presence: Presence, head: Head) -> AsyncWorld:
        line = presence.line
        assert line is not None, "a round that is given comes with our line in its table"
        self._holds, self._line = report(head, line.rank), line
        self._heard, self._heard_rank = head, line.rank
        own, self._boot = self._boot, None
        address = bootstrap.parse(head.boot)
        if own is not None and line.rank == 0:
            address = own
        elif own is not None:
            own.release()
        self._world = AsyncWorld(presence, head, line, address, self._settings, self._node)
        self.refresh()
        if self._is_spare:
            self._is_spare = False
            self._notice("promoted", f"from spare to rank {line.rank} of {head.size}")
        self._notice("given", f"rank {line.rank} of {head.size}")
        return self._world

    async def _put_ready(self, presence: Presence) -> None:
        """T4: one put per member and round, with a fresh bootstrap socket."""
        if self._boot is None or (str(self._boot) == presence.record.boot and presence.record.left < self._left):
            # Not at a repetition after an unknown outcome: what was announced must be what we hold.
            self._release_boot()
            self._boot = self._node.bind(presence.record.addr, self._settings.bootstrap_port)
        heard = presence.record.heard or presence.record.holds
        await presence.put_record(left=self._left, boot=str(self._boot), holds=None, heard=heard, done=False)
        self._owes_ready = False

    async def _timed_out(self, waited_s: float) -> JoinTimeout:
        """With who is here and what is missing, if the engine can be asked at all."""
        reason, present, remedy = f"the engine is away: {self._attendance.trouble}", [], ""
        if self._settings.endpoint.scheme == "rdzv" and self._heard is not None:
            where = self._settings.endpoint
            reason += f"; bring the host of {where} back or start the job anew; etcd would survive the loss of a host"
        if self._presence is not None and self._attendance.away_s() == 0:
            reason, status = f"the engine does not answer: it was asked for {EXPLAIN_S:g} s who is here", None
            try:
                asking = self._status(self._presence.session, self._presence)
                status = await with_timeout(self._node, EXPLAIN_S, asking, "rdzv asks why")
            except RdzvError as error:
                reason = f"the engine does not answer: {error.sentence}"
            except EngineReset as reset:
                reason = f"the engine was restarted: {reset}"
            if status is not None:
                reason = status.reason
                present = [member.name for member in status.members if member.state != "lost"]
                remedy = "start the missing nodes"
                if self._settings.endpoint.hosts:
                    remedy += f", or run `rdzv doctor {self._settings.endpoint}` on them"
        return JoinTimeout(self._settings.run_id, waited_s, reason, present, self._settings.summary(), remedy)

    # ---- helpers

    def _check_usable(self, call: str) -> None:
        if self._leaving is not None:
            raise LeftAlready(self._settings.run_id, call)
        if self._failed is not None:
            raise self._failed

    def _check(self, call: str) -> None:
        """Before any call is answered: that we have left, were evicted or met something final."""
        self._check_usable(call)
        if self._evicted is not None:
            self._told_of = self._evicted
            raise self._evicted
        if self._fatal is not None:
            raise self._fatal

    def _check_joined(self, call: str, proof: object | None) -> None:
        self._check(call)
        if proof is None:
            raise NotJoined(self._settings.run_id, call)

    async def _insist(self, call: str, act: Callable[[Presence], Awaitable[T]]) -> T:
        """Do it on the present presence, waiting for one if need be. What is done here is safe to do twice."""
        while True:
            self._check(call)
            presence = self._presence
            if presence is None:
                await self._bell.wait(1.0)
                continue
            try:
                return await act(presence)
            except (Unreachable, EngineReset):
                await sleep(self._node, 0.1 + 0.2 * self._node.jitter())
            except Evicted as evicted:
                self._evict(evicted)

    async def _status(self, session: Session, presence: Presence | None) -> Status:
        return describe(self._settings.run_id, await read_run(session, self._settings, presence))

    def _release_boot(self) -> None:
        if self._boot is not None:
            self._boot.release()
            self._boot = None

    def _notice(self, kind: str, reason: str) -> None:
        number = self._heard.number if self._heard is not None else 0
        self._tell(Notice(kind, self._settings.run_id, number, self._name, reason))

    def _tell(self, notice: Notice) -> None:
        self._log(notice)
        if self._observer is not None:
            hand_over(self._observer, notice)
