"""An engine's process in the simulation: the server that ships, on virtual time, with ways to be slow, stuck or gone.

Sessions, runs, leases and limits are the product's own (`ServerCore`, `ServerSession`, `LeaseClock`). This module replaces only
the sockets, the clock and the source of chance, and lets faults and checkers look on.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ..engines.embedded.features import Request
from ..engines.embedded.frames import Frame, Revoke, TxnDone, WatchGap, encode
from ..engines.embedded.lease_clock import STEP_MAX_S, LeaseClock
from ..engines.embedded.limits import Limits
from ..engines.embedded.run import Run
from ..engines.embedded.server_core import ServerCore
from ..engines.embedded.session import ServerSession
from ..engines.port import Batch
from ..engines.reference import Engine
from ..system.node import FENCES_PER_S
from .network import SimConnection, SimNetwork
from .virtual_loop import Process

RUN = "sim"
"""The run that all simulated drivers belong to."""
TICK_S = 0.95 * STEP_MAX_S
"""How often leases are judged: half as often as by a real server, to save time, but never more than a step at once."""

CommitHook = Callable[["SimServer", str, Batch, str], None]
"""Called with server, name of the node that did it ("": the server itself), changes, kind.

The kind is "then" or "otherwise" (the branch of a transaction), "revoked" or "expired" (the end of a lease)."""


class SimServer(Process):
    """A server's process, over all its lives. Pausing it is a stall: connections stay, and requests wait."""

    def __init__(
        self, network: SimNetwork, name: str, seed: int | str = 0, *,
        limits: Limits | None = None, writes_max: int = 100_000, stars: bool = True, durable: bool = False, promised: str = "",
    ) -> None:  # fmt: skip
        """The last but one three are what sessions say of their engine, so that the embedded server can stand for others.

        `promised`: the name that the platform gave the server.
        """
        super().__init__(network.loop, name, random.Random(f"{seed}/{name}"))  # noqa: S311
        self.place = f"{name}:29400"
        self.booted_s = 1e3 * random.Random(f"boot {seed}/{name}").random()  # noqa: S311
        """How long its machine has been up at the begin of the run."""
        self.limits = limits or Limits()
        self.durable = durable
        self.writes_max = writes_max
        self.stars = stars
        self.promised = promised
        self.dead = False
        self.slow_s = 0.0
        """Added to every message, in both directions."""
        self.commits: list[CommitHook] = []
        self.arrivals: list[Callable[[str, Request], None]] = []
        """Called with node and request before it takes effect: for faults at the worst moment."""
        self._network = network
        self.committed: list[Batch] = []
        """Changes of the engine that were not published yet."""
        self.context.copy().run(self.start)

    def start(self) -> None:
        """Begin a life, with empty memory."""
        self.core = _SimCore(self, self._network)
        self.core.open_run(RUN)

    @property
    def engine(self) -> Engine:
        return self.core.open_run(RUN).engine

    @property
    def instance(self) -> str:
        return self.engine.instance

    # ---- faults

    def crash(self) -> None:
        """Kill the process: its memory is gone and its connections drop."""
        self.dead = True
        self.core.clock.stop()
        for session in self._sessions():
            session.connection.session = None
            session.connection.answers.send(session.connection.client_lost, "the connection was closed by the other side")
            session.transport.close()
        self.resume()  # Requests that waited in its sockets are refused now.

    def restart(self) -> None:
        """Start it empty at the same place, as another instance. Crash it first if it lives."""
        if not self.dead:
            self.crash()
        self.dead = False
        self.context.copy().run(self.start)

    def expire(self, lease: int) -> None:
        """End the lease at this very moment."""
        self.core.open_run(RUN).revoke(lease)
        self.publish("", "expired")

    def forget(self) -> None:
        """Forget all changes up to now, so that a watch from before meets a gap."""
        self.engine.compact(self.engine.revision)

    def drop_watches(self) -> None:
        """End every watch with a Gap, as if its reader had been too slow."""
        for session in self._sessions():
            session.drop_watches()

    def _sessions(self) -> list[SimServerSession]:
        return [session for session in self.core.peers if isinstance(session, SimServerSession)]

    def describe(self, request: Request) -> Request:
        """Return what `arrivals` are shown for a request."""
        return request

    # ---- connections

    def receive(self, connection: SimConnection, data: bytes) -> None:
        """Bytes of a client arrived."""
        if not self.dead and not connection.accepted:
            connection.accepted = True
            connection.session = SimServerSession(self.core, connection)
            connection.session.opened(connection.server_end)
        if self.dead or connection.session is None:  # The server was restarted, or never listened.
            connection.answers.send(connection.client_lost, "the connection was refused")
        else:
            connection.read(data)

    def hung_up(self, connection: SimConnection, in_order: bool = False) -> None:
        """The connection is gone, and its member perhaps with it. `in_order`: by an end-of-file."""
        self._network.forget(connection)
        session, connection.session = connection.session, None
        if session is not None:
            if in_order:
                session.end_of_file()
            session.transport.close()
            session.closed()

    # ---- for checkers

    def publish(self, actor: str, kind: str) -> None:
        """Tell the checkers: only after the engine's call, since before it is not known which branch it took."""
        if not self.committed:
            return
        committed = self.committed[:]
        self.committed.clear()
        for batch in () if self.loop.unwinding else committed:
            for hook in self.commits:
                hook(self, actor, batch, kind)


