"""One run in a server: an engine of its own, who is connected to it, and what is known of its members' lives.

An engine for each run keeps runs apart in every respect: no key, watch, limit or flood of changes of one is felt by
another, and the silence of one run is not explained by the liveliness of the next. For a member's presence the server has
three ways to learn of its end:

- its lease runs out;
- its connection is gone and does not come back for a while (the *linger*), unless many went together: then the network is
  to blame and the lease decides;
- but time passes for presences only while somebody of the run is connected and heard. A server that nobody can reach
  cannot tell its own isolation from the death of everybody. When somebody is heard again after a long silence, every
  presence starts anew: the first to be back must not condemn those who are about to be.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from ...errors import LimitExceeded
from ..port import AllCreated, Batch, Case, Compare, Delete, DeletePrefix, Empty, List, Operation, Outcome, Put
from ..reference import Engine
from .frames import KEY_MAX
from .lease_clock import STEP_MAX_S
from .limits import Limits

QUIET_MIN_S = 0.5
"""However short a lease somebody asks for, a silence of less is none."""
ABANDONED_S = 3600.0
"""After so long nobody of them will come back, and what they left may run out."""
TTL_MAX_S = 10 * 366 * 86_400.0
PREFIXES_MAX = 1000
"""Of one transaction: each is looked for in all that the transaction writes, and in all that the run has."""
PAIRS_MAX = 10_000_000


class RunHome(Protocol):
    """The connection that a presence hangs on."""

    session: str
    attempt: int
    leases: set[int]

    def replaced(self) -> None:
        """Its session has come back by another connection: nothing more will come by this one."""


class _Presence:
    """A lease that stands for a process."""

    __slots__ = ("home", "ttl_s")

    def __init__(self, ttl_s: float, home: RunHome) -> None:
        self.ttl_s = ttl_s
        self.home = home


class Run:
    """See the module's docstring. Time is passed in, and `now` is always the same clock's."""

    def __init__(self, name: str, limits: Limits, now: float) -> None:
        self.name = name
        self.engine = Engine(secrets.token_hex(8), history_max=limits.history)
        self.engine.observers.append(self._count)
        self.sessions: dict[str, RunHome] = {}
        self.bytes = 0
        self.heard_at = now
        self._limits = limits
        self._sizes: dict[str, int] = {}
        self._presences: dict[int, _Presence] = {}
        self._quiet_max_s = math.inf
        self._some_ended = False
        """Presences have ended since that was measured. It is not measured for each: thousands may leave at once."""

    @property
    def is_empty(self) -> bool:
        """Nothing would be lost with it."""
        return not (self.sessions or len(self.engine) or len(self.engine.leases))

    @property
    def presences(self) -> int:
        """Members that are there, or may come back."""
        if self._some_ended:
            self._drop_ended()
        return len(self._presences)

    # ---- requests

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        instead: Sequence[Case] = (),
    ) -> Outcome:
        """Raises LeaseGone, ValueError, LimitExceeded; nothing has changed then."""
        self._check_compares(compares)
        self._check_operations(then)
        for case in instead:
            self._check_compares(case.compares)
            self._check_operations(case.then)
        self._check_operations(otherwise)
        return self.engine.txn(compares, then, otherwise, instead)

    def grant(self, ttl_s: float, home: RunHome | None, lease: int = 0) -> int:
        """`home`: it stands for the process behind that connection. `lease`: the id it is to have, if not any."""
        if len(self.engine.leases) >= self._limits.leases:
            msg = f"run {self.name!r} has {len(self.engine.leases)} leases, at most {self._limits.leases} are allowed"
            raise ValueError(msg)
        if not 0 < ttl_s <= TTL_MAX_S:
            msg = f"a lease of {ttl_s} s: its time to live must be positive and at most {TTL_MAX_S:.0f} s"
            raise ValueError(msg)
        lease = self.engine.grant(ttl_s + STEP_MAX_S, lease)
        if home is not None:
            self._presences[lease] = _Presence(ttl_s, home)
            home.leases.add(lease)
            self._quiet_max_s = min(self._quiet_max_s, max(ttl_s / 2, QUIET_MIN_S))
        return lease

    def renew(self, lease: int, home: RunHome) -> None:
        """LeaseGone if it has ended."""
        self.engine.renew(lease)
        self._move(lease, home)

    def revoke(self, lease: int) -> None:
        """End it."""
        if self._presences.pop(lease, None) is not None:
            self._some_ended = True
        self.engine.revoke(lease)

    # ---- connections

    def enter(self, home: RunHome, instance: str, leases: Iterable[int]) -> bool:
        """A session is here, perhaps again: with these presences, if it knows this instance. False: it comes too late.

        Those that have ended are found out when they are renewed.
        """
        former = self.sessions.get(home.session)
        if former is not None and former.attempt >= home.attempt:
            return False
        self.sessions[home.session] = home
        for lease in leases if instance == self.engine.instance else ():
            if lease in self.engine.leases and self._move(lease, home):
                self.engine.leases.come_back(lease)
        if former is not None:
            former.replaced()
        return True

    def leave(self, home: RunHome) -> None:
        """The connection is over."""
        if self.sessions.get(home.session) is home:
            del self.sessions[home.session]

    def hang_up(self, home: RunHome, linger_s: float) -> None:
        """It broke off, and its member perhaps with it. It is missed for `linger_s` at least, hence the longest step."""
        if linger_s:
            linger_s += STEP_MAX_S
        for lease in home.leases:
            presence = self._presences.get(lease)
            if presence is not None and presence.home is home:
                self.engine.leases.hang_up(lease, linger_s)

    def let_go(self, home: RunHome) -> None:
        """The session said goodbye: its leases are no more than leases from now on."""
        for lease in home.leases:
            presence = self._presences.get(lease)
            if presence is not None and presence.home is home:
                del self._presences[lease]
                self._some_ended = True

    def _move(self, lease: int, home: RunHome) -> bool:
        """The lease hangs on this connection now, unless what arrived is a late word of one that it left already."""
        presence = self._presences.get(lease)
        if presence is None or presence.home.session != home.session or presence.home.attempt > home.attempt:
            return False
        presence.home.leases.discard(lease)
        presence.home = home
        home.leases.add(lease)
        return True

    # ---- time

    def hear(self, now: float) -> None:
        """Somebody of this run said something. Must come before what it said is done."""
        if now - self.heard_at > self._quiet_max_s:
            self._drop_ended()
            for lease in self._presences:
                self.engine.renew(lease)
        self.heard_at = now

    def pass_time(self, elapsed_s: float, now: float) -> None:
        """So much has passed, if it passes for this run at all."""
        if self._some_ended:
            self._drop_ended()
        if self._presences:
            silent_s = now - self.heard_at
            heard = self.sessions and silent_s <= self._quiet_max_s
            if not heard and silent_s < ABANDONED_S:
                return
        leases = len(self.engine.leases)
        if leases:
            self.engine.pass_time(elapsed_s)
            self._some_ended = len(self.engine.leases) < leases

    def _drop_ended(self) -> None:
        self._some_ended = False
        self._presences = {lease: held for lease, held in self._presences.items() if lease in self.engine.leases}
        # Half of the shortest presence: a member that renews in thirds is heard, and isolation ends nobody's lease.
        shortest_s = min((held.ttl_s for held in self._presences.values()), default=math.inf)
        self._quiet_max_s = max(shortest_s / 2, QUIET_MIN_S)

    # ---- limits

    def _check_compares(self, compares: Sequence[Compare]) -> None:
        count, scans = 0, 0
        for compare in compares:
            if type(compare) is AllCreated:
                count += len(compare.revisions)
                continue
            count += 1
            if type(compare) is Empty:
                scans += 1
        if count > self._limits.operations or scans > PREFIXES_MAX:
            msg = (
                f"a transaction with {count} compares, {scans} of prefixes: "
                f"at most {self._limits.operations} are allowed, {PREFIXES_MAX} of prefixes; split it"
            )
            raise ValueError(msg)

    def _check_operations(self, operations: Sequence[Operation]) -> None:
        """All that the engine takes on trust."""
        puts: list[Put] = []
        scans, added = 0, 0
        for operation in operations:
            if type(operation) is Put:
                puts.append(operation)
                added += len(operation.key) + len(operation.value)
                check_key(operation.key)
            elif type(operation) is List:
                scans += 1
                if operation.limit < 0 or operation.created_below < 0:
                    msg = f"a list with limit {operation.limit}, created below {operation.created_below}: neither is negative"
                    raise ValueError(msg)
            elif type(operation) is DeletePrefix:
                scans += 1
            elif type(operation) is Delete:
                check_key(operation.key)
        if len(operations) > self._limits.operations or scans > PREFIXES_MAX or scans * len(operations) > PAIRS_MAX:
            msg = (
                f"a transaction with {len(operations)} operations, {scans} of prefixes: at most "
                f"{self._limits.operations} are allowed, {PREFIXES_MAX} of prefixes; split it"
            )
            raise ValueError(msg)
        if puts and (
            self.bytes + added > self._limits.bytes or len(self._sizes) + len(puts) > self._limits.keys
        ):
            self._check_room(puts)

    def _check_room(self, puts: list[Put]) -> None:
        """What takes no more room than before is let in even when there is none, so that a full run can still end."""
        new = sum(put.key not in self._sizes for put in puts)
        more = sum(len(put.key) + len(put.value) - self._sizes.get(put.key, 0) for put in puts)
        if more > 0 and self.bytes + more > self._limits.bytes:
            raise LimitExceeded(f"run {self.name!r} on this server", self.bytes + more, self._limits.bytes)
        if new and len(self._sizes) + new > self._limits.keys:
            msg = f"run {self.name!r} would have {len(self._sizes) + new} keys, at most {self._limits.keys} are allowed"
            raise ValueError(msg)

    def _count(self, batch: Batch) -> None:
        sizes = self._sizes
        for event in batch.events:
            self.bytes -= sizes.pop(event.key, 0)
            if event.item is not None:
                size = sizes[event.key] = len(event.key) + len(event.item.value)
                self.bytes += size


def check_key(key: str) -> None:
    """Every engine has such a limit, and long keys make short requests dear."""
    if len(key) > KEY_MAX:
        msg = f"key {key[:64]!r}... has {len(key)} characters, at most {KEY_MAX} are allowed"
        raise ValueError(msg)
