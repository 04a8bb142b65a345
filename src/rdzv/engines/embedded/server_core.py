"""All of a server but its sockets: its runs, its sessions, what it allows them, and the passing of time. No I/O.

The core holds no rule of the rendezvous. It keeps nothing on disk: a server that comes back is another instance, and the
members tell it again what they know. `Server` drives it with asyncio, and the simulator with virtual time.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable

from ...errors import LimitExceeded
from ...system.addresses import can_be_told, plain
from ..port import Batch
from . import features, frames
from .features import FEATURES, WelcomeWithFeatures
from .frames import Hello, Rejected, RunsListed, Welcome, encode_news, encode_news_start, encoder
from .limits import Complaints, Limits, Room
from .run import ABANDONED_S, RUN_BYTES, Run
from .session import LINGER_MAX_S, ServerSession
from .trust import Trust
from .turns import Turns

LINGER_S = 1.0
SWEEP_S = 1.0
EMPTY_S = 60.0
"""How long a run in which nothing is left is kept."""
COPIED_MAX = 8 * 1024
"""Bytes of news that are copied into a frame for each watch. Larger ones are written as they are, from one copy for all."""
MANY = 1000
"""Changes of a batch from which on it is measured before it is encoded."""
NEWS_START_MAX = 16
"""Bytes of a frame of news before the batch."""
ACTIVE_S = 5.0
"""How long a run that was heard counts as one that others compete with. With the default lease, members renew more often."""
FORGOTTEN_S = 7 * 86_400.0
"""How long a run without clients is kept for the sake of a lease. Members renew theirs, and those of the run last a day."""
NOT_OPEN = "this server has just started and does not know yet whether the endpoint means it: try again"
SMALL = 64
"""Connections that one run may have to itself. Of the rest an eighth is kept for other runs, half of that for other hosts."""


class ServerCore(ABC):
    """One engine for each run, and the sessions of all clients. A subclass supplies time, chance and the event loop."""

    def __init__(
        self, *, run_id: str = "", linger_s: float = LINGER_S, limits: Limits | None = None, is_open: bool = True,
        trust: Trust | None = None, promised: str = "",
    ) -> None:  # fmt: skip
        """`promised`: the name that the platform gave to this server and to no other that lives (T16.4); '' for none."""
        self.only_run = run_id
        self.linger_s = linger_s
        self.limits = limits or Limits()
        self.trust = trust or Trust()
        self.id = self.token()
        self.place = ""
        self.promised = promised
        self.is_open = is_open
        self.is_retired = False
        """A later server of its name is there, so this one never serves again."""
        self._began_at = self.now()
        self.reached_at = ""
        """The address at which a client on another host reached this server last: others can use it, too."""
        self.awake_s = 0.0
        """How long this server has been awake: its own time, without its stalls."""
        self.connections_max = self.limits.connections
        self.room = Room(self.limits.stored)
        self.runs: dict[str, Run] = {}
        self._names: list[str] | None = None
        """Names of all runs, sorted for `list_runs`; None: they have changed since."""
        # Dictionaries, not sets: the order of a set of objects differs between processes, and a seed must mean one history.
        self.peers: dict[ServerSession, None] = {}
        self.complain = Complaints(self.now)
        self.turns = Turns(self.limits.turn, lambda: self.now(), self.call_later)  # noqa: PLW0108  `now` is replaced.
        self._strangers: dict[ServerSession, None] = {}
        self._slow: dict[ServerSession, None] = {}
        self._owing: dict[ServerSession, None] = {}
        """Clients for which bytes are kept, as far as known: part of a frame, or what they have not read."""
        self._owed = 0
        """Bytes of that, at most."""
        self._of_host: dict[str, int] = {}
        """Connections of each host that have said hello."""
        self.moved: Callable[[], object] = lambda: None
        """Called when a client comes or goes."""
        self._full_at = -math.inf
        """When there was no room for a new run, last."""
        self._posters: list[ServerSession] = []
        self._swept_s = 0.0
        self._emptied_s = 0.0
        self._news_of: Batch | None = None
        self._news: dict[int, bytes] = {}
        self._news_body = b""
        self._news_size = 0

    # ---- for a subclass to fill in

    @abstractmethod
    def now(self) -> float:
        """Return the time, stalls included."""

    @abstractmethod
    def fence_floor(self) -> int:
        """Return a number that grows faster than rounds are sealed, and is never again below what it was at this place."""

    @abstractmethod
    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call back when all that has arrived has been served."""

    @abstractmethod
    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call back after that time; 0: when all that has arrived has been served."""

    @property
    @abstractmethod
    def stalled(self) -> bool:
        """Whether the server has just woken up from a long stop and is reading what waited."""

    def token(self) -> str:
        return secrets.token_hex(8)

    def retire(self) -> None:
        """Stop for good: the platform started another server of this name after this one (T16.7)."""
        self.is_retired, self.is_open = True, False

    @property
    def age_s(self) -> float:
        return self.now() - self._began_at

    # ---- what sessions ask of it

    def arrived(self, peer: ServerSession) -> None:
        """A client connected."""
        self.moved()
        self.peers[peer] = None
        self._strangers[peer] = None
        self.turns.are_strangers_there = True
        if len(self.peers) <= self.connections_max and len(self._strangers) <= self.limits.strangers:
            return
        if next(iter(self._strangers)) is not peer:
            self.drop_oldest_stranger()
        else:
            text = f"this server has {self.connections_max} connections, which is all it can have"
            self.complain(peer.host, text)
            peer.reject(text)

    def drop_oldest_stranger(self) -> bool:
        """Make room for a newcomer. Return False if every client has said hello.

        Strangers may not keep members out by their number. A member says hello before its turn to be dropped comes.
        """
        oldest = next(iter(self._strangers), None)
        if oldest is None:
            return False
        self._strangers.pop(oldest)
        self._drop(oldest, "it connected and did not say hello before this server was full")
        oldest.transport.abort()
        return True

    def hello(self, peer: ServerSession, hello: Hello) -> Welcome | Rejected:
        """Take in a session by its first frame, or say why not."""
        if self._is_succeeded(hello):
            self.retire()
            return Rejected(f"a later server of place {self.promised!r} is there, so this one stops", passing=True)
        if not hello.probe and hello.run not in self.runs and not self._is_of_another_run(hello):
            self._make_room()
        peer.session, peer.features = features.read(hello.session)
        if problem := self._why_not(hello, peer):
            self.complain(peer.host, problem)
            return Rejected(problem, other_run=self._is_of_another_run(hello))
        if not self.is_open and not hello.probe:
            return Rejected(NOT_OPEN, passing=True)
        sockname = peer.transport.get_extra_info("sockname")
        here = plain(sockname[0]) if sockname else ""
        if here and here != peer.host and can_be_told(here):
            self.reached_at = here
        if hello.probe:
            return self._welcome(peer, "")
        self._strangers.pop(peer, None)
        self.turns.are_strangers_there = bool(self._strangers)
        peer.heard_s = self.awake_s
        run, now = self.open_run(hello.run), self.now()
        run.opened_by = run.opened_by or peer.host
        if not run.sessions:
            self.turns.active += 1  # Until the next step of time counts it.
        run.hear(now)
        peer.attempt = hello.attempt
        if not run.enter(peer, hello.instance, hello.leases):
            return Rejected("a later connection of this session is there already", passing=True)
        peer.run = run
        peer.counted_as = peer.host
        self._of_host[peer.counted_as] = self._of_host.get(peer.counted_as, 0) + 1
        peer.linger_s = hello.linger_s if 0 <= hello.linger_s <= LINGER_MAX_S else self.linger_s
        peer.frame_max = self.limits.frame
        return self._welcome(peer, run.engine.instance)

    def tell_runs(self, wanted: frames.RunsWanted) -> RunsListed | Rejected:
        """Answer a client that wants to know which runs there are. No run counts as heard by that."""
        return self.list_runs(wanted.after) if self.is_open else Rejected(NOT_OPEN, passing=True)

    def list_runs(self, after: str = "") -> RunsListed:
        """Return a page of the runs that hold any key, in the order of their names. Costs at most `PAGE_LOOKS` looks."""
        if self._names is None:
            self._names = sorted(self.runs)
        begin, now, size = bisect_right(self._names, after), self.now(), 0
        found: list[frames.RunListed] = []
        for name in self._names[begin : begin + frames.PAGE_LOOKS]:
            run = self.runs[name]
            if len(run.engine):  # Others were only asked for.
                size += 40 + 4 * len(name)  # An upper bound of the bytes.
                if found and (len(found) == frames.PAGE_RUNS or size > frames.PAGE_BYTES):
                    break
                found.append(frames.RunListed(name, now - run.began_at, max(0.0, now - run.heard_at), len(run.sessions)))
            begin, after = begin + 1, name
        return RunsListed(tuple(found), after if begin < len(self._names) else "")

    def open_run(self, name: str) -> Run:
        """Return the run of that name; a new one if there is none."""
        run = self.runs.get(name)
        if run is None:
            self._names = None
            run = self.runs[name] = Run(name, self.token(), self.limits, self.now(), self.room)
        return run

    def _why_not(self, hello: Hello, peer: ServerSession) -> str:
        host = peer.host
        if self._is_of_another_run(hello):
            return (
                f"this server is hosted by an agent of run {self.only_run!r} and serves that run only, not {hello.run!r}: "
                "give one of the runs another port, or start a server for both with `rdzv serve`"
            )
        if not hello.probe and hello.run not in self.runs and len(self.runs) >= self.limits.runs:
            return f"this server has {len(self.runs)} runs, which is all it can have"
        if not hello.probe and hello.run not in self.runs and not self.room.has(0, RUN_BYTES):
            return f"the runs of this server take {self.room.taken} bytes, which is all they can have"
        run, kept = self.runs.get(hello.run), max(0, self.connections_max - SMALL) // 8
        if self.only_run or (run is not None and peer.session in run.sessions):
            return ""
        if run is not None and len(run.sessions) >= self.connections_max - kept:
            return f"run {hello.run!r} has {len(run.sessions)} connections, and the rest of this server's are for other runs"
        if self._of_host.get(host, 0) >= self.connections_max - kept // 2:
            return f"{host} has {self._of_host[host]} connections, and the rest of this server's are for other hosts"
        return ""

    def _is_full(self) -> bool:
        return len(self.runs) >= self.limits.runs or not self.room.has(0, RUN_BYTES)

    def _make_room(self) -> None:
        """Forget runs until a new one fits: those without clients of the host that has most of them, the longest silent first.

        A quarter of them goes at once, and a look in vain is not repeated soon: each looks at all runs.
        """
        if not self._is_full() or self.now() < self._full_at + SWEEP_S:
            return
        idle: dict[str, list[Run]] = {}
        for run in self.runs.values():
            if not run.sessions:
                idle.setdefault(run.opened_by, []).append(run)
        while idle and self._is_full():
            are_many = len(self.runs) >= self.limits.runs
            worst = max(idle, key=lambda host: len(idle[host]) if are_many else sum(run.taken for run in idle[host]))
            runs = sorted(idle.pop(worst), key=lambda run: run.heard_at)
            spared = len(runs) * 3 // 4
            for run in runs[: len(runs) - spared]:
                self._forget(run)
            if spared:
                idle[worst] = runs[-spared:]
        if self._is_full():
            self._full_at = self.now()

    def _forget(self, run: Run) -> None:
        run.forget()
        del self.runs[run.name]
        self._names = None

    def _is_succeeded(self, hello: Hello) -> bool:
        """Whether the client follows a server of this name that was started after this one.

        The two ages are of two clocks, but both tell how long ago something happened, so no clock need be set right.
        """
        return bool(self.promised) and hello.follows not in ("", self.id) and hello.follows_age_s < self.age_s

    def _is_of_another_run(self, hello: Hello) -> bool:
        return bool(self.only_run) and hello.run != self.only_run

    def _welcome(self, peer: ServerSession, instance: str) -> Welcome:
        most = self.limits.operations
        told = self.only_run, self.is_open, self.reached_at, self.fence_floor(), True
        named = (self.promised, self.age_s) if self.promised else ("", 0.0)
        words = (self.id, instance, self.place, most, most, *told, *named)
        return Welcome(*words) if peer.features is None else WelcomeWithFeatures(*words, tuple(sorted(FEATURES)))

    def gone(self, peer: ServerSession) -> None:
        """A connection ended. If that was during a stall of this server, it says nothing about the member."""
        self.moved()
        for known in (self.peers, self._strangers, self._slow, self._owing):
            known.pop(peer, None)
        if peer.run is None:
            return
        peer.run.leave(peer)
        self._of_host[peer.counted_as] -= 1
        if not self._of_host[peer.counted_as]:
            del self._of_host[peer.counted_as]
        # A connection that this server gave up is no sign that the client's process has ended: the lease decides. Found by
        # simulation: after an isolation of the server, the first member to be back let the others be dropped for their silence,
        # and the linger ended them moments before they were back, too.
        if not (peer.said_bye or peer.given_up or self.stalled):
            peer.run.hang_up(peer, peer.linger_s, self.now())

    def news(self, watch: int, batch: Batch) -> bytes | None:
        """Return the frame for a watch of that number; None if it is large. A commit is encoded once for all its watches."""
        if batch is not self._news_of:
            self._news_of, self._news_body, self._news_size = batch, b"", 0
            self._news.clear()
            if len(batch.events) > MANY:  # Others are bounded by the history.
                self._news_size = sum([len(one.key) + (len(one.item.value) if one.item else 0) for one in batch.events])
            if self._news_size <= self.limits.frame:
                self._news_body = encoder.encode(batch)
                self._news_size = len(self._news_body)
        if self._news_size > COPIED_MAX:
            return None
        frame = self._news.get(watch)
        if frame is None:
            frame = self._news[watch] = encode_news(watch, self._news_body)
        return frame

    def large_news(self, watch: int) -> tuple[bytes, bytes]:
        """Return the frame for which `news` returned None, in two parts: the second is shared between watches.

        Raise LimitExceeded if it is too large.
        """
        if self._news_size > self.limits.frame - NEWS_START_MAX:
            raise LimitExceeded("a frame of news", self._news_size, self.limits.frame)
        return encode_news_start(watch, self._news_size), self._news_body

    def has_posted(self, peer: ServerSession) -> None:
        """Write the session's news at the end of this turn."""
        if not self._posters:
            self.call_soon(self._deliver)
        self._posters.append(peer)

    def _deliver(self) -> None:
        posters, self._posters = self._posters, []
        self._news_of, self._news_body = None, b""
        self._news.clear()
        for peer in posters:
            peer.deliver()

    # ---- clients that do not keep up

    def is_slow(self, peer: ServerSession) -> None:
        self._slow[peer] = None

    def is_quick(self, peer: ServerSession) -> None:
        self._slow.pop(peer, None)

    def keeps(self, peer: ServerSession, size: int) -> None:
        """Note that so many bytes more are kept for a client: part of a frame, or what it has not read."""
        self._owing[peer] = None
        self._owed += size
        if self._owed > self.limits.unread:
            self._check_owed()

    def _check_owed(self) -> None:
        """Add up what is kept. If it is too much, close clients of the run that makes this server keep most, the worst first.

        A quarter is freed at once, so that the next sum is not needed soon.
        """
        self._owed = 0  # A client that is dropped is sent the reason, which counts too.
        sizes: dict[ServerSession, int] = {}
        of_run: dict[Run | None, int] = {}
        for peer in self._owing:
            size = peer.kept + peer.transport.get_write_buffer_size()
            # A connection that is being closed frees its memory. Counted again, it would save another one from its turn.
            if size and not peer.transport.is_closing():
                sizes[peer] = size
                of_run[peer.run] = of_run.get(peer.run, 0) + size
        total = sum(sizes.values())
        room = self.limits.unread if total <= self.limits.unread else self.limits.unread * 3 // 4
        for peer in sorted(sizes, key=lambda peer: sizes[peer], reverse=True) if total > room else ():
            if total <= room:
                break
            # Fair between runs: each time one is dropped, it belongs to a run that has at least an average share.
            if of_run[peer.run] * len(of_run) >= total:
                size = sizes.pop(peer)
                total -= size
                of_run[peer.run] -= size
                self._drop(peer, "it leaves more unread, or has more half sent, than others: this server is out of room")
        self._owing = dict.fromkeys(sizes)
        self._owed = total

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
        self._forget_runs()

    def _forget_runs(self) -> None:
        """Forget runs in which nothing is left, or to which nobody will come back, sooner if room is short.

        A run that is forgotten though its members live is told anew, as after a restart of this server.
        """
        now = self.now()
        is_short = self.room.taken > self.room.half or len(self.runs) > self.limits.runs * 3 // 4
        for run in tuple(self.runs.values()):
            patience_s = EMPTY_S if run.is_empty or is_short else ABANDONED_S if run.is_deserted else FORGOTTEN_S
            if now - run.heard_at > patience_s and not run.sessions:
                self._forget(run)

    # ---- time

    def pass_time(self, elapsed_s: float) -> None:
        """Let time pass for all runs, and now and then look for clients that are gone."""
        self.awake_s += elapsed_s
        now = self.now()
        active = 0
        for run in self.runs.values():
            run.pass_time(elapsed_s, now)
            active += now - run.heard_at < ACTIVE_S
        self.turns.active = max(1, active)
        self.turns.are_strangers_there = bool(self._strangers)
        if self.awake_s - self._swept_s >= SWEEP_S:
            self._swept_s = self.awake_s
            self._sweep()