class _SimCore(ServerCore):
    """One life of a server."""

    def __init__(self, server: SimServer, network: SimNetwork) -> None:
        self._server = server
        self.clock = LeaseClock(self.pass_time, server.loop, TICK_S)
        super().__init__(limits=server.limits, trust=network.trust, promised=server.promised)
        self.place = server.place
        self.complain = lambda _peer, _problem: None  # type: ignore[assignment]  # Faults are in the history.

    def now(self) -> float:
        return self._server.loop.now

    def fence_floor(self) -> int:
        return int(FENCES_PER_S * (self._server.booted_s + self._server.loop.now)) + 1

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._server.loop.call_soon(callback, context=self._server.context)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        self._server.loop.call_later(delay_s, callback, context=self._server.context)

    @property
    def stalled(self) -> bool:
        return self.clock.stalled

    def token(self) -> str:
        return f"{self._server.rng.getrandbits(64):016x}"

    def retire(self) -> None:
        super().retire()
        self.call_soon(self._server.crash)

    def open_run(self, name: str) -> Run:
        is_new = name not in self.runs
        run = super().open_run(name)
        if is_new:
            run.engine.observers.append(self._server.committed.append)
        return run

    def pass_time(self, elapsed_s: float) -> None:
        if not self._server.loop.unwinding:
            super().pass_time(elapsed_s)
            if self._server.committed:
                self._server.publish("", "expired")


class SimServerSession(ServerSession):
    """The shipping session, with a look at each request."""

    __slots__ = ("_sim", "connection")

    def __init__(self, core: ServerCore, connection: SimConnection) -> None:
        super().__init__(core)
        self.connection = connection
        self._sim = connection.server

    def serve(self, run: Run, request: Request) -> Frame | None:
        actor, sim = self.connection.node.name, self._sim
        if sim.arrivals:
            shown = sim.describe(request)
            for ambush in list(sim.arrivals):
                ambush(actor, shown)
            if self.transport.is_closing():
                return None
        answer = super().serve(run, request)
        if isinstance(answer, TxnDone):
            sim.publish(actor, "then" if answer.outcome.succeeded else "otherwise")
        elif isinstance(request, Revoke):
            sim.publish(actor, "revoked")
        return answer

    def replaced(self) -> None:
        """Drop the former connection, unless this server stands for etcd: there a late request still takes effect."""
        if self._sim.stars:
            super().replaced()

    def drop_watches(self) -> None:
        for number in tuple(self._watches):
            self._end_watch(number)
            self.send(encode(WatchGap(number, "the watch was too slow")))
