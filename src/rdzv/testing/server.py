"""An engine's process in the simulation: the reference engine, with a real server's ways to be slow, stuck or gone.

It judges leases the way the embedded server does. Time passes in ticks; of a longer stop only one tick counts, so a
stall is credited to all leases; whatever has arrived is read before a tick is judged; and a connection that was given
up during a stall was given up because of it. Time passes only while somebody is connected and heard: a server that nobody
can reach cannot tell its own isolation from the death of everybody. When somebody is heard again, every presence starts
anew: the first to be back must not condemn those who are about to be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..engines.port import Batch, Case, Compare, Gap, LeaseGone, Operation, Outcome
from ..engines.reference import Engine
from .network import SimConnection, SimNetwork
from .virtual_loop import Process, VirtualTimer

TICK_S = 0.1
LINGER_S = 1.0
TXN_MAX = 100_000

CommitHook = Callable[["SimServer", str, Batch, str, tuple[Compare, ...], tuple[Operation, ...]], None]
"""Called with server, name of the machine that did it ("": the server itself), changes, kind, compares, operations.

The kind is "then" or "otherwise" (the branch of a transaction), "revoked" or "expired" (the end of a lease)."""


class SimWelcome:
    """What a server says of itself to a new connection."""

    def __init__(self, server: SimServer) -> None:
        self.instance = server.instance
        self.place = server.place
        self.durable = server.durable
        self.compares_max = server.compares_max
        self.writes_max = server.writes_max
        self.stars = server.stars


@dataclass
class _HeldReply:
    """A lease, and the connection that it hangs on if it is a member's presence."""

    ttl_s: float
    home: SimConnection | None


