"""Staying present: on whatever engine instance answers, for as long as the member wants to be in the run.

What it does about trouble:
- The engine is away: try again, and let the member know for how long it has been (G7).
- Another instance answers at the same place: it came back empty; come in anew and tell it what we hold and heard (T13).
- Another instance answers at another place: refuse it if we have heard of a round (T16).
- Our key is gone, or the run is over: stop, and say why.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from ..config.settings import Settings
from ..core.keys import Keys
from ..core.model import Head, MemberRecord, RankEntry, RoundReport
from ..engines.port import Driver, EngineReset, Get, Session
from ..errors import Closed, EngineMoved, Evicted, Unreachable, Untrusted
from ..system.node import Node
from ..system.timers import backoff_s, sleep
from .presence import Presence
from .registration import record_for

STOP_S = 2.0
"""How long we try to end a key of which we do not know whether it was put."""
PAUSE_S = (0.02, 0.5)
"""First and longest wait between two attempts to find the engine."""


class PresenceListener(Protocol):
    """For whom presence is kept: the member."""

    def introduce(self, record: MemberRecord) -> MemberRecord:
        """Complete the record we come in with."""

    def recall(self) -> tuple[RoundReport | None, RoundReport | None, RankEntry | None]:
        """What to tell an emptied engine: the round held, the head heard last, our line in the table."""

    def arrived(self, presence: Presence) -> None:
        """We are in."""

    def saw_head(self, presence: Presence, old: Head | None, new: Head | None) -> None:
        """The head changed."""

    def refresh(self) -> None:
        """Something about our presence may have changed."""

    def ended(self, error: Exception) -> None:
        """We are not present any more and do not try again by ourselves."""

    def leads(self) -> None:
        """We lead from now on."""

    def lost_touch(self, trouble: str) -> None:
        """The engine has gone away, or cannot be found in the first place."""


class RunReplaced(Exception):
    """Come again, as new."""


class PresenceLoop:
    """See the module's docstring."""

    def __init__(self, driver: Driver, settings: Settings, node: Node, attender: PresenceListener) -> None:
        self._driver = driver
        self._settings = settings
        self._node = node
        self._attender = attender
        self._task: asyncio.Task[None] | None = None
        self._early: asyncio.Task[Session] | None = None
        self._former: Presence | None = None
        self._place = ""
        self._away_at: float | None = None
        self.presence: Presence | None = None
        self._trouble = f"engine {driver.endpoint} has not answered yet; `rdzv doctor` on this node tells more"
        self._pauses = 0
        self._complained = False
        self._refused = ""

    def prepare(self) -> None:
        """Connect already, for whoever is about to join. What comes of it is heard then."""
        if self._task is None and self._early is None:
            connecting = self._driver.connect()
            self._early = asyncio.get_running_loop().create_task(connecting, name=f"rdzv dials {self._node.host}")

    def start(self) -> None:
        """Be present from now on, if we are not trying already."""
        if not self.running:
            self._away_at = self._node.now()
            self._task = asyncio.get_running_loop().create_task(self._stay(), name=f"rdzv member {self._node.host}")

    @property
    def running(self) -> bool:
        """We are present, or trying to be."""
        return self._task is not None and not self._task.done()

    @property
    def started(self) -> bool:
        """We have tried at least once."""
        return self._task is not None

    @property
    def trouble(self) -> str:
        """What is wrong with the engine, while it is away."""
        return self._trouble if self.presence is None else self.presence.trouble

    async def over(self) -> None:
        """Until the present attendance has ended by itself."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Be present no more; whoever wants the key to end now has seen to that. Takes at most STOP_S."""
        if self._task is not None:
            self._task.cancel()
            timer = self._node.call_later(STOP_S, self._task.cancel)
            await asyncio.wait([self._task])
            timer.cancel()
        if self._early is not None:
            self._early.cancel()
            await asyncio.wait([self._early])
            if not self._early.cancelled() and self._early.exception() is None:
                await self._early.result().close()
        await self._driver.close()

    def away_s(self) -> float:
        """How long the engine has given no sign of life; 0 while our lease cannot have ended."""
        now = self._node.now()
        if self.presence is not None:
            silent_at = self.presence.silent_at
            return 0.0 if silent_at is None or self.presence.is_fresh else now - silent_at
        return now - self._away_at if self._away_at is not None else 0.0

    # ---- how

    async def _stay(self) -> None:
        try:
            while True:
                session = await self._connect()
                presence = self._new_presence(session)
                try:
                    await self._come_in(presence)
                    if presence.over is None:
                        # Else the first head it saw has ended it, and why is what must be heard first.
                        self._arrive(presence)
                    await presence.run()
                except EngineReset:
                    self._lose_touch("the engine was restarted")
                except RunReplaced:
                    await presence.give_back_lease()
                except (Evicted, Closed):
                    await presence.give_back_lease()
                    raise
                except asyncio.CancelledError:
                    if self.presence is None:  # Our key may be there without our having heard of it.
                        await presence.give_back_lease()
                    raise
                finally:
                    self.presence = None
                    await session.close()
        except Exception as error:  # noqa: BLE001  Even a defect of ours must reach whoever calls next, not vanish in a task.
            self._attender.ended(error)

    def _new_presence(self, session: Session) -> Presence:
        record = self._attender.introduce(record_for(self._settings, self._node, session))
        presence = Presence(
            session,
            self._settings,
            self._node,
            record,
            lambda old, new: self._attender.saw_head(presence, old, new),
            self._attender.refresh,
            self._attender.leads,
        )
        return presence

    async def _connect(self) -> Session:
        """Until an engine answers that we may follow."""
        while True:
            try:
                session = await self._dial()
            except Unreachable as error:
                self._lose_touch(error.sentence)
            except Untrusted as error:
                # Who comes for the first time is told at once, since waiting mends nothing. Who has been in goes on through
                # it as through any outage: it was trusted before, and its workers run.
                if not self._place:
                    raise
                self._lose_touch(error.sentence)
            else:
                try:
                    if await self._may_follow(session):
                        return session
                except Unreachable as error:
                    self._lose_touch(error.sentence)
                except EngineReset as error:
                    self._lose_touch(str(error))
                except EngineMoved:
                    await session.close()
                    raise
                await session.close()
            await self._pause()

    async def _dial(self) -> Session:
        early = self._early
        if early is not None:
            with suppress(Unreachable, Untrusted):  # What was wrong then need not be now.
                await early
            self._early = None
            if early.exception() is None:
                return early.result()
        return await self._driver.connect()

    async def _may_follow(self, session: Session) -> bool:
        """T16: an engine elsewhere may not know that the one we knew still serves others."""
        if not self._place or session.place == self._place or self._attender.recall()[1] is None:
            return True
        allowed = await session.txn(then=[Get(Keys(self._settings.run_id).adopt)])
        if allowed.item(0) is not None:
            return True
        moved = EngineMoved(self._settings.run_id, self._place, session.place)
        self._lose_touch(moved.sentence)
        if self._refused != session.place:
            # Said at once: only an operator can help, and the workers go on for outage_grace at most.
            self._refused = session.place
            self._attender.lost_touch(moved.sentence)
        if self.away_s() >= self._settings.outage_grace:
            raise moved
        return False

    async def _come_in(self, presence: Presence) -> None:
        """T1, until it is certain: under one id, so that no attempt of which we lost the answer stays behind as a ghost."""
        while True:
            try:
                await self._end_former(presence)
                await presence.begin(*self._attender.recall())
            except Unreachable as error:
                self._lose_touch(error.sentence)
                await self._pause()
            else:
                return

    async def _end_former(self, presence: Presence) -> None:
        """Tell a known instance from an emptied one.

        Back where we were before, after another engine answered for a while, there is nobody to be told of our round, and
        our former key is a ghost, if it is there at all.
        """
        former, session = self._former, presence.session
        if former is None or former.session.instance != session.instance or not isinstance(former.over, EngineReset):
            return
        await session.revoke(former.lease)
        self._former = None
        raise presence.evicted("it was led to another engine for a while, and could not renew its lease")

    def _arrive(self, presence: Presence) -> None:
        self.presence = self._former = presence
        self._place = presence.session.place
        self._away_at = None
        self._pauses = 0
        self._complained = False
        self._attender.arrived(presence)

    def _lose_touch(self, trouble: str) -> None:
        """The member hears of the first trouble only; the last one is what it finds if it must explain itself."""
        self._trouble = trouble
        if self._away_at is None:
            self._away_at = self._node.now()
        if not self._complained:
            self._complained = True
            self._attender.lost_touch(trouble)
        self._attender.refresh()

    async def _pause(self) -> None:
        """Short at first: nodes that are started together come before the one that serves them by milliseconds."""
        pause_s = backoff_s(self._pauses, PAUSE_S, self._node.jitter())
        self._pauses += 1
        await sleep(self._node, pause_s)
