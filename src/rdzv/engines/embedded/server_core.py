"""All of a server but its sockets: its runs, its sessions, what it allows them, and the passing of time. No I/O.

The core holds no rule of the rendezvous. It keeps nothing on disk: a server that comes back is another instance, and the
members tell it again what they know. `Server` drives it with asyncio, and the simulator with virtual time.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

from ...system.addresses import can_be_told, plain
from ..port import Batch
from .frames import Hello, Welcome, encode, encode_news, encoder
from .limits import Complaints, Limits
from .run import Run
from .session import LINGER_MAX_S, ServerSession
from .trust import Trust

LINGER_S = 1.0
SWEEP_S = 1.0
EMPTY_S = 60.0
"""How long a run in which nothing is left is kept."""


class ServerCore(ABC):
    """One engine for each run, and the sessions of all clients. A subclass supplies time, chance and the event loop."""

    def __init__(
        self, *, run_id: str = "", linger_s: float = LINGER_S, limits: Limits | None = None, is_open: bool = True,
        trust: Trust | None = None,
    ) -> None:  # fmt: skip
        self.only_run = run_id
        self.linger_s = linger_s
        self.limits = limits or Limits()
        self.trust = trust or Trust()
        self.id = self.token()
        self.place = ""
        self.fence_floor = 0
        self.is_open = is_open
        self.reached_at = ""
        """The address at which a client on another host reached this server last: others can use it, too."""
        self.awake_s = 0.0
        """How long this server has been awake: its own time, without its stalls."""
        self.connections_max = self.limits.connections
        self.runs: dict[str, Run] = {}
        # Dictionaries, not sets: the order of a set of objects differs between processes, and a seed must mean one history.
        self.peers: dict[ServerSession, None] = {}
        self.complain = Complaints(self.now)
        self._strangers: dict[ServerSession, None] = {}
        self._slow: dict[ServerSession, None] = {}
        self._halves: dict[ServerSession, None] = {}
        self._posters: list[ServerSession] = []
        self._swept_s = 0.0
        self._emptied_s = 0.0
        self._news_of: Batch | None = None
        self._news: dict[int, bytes] = {}
        self._news_body = b""

    # ---- for a subclass to fill in

    @abstractmethod
    def now(self) -> float:
        """Return the time, stalls included."""

    @abstractmethod
    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call back when all that has arrived has been served."""

    @property
    @abstractmethod
    def stalled(self) -> bool:
        """Whether the server has just woken up from a long stop and is reading what waited."""

    def token(self) -> str:
        return secrets.token_hex(8)

    def moved(self) -> None:  # noqa: B027  Only a server that can stop waits for that.
        """Called when a client comes or goes."""

    # ---- what sessions ask of it

    def arrived(self, peer: ServerSession) -> None:
        """A client connected."""
        self.moved()
        self.peers[peer] = None
        self._strangers[peer] = None
        if len(self.peers) <= self.connections_max:
            return
        oldest = next(iter(self._strangers))
        if oldest is not peer:
            # Strangers may not keep members out by their number. A member says hello before its turn to be dropped comes.
            self._strangers.pop(oldest)
            self._drop(oldest, "it connected and did not say hello before this server was full")
            oldest.transport.abort()
        else:
            text = f"this server has {self.connections_max} connections, which is all it can have"
            self.complain(peer.host, text)
            peer.reject(text)

    def hello(self, peer: ServerSession, hello: Hello) -> None:
        """Take in a session by its first frame, or say why not."""
        if problem := self._why_not(hello):
            self.complain(peer.host, problem)
            peer.reject(problem)
            return
        if not self.is_open and not hello.probe:
            text = "this server has just started and does not know yet whether the endpoint means it: try again"
            peer.reject(text, passing=True)
            return
        sockname = peer.transport.get_extra_info("sockname")
        here = plain(sockname[0]) if sockname else ""
        if here and here != peer.host and can_be_told(here):
            self.reached_at = here
        if hello.probe:
            peer.send(encode(self._welcome("")))
            peer.transport.close()
            return
        self._strangers.pop(peer, None)
        peer.heard_s = self.awake_s
        run = self.open_run(hello.run)
        run.hear(self.now())
        peer.session, peer.attempt = hello.session, hello.attempt
        if not run.enter(peer, hello.instance, hello.leases):
            peer.reject("a later connection of this session is there already", passing=True)
            return
        peer.run = run
        peer.linger_s = hello.linger_s if 0 <= hello.linger_s <= LINGER_MAX_S else self.linger_s
        peer.frame_max = self.limits.frame
        peer.send(encode(self._welcome(run.engine.instance)))

    def open_run(self, name: str) -> Run:
        """Return the run of that name; a new one if there is none."""
        run = self.runs.get(name)
        if run is None:
            run = self.runs[name] = Run(name, self.token(), self.limits, self.now())
        return run

    def _why_not(self, hello: Hello) -> str:
        if self.only_run and hello.run != self.only_run:
            return (
                f"this server is hosted by an agent of run {self.only_run!r} and serves that run only, not {hello.run!r}: "
                "give one of the runs another port, or start a server for both with `rdzv serve`"
            )
        if not hello.probe and hello.run not in self.runs and len(self.runs) >= self.limits.runs:
            return f"this server has {len(self.runs)} runs, which is all it can have"
        return ""

    def _welcome(self, instance: str) -> Welcome:
        most = self.limits.operations
        told = self.only_run, self.is_open, self.reached_at, self.fence_floor
        return Welcome(self.id, instance, self.place, most, most, *told)

    def gone(self, peer: ServerSession) -> None:
        """A connection ended. If that was during a stall of this server, it says nothing about the member."""
        self.moved()
        for known in (self.peers, self._strangers, self._slow, self._halves):
            known.pop(peer, None)
        if peer.run is None:
            return
        peer.run.leave(peer)
        # A connection that this server gave up is no sign that the client's process has ended: the lease decides. Found by
        # simulation: after an isolation of the server, the first member to be back let the others be dropped for their silence,
        # and the linger ended them moments before they were back, too.
        if not (peer.said_bye or peer.given_up or self.stalled):
            peer.run.hang_up(peer, peer.linger_s)

    def news(self, watch: int, batch: Batch) -> bytes:
        """Return the frame for a watch of that number. A commit is encoded once for all its watches."""
        if batch is not self._news_of:
            self._news_of, self._news_body = batch, encoder.encode(batch)
            self._news.clear()
        frame = self._news.get(watch)
        if frame is None:
            frame = self._news[watch] = encode_news(watch, self._news_body)
        return frame

    def has_posted(self, peer: ServerSession) -> None:
        """Write the session's news at the end of this turn."""
        if not self._posters:
            self.call_soon(self._deliver)
        self._posters.append(peer)

    def _deliver(self) -> None:
        posters, self._posters = self._posters, []
        for peer in posters:
            peer.deliver()

    # ---- clients that do not keep up

    def is_slow(self, peer: ServerSession) -> None:
        self._slow[peer] = None
        self._check_unread()

    def is_quick(self, peer: ServerSession) -> None:
        self._slow.pop(peer, None)

    def keeps(self, peer: ServerSession) -> None:
        """The client has sent part of a frame."""
        self._halves[peer] = None
        if peer.kept > 64 * 1024:
            self._check_unread()

    def _check_unread(self) -> None:
        """Close the clients that make this server keep most, until the rest fits."""
        # A connection that is being closed frees its memory. Counted again, it would save another one from its turn.
        self._halves = {peer: None for peer in self._halves if peer.kept and not peer.transport.is_closing()}
        sizes = {peer: peer.kept + peer.transport.get_write_buffer_size() for peer in self._slow | self._halves}
        total = sum(sizes.values())
        while total > self.limits.unread:
            worst = max(sizes, key=lambda peer: sizes[peer])
            total -= sizes.pop(worst)
            self._drop(worst, "it leaves more unread, or has more half sent, than all others: this server is out of room")

    def _drop(self, peer: ServerSession, problem: str) -> None:
        self.complain(peer.host, problem)
        peer.given_up = True
        if peer.transport.is_closing() or peer in self._slow:
            peer.transport.abort()  # It would not read a reason.
        else:
            peer.reject(problem)

    def _sweep(self) -> None:
        limits, now_s = self.limits, self.awake_s
        for peer in tuple(self._strangers):
            if now_s - peer.heard_s <= limits.greeting_s:
                break
            self._drop(peer, f"it connected and did not say hello within {limits.greeting_s:g} s")
            self._strangers.pop(peer, None)
        for peer in tuple(self._slow):
            if now_s - peer.slow_s > limits.slow_s:
                self._drop(peer, f"it has not read what it was sent for {limits.slow_s:g} s")
        if now_s - self._emptied_s < 10 * SWEEP_S:
            return
        self._emptied_s = now_s
        for peer in tuple(self.peers):
            if now_s - peer.heard_s > limits.silent_s:
                self._drop(peer, f"it has said nothing for {limits.silent_s:g} s")
        for name, run in tuple(self.runs.items()):
            if run.is_empty and self.now() - run.heard_at > EMPTY_S:
                del self.runs[name]

    # ---- time

    def judge(self, elapsed_s: float) -> None:
        """Let time pass for all runs, and now and then look for clients that are gone."""
        self.awake_s += elapsed_s
        now = self.now()
        for run in self.runs.values():
            run.pass_time(elapsed_s, now)
        if self.awake_s - self._swept_s >= SWEEP_S:
            self._swept_s = self.awake_s
            self._sweep()
