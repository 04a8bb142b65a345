"""The embedded server: engines in memory, one for each run, behind TCP.

It holds no rule of the rendezvous. It serves many runs (`rdzv serve`) or, hosted by an agent, that agent's run only. It
keeps nothing on disk: one that comes back is another instance, and is re-told by the members.
"""

from __future__ import annotations

import asyncio
import secrets

from ...config.endpoint import PORT
from ...system.addresses import BACKLOG, can_be_told, is_loopback, listen, place_of, plain
from ...system.fork import let_go_in_children
from ..port import Batch
from .frames import Hello, Welcome, encode, encode_batch, encode_news
from .lease_clock import LeaseClock
from .limits import DESCRIPTORS_SPARED, Complaints, Limits, logger, raise_nofile
from .run import Run
from .server_connection import LINGER_MAX_S, ServerConnection
from .tls import TlsTransport
from .trust import Trust

LINGER_S = 1.0
SWEEP_S = 1.0
EMPTY_S = 60.0
"""A run in which nothing is left is forgotten after this time."""
STOP_S = 1.0
"""How long a stopping server waits until everybody has read its last word."""


class Server:
    """Made with `start`, ended by `stop`; belongs to the loop in which it was started."""

    def __init__(
        self,
        bind: tuple[str, int] = ("127.0.0.1", PORT),
        *,
        run_id: str = "",
        linger_s: float = LINGER_S,
        limits: Limits | None = None,
        is_open: bool = True,
        trust: Trust | None = None,
    ) -> None:
        """`bind`: host ('' for all interfaces) and port (0 for any). `run_id`: serve that run only ('' for all).

        A server that is not open answers probes only, until `admit`. `trust`: what members must prove; None: nothing.
        """
        self.bind = bind
        self.only_run = run_id
        self.linger_s = linger_s
        self.limits = limits or Limits()
        self.trust = trust or Trust()
        self.id = secrets.token_hex(8)
        self.place = ""
        self.port = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_open = is_open
        self.reached_at = ""
        """The address at which a peer on another host reached us last."""
        self.awake_s = 0.0
        """How long this server has been awake: its own time, without its stalls."""
        self.runs: dict[str, Run] = {}
        self.peers: set[ServerConnection] = set()
        self._strangers: dict[ServerConnection, None] = {}
        self._slow: set[ServerConnection] = set()
        self._halves: set[ServerConnection] = set()
        self._posters: list[ServerConnection] = []
        self._listeners: list[asyncio.Server] = []
        self._connections_max = 0
        self._swept_s = 0.0
        self._emptied_s = 0.0
        self._news_of: Batch | None = None
        self._news: dict[int, bytes] = {}
        self._news_body = b""
        self._moved = asyncio.Event()

    # ---- its life

    async def start(self) -> None:
        """Listen. Raises OSError, with errno EADDRINUSE if somebody is there already."""
        host, port = self.bind
        sockets = listen(host, port)
        for one in sockets:
            let_go_in_children(one)
        self.port = sockets[0].getsockname()[1]
        self.place = place_of(sockets, host)
        files = raise_nofile()
        self._connections_max = max(1, min(self.limits.connections, files - DESCRIPTORS_SPARED))
        if self._connections_max < self.limits.connections:
            logger.info(
                "%s connections at most, because this process may have %s open files; raise the limit (ulimit -Hn) for more",
                self._connections_max,
                files,
            )
        self._clock = LeaseClock(self._judge)
        self.complain = Complaints(self._clock.now)
        loop = self.loop = asyncio.get_running_loop()
        try:
            for one in sockets:
                self._listeners.append(await loop.create_server(self._accept, sock=one, backlog=BACKLOG))
        except BaseException:
            self._clock.stop()
            self._listeners.clear()
            for one in sockets:  # The one that was being started serves already, and nobody would know.
                loop.remove_reader(one)
                one.close()
            raise
        shown = f"run {self.only_run!r}" if self.only_run else "all runs"
        logger.info("serving %s at %s:%s (server %s)", shown, host or "*", self.port, self.id)
        self._is_reachable = not all(is_loopback(one.getsockname()[0]) for one in sockets)
        if self.is_open:
            self.admit()

    def _accept(self) -> asyncio.BufferedProtocol:
        peer, certificates = ServerConnection(self), self.trust.certificates
        return peer if certificates is None else TlsTransport(peer, certificates)

    def admit(self) -> None:
        """Serve; before, only probes were answered."""
        self.is_open = True
        if self._is_reachable and not self.trust.knows_members:
            logger.warning(
                "anybody who reaches port %s of this machine can take part in its runs: give server and members a secret "
                "(RDZV_TOKEN or token_file)",
                self.port,
            )

    async def stop(self) -> None:
        """Say so to all, and end. What the engines hold is gone. Stopping twice is harmless."""
        if not self._listeners:
            return
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._clock.stop()
        for peer in tuple(self.peers):
            where = f" at {self.place}" if peer.run is not None else ""  # Which is no stranger's business.
            peer.reject(f"the server{where} has been stopped", passing=True)
        deadline = self.now() + STOP_S
        while self.peers and await self._moves(deadline - self.now()):
            pass
        for peer in tuple(self.peers):
            peer.transport.abort()
        while self.peers and await self._moves(STOP_S):
            pass
        logger.info("stopped serving at port %s", self.port)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nobody is connected any more, and nobody who was will be back; False when the time is up."""
        deadline = self.now() + timeout_s
        while True:
            left_s = deadline - self.now()
            if any(peer.may_be_there for peer in self.peers):
                if left_s <= 0:
                    return False
                await self._moves(min(left_s, self.linger_s))  # In slices: a lease that ends moves nobody.
            elif not any(run.presences for run in self.runs.values()) or not await self._moves(min(left_s, self.linger_s)):
                return True

    async def _moves(self, timeout_s: float) -> bool:
        """Wait until somebody comes or goes; False when the time is up."""
        self._moved.clear()
        try:
            await asyncio.wait_for(self._moved.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def now(self) -> float:
        """The loop's time."""
        return self._clock.now()

    # ---- what peers ask of it

    def arrived(self, peer: ServerConnection) -> None:
        """Somebody connected."""
        let_go_in_children(peer)
        self._moved.set()
        self.peers.add(peer)
        self._strangers[peer] = None
        if len(self.peers) <= self._connections_max:
            return
        oldest = next(iter(self._strangers))
        if oldest is not peer:
            # Strangers may not keep members out by their number: whoever is one of ours says so sooner than they are replaced.
            self._strangers.pop(oldest)
            self._drop(oldest, "it connected and did not say hello before this server was full")
            oldest.transport.abort()
        else:
            text = f"this server has {self._connections_max} connections, which is all it can have"
            self.complain(peer.host, text)
            peer.reject(text)

    def hello(self, peer: ServerConnection, hello: Hello) -> None:
        """The first frame of a connection."""
        problem = self._why_not(hello)
        if problem:
            self.complain(peer.host, problem)
            peer.reject(problem)
            return
        if not self.is_open and not hello.probe:
            text = "this server has just started and does not know yet whether the endpoint means it: try again"
            peer.reject(text, passing=True)
            return
        self._note_address(peer)
        if hello.probe:
            peer.send(encode(self._welcome("")))
            peer.transport.close()
            return
        self._strangers.pop(peer, None)
        peer.heard_s = self.awake_s
        now = self.now()
        run = self.runs.get(hello.run)
        if run is None:
            run = self.runs[hello.run] = Run(hello.run, self.limits, now)
        run.hear(now)
        peer.session, peer.attempt = hello.session, hello.attempt
        if not run.enter(peer, hello.instance, hello.leases):
            peer.reject("a later connection of this session is there already", passing=True)
            return
        peer.run = run
        peer.linger_s = hello.linger_s if 0 <= hello.linger_s <= LINGER_MAX_S else self.linger_s
        peer.frame_max = self.limits.frame
        peer.send(encode(self._welcome(run.engine.instance)))

    def _why_not(self, hello: Hello) -> str:
        if self.only_run and hello.run != self.only_run:
            return (
                f"this server is hosted by an agent of run {self.only_run!r} and serves that run only, not {hello.run!r}: "
                "give one of the runs another port, or start a server for both with `rdzv serve`"
            )
        if hello.probe:
            return ""
        if hello.run not in self.runs and len(self.runs) >= self.limits.runs:
            return f"this server has {len(self.runs)} runs, which is all it can have"
        return ""

    def _welcome(self, instance: str) -> Welcome:
        return Welcome(
            server=self.id,
            instance=instance,
            place=self.place,
            compares_max=self.limits.operations,
            writes_max=self.limits.operations,
            only_run=self.only_run,
            open=self.is_open,
            reached_at=self.reached_at,
        )

    def _note_address(self, peer: ServerConnection) -> None:
        """Where a peer on another host reaches us is where others can, too."""
        sockname = peer.transport.get_extra_info("sockname")
        here = plain(sockname[0]) if sockname else ""
        if here and here != peer.host and can_be_told(here):
            self.reached_at = here

    def gone(self, peer: ServerConnection) -> None:
        """A connection ended. One that was given up while we were stopped says nothing about its member."""
        self._moved.set()
        self.peers.discard(peer)
        self._strangers.pop(peer, None)
        self._slow.discard(peer)
        self._halves.discard(peer)
        if peer.run is None:
            return
        peer.run.leave(peer)
        if not peer.said_bye and not self._clock.stalled:
            peer.run.hang_up(peer, peer.linger_s)

    def news(self, watch: int, batch: Batch) -> bytes:
        """The frame for a watch of that number. Those who watch the same get the very same bytes."""
        if batch is not self._news_of:
            self._news_of, self._news_body = batch, encode_batch(batch)
            self._news.clear()
        frame = self._news.get(watch)
        if frame is None:
            frame = self._news[watch] = encode_news(watch, self._news_body)
        return frame

    def has_posted(self, peer: ServerConnection) -> None:
        """It has news that can wait until all that has arrived was done, to be written at once."""
        if not self._posters:
            assert self.loop is not None, "there are peers"
            self.loop.call_soon(self._deliver)
        self._posters.append(peer)

    def _deliver(self) -> None:
        posters, self._posters = self._posters, []
        for peer in posters:
            peer.deliver()

    # ---- those who do not keep up

    def is_slow(self, peer: ServerConnection) -> None:
        """It leaves much unread."""
        self._slow.add(peer)
        self._check_unread()

    def is_quick(self, peer: ServerConnection) -> None:
        """It reads again."""
        self._slow.discard(peer)

    def keeps(self, peer: ServerConnection) -> None:
        """It has sent part of a frame."""
        self._halves.add(peer)
        if peer.kept > 64 * 1024:
            self._check_unread()

    def _check_unread(self) -> None:
        """Close those who make us keep most, until what is left fits."""
        # One that is being closed takes its half with it; counted again, it would save another one from its turn.
        self._halves = {peer for peer in self._halves if peer.kept and not peer.transport.is_closing()}
        sizes = {peer: peer.kept + peer.transport.get_write_buffer_size() for peer in self._slow | self._halves}
        total = sum(sizes.values())
        while total > self.limits.unread:
            worst = max(sizes, key=lambda peer: sizes[peer])
            total -= sizes.pop(worst)
            self._drop(worst, "it leaves more unread, or has more half sent, than all others: this server is out of room")

    def _drop(self, peer: ServerConnection, problem: str) -> None:
        self.complain(peer.host, problem)
        if peer.transport.is_closing() or peer in self._slow:
            peer.transport.abort()  # It would not read another word.
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

    def _judge(self, elapsed_s: float) -> None:
        self.awake_s += elapsed_s
        now = self.now()
        for run in self.runs.values():
            run.pass_time(elapsed_s, now)
        if self.awake_s - self._swept_s >= SWEEP_S:
            self._swept_s = self.awake_s
            self._sweep()