class SimServer(Process):
    """Pausing it is a stall: connections stay, requests wait, and are read when it resumes."""

    def __init__(
        self,
        network: SimNetwork,
        name: str,
        seed: int | str = 0,
        *,
        place: str = "",
        tick_s: float = TICK_S,
        linger_s: float = LINGER_S,
        history_max: int = 65536,
        compares_max: int = TXN_MAX,
        writes_max: int = TXN_MAX,
        stars: bool = True,
        durable: bool = False,
    ) -> None:
        super().__init__(network.loop, name, random.Random(f"{seed}/{name}"))  # noqa: S311
        self.place = place or f"{name}:29400"
        self.durable = durable
        self.compares_max = compares_max
        self.writes_max = writes_max
        self.stars = stars
        self.dead = False
        self.slow_s = 0.0
        """Added to every message, in both directions."""
        self.commits: list[CommitHook] = []
        self.arrivals: list[Callable[[str, str, tuple[Any, ...]], None]] = []
        """Called with machine, verb and arguments of a request before it takes effect: for faults at the worst moment."""
        self._network = network
        self._tick_s = tick_s
        self._linger_s = linger_s
        self._history_max = history_max
        self._verbs: dict[str, Callable[..., Any]] = {
            "txn": self._txn,
            "grant": self._grant,
            "renew": self._renew,
            "revoke": self._revoke,
            "watch": self._watch,
            "unwatch": self._unwatch,
        }
        self._start()

    def _start(self) -> None:
        self.engine = Engine(f"{self.rng.getrandbits(64):016x}", history_max=self._history_max)
        self._committed: list[Batch] = []
        self.engine.observers.append(self._committed.append)
        self._peers: dict[SimConnection, dict[int, Callable[[], None]]] = {}
        self._leases: dict[int, _HeldReply] = {}
        self._quiet_max_s = math.inf
        self._heard_at = self._judged_at = self.loop.time()
        self._ticking: VirtualTimer = self.loop.call_later(self._tick_s, self._tick, self.engine, context=self.context)

    @property
    def instance(self) -> str:
        """Which life of its memory this is."""
        return self.engine.instance

    # ---- faults

    def crash(self) -> None:
        """The process is killed: its memory is gone and its connections drop."""
        self.dead = True
        self._ticking.cancel()
        peers, self._peers = self._peers, {}
        for connection in peers:
            connection.answers.send(connection.lose)
        self.resume()  # What waited in its sockets is refused now.

    def restart(self) -> None:
        """Start it empty at the same place; that is another instance. Crashes it first if it lives."""
        if not self.dead:
            self.crash()
        self.dead = False
        self._start()

    def expire(self, lease: int) -> None:
        """The lease runs out at this very moment."""
        self._leases.pop(lease, None)
        self.engine.revoke(lease)
        self._publish("", "expired")

    def describe(self, verb: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """A request, as the faults at the worst moment know them."""
        return verb, args

    def forget(self) -> None:
        """All changes up to now, so that a watch from before meets a gap."""
        self.engine.compact(self.engine.revision)

    def drop_watches(self) -> None:
        """Every watch gets a Gap, as if its reader had been too slow."""
        for connection, watches in self._peers.items():
            for number, stop in watches.items():
                stop()
                connection.push(number, Gap("the watch was too slow"))
            watches.clear()

    # ---- connections

    def receive(self, connection: SimConnection, number: int, verb: str, args: tuple[Any, ...]) -> None:
        """A message of a client arrived."""
        if self.dead or (connection not in self._peers and verb != "hello"):
            connection.refuse()
            return
        self._hear()
        for ambush in list(self.arrivals):
            ambush(connection.node.name, *self.describe(verb, args))
        if self.dead or (connection not in self._peers and verb != "hello"):
            connection.refuse()
            return
        if verb == "hello":
            answer: Any = self._hello(connection, *args)
        elif verb == "bye":
            self._forget(connection)
            return
        else:
            try:
                answer = self._verbs[verb](connection, *args)
            except (LeaseGone, ValueError) as problem:
                answer = problem
        if number:
            connection.answer(number, answer)

    def hung_up(self, connection: SimConnection) -> None:
        """The connection is gone, and its member perhaps with it: if the member is not back soon, its leases end."""
        if self._forget(connection) and not self._stalled():
            for lease, held in self._leases.items():
                if held.home is connection:
                    self.engine.leases.hang_up(lease, self._linger_s)

    def _forget(self, connection: SimConnection) -> bool:
        self._network.forget(connection)
        watches = self._peers.pop(connection, None)
        for stop in (watches or {}).values():
            stop()
        return watches is not None

    def _hello(self, connection: SimConnection, leases: tuple[int, ...], instance: str) -> SimWelcome:
        """`leases` are those of a session that comes back to `instance`; at another one they mean nothing."""
        self._peers[connection] = {}
        for lease in leases if instance == self.engine.instance else ():
            if lease in self.engine.leases and self._move(lease, connection):
                self.engine.leases.come_back(lease)
        return SimWelcome(self)

    def _move(self, lease: int, connection: SimConnection) -> bool:
        """The lease hangs on this connection now, unless what arrived is a late message of one that it left already."""
        held = self._leases.get(lease)
        if held is None or held.home is None or held.home.number > connection.number:
            return False
        held.home = connection
        return True

    # ---- requests

    def _txn(
        self,
        connection: SimConnection,
        compares: tuple[Compare, ...],
        then: tuple[Operation, ...],
        otherwise: tuple[Operation, ...],
        instead: tuple[Case, ...],
    ) -> Outcome:
        outcome = self.engine.txn(compares, then, otherwise, instead)
        kind, taken = "then", (Case(compares, then), *instead)[outcome.case]
        if not outcome.succeeded:
            kind, taken = "otherwise", Case(compares, otherwise)
        self._publish(connection.node.name, kind, taken.compares, taken.then)
        return outcome

    def _grant(self, connection: SimConnection, ttl_s: float, presence: bool) -> int:
        """A lease granted right before a tick is charged all of it, so that much is added."""
        lease = self.engine.grant(ttl_s + self._tick_s)
        self._leases[lease] = _HeldReply(ttl_s, connection if presence else None)
        if presence:
            self._quiet_max_s = min(self._quiet_max_s, ttl_s / 2)
        return lease

    def _drop_ended(self) -> None:
        self._leases = {lease: held for lease, held in self._leases.items() if lease in self.engine.leases}
        self._measure_quiet()

    def _measure_quiet(self) -> None:
        """Half of the shortest presence: a member that renews in thirds is heard, and isolation ends nobody's lease."""
        self._quiet_max_s = min((held.ttl_s / 2 for held in self._leases.values() if held.home), default=math.inf)

    def _renew(self, connection: SimConnection, lease: int) -> None:
        self.engine.renew(lease)
        self._move(lease, connection)

    def _revoke(self, connection: SimConnection, lease: int) -> None:
        self.engine.revoke(lease)
        self._publish(connection.node.name, "revoked")

    def _watch(self, connection: SimConnection, number: int, targets: tuple[str, ...], since: int) -> None:
        try:
            stop = self.engine.subscribe(targets, since, partial(connection.push, number))
        except Gap as gap:
            connection.push(number, gap)
        else:
            self._peers[connection][number] = stop

    def _unwatch(self, connection: SimConnection, number: int) -> None:
        stop = self._peers[connection].pop(number, None)
        if stop is not None:
            stop()

    def _publish(
        self, actor: str, kind: str, compares: tuple[Compare, ...] = (), operations: tuple[Operation, ...] = ()
    ) -> None:
        """Tell the checkers: only after the engine's call, since before nobody knows which branch it took."""
        if not self._committed:
            return
        committed = self._committed.copy()
        self._committed.clear()
        for batch in () if self.loop.unwinding else committed:
            for hook in self.commits:
                hook(self, actor, batch, kind, compares, operations)

    # ---- time

    def _hear(self) -> None:
        now = self.loop.time()
        if len(self._leases) != len(self.engine.leases):
            self._drop_ended()
        if now - self._heard_at > self._quiet_max_s:
            for lease, held in self._leases.items():
                if held.home is not None:
                    self.engine.renew(lease)
        self._heard_at = now

    def _stalled(self) -> bool:
        """This is the first pass after a stop, and reads what waited."""
        return self.loop.time() - self._judged_at > 1.5 * self._tick_s

    def _tick(self, engine: Engine) -> None:
        if self._stalled():
            # All that arrived meanwhile is ready to run at this instant; the judgement comes after it.
            self.loop.call_soon(self._judge, engine, context=self.context)
        else:
            self._judge(engine)

    def _judge(self, engine: Engine) -> None:
        if self.dead or engine is not self.engine or self.loop.unwinding:
            return
        now = self.loop.time()
        elapsed_s = min(now - self._judged_at, self._tick_s)
        self._judged_at = now
        if self._peers and now - self._heard_at <= self._quiet_max_s:
            engine.pass_time(elapsed_s)
            self._publish("", "expired")
        self._ticking = self.loop.call_later(self._tick_s, self._tick, engine, context=self.context)
