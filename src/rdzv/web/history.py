"""The history of one run as an observer sees it: the model behind the metrics and the page. Pure: time is passed in.

Three things come in. Journal lines tell of rounds, causes and durations, each measured by the monotonic clock of the leader
that wrote the line. Looks tell who is there now. Facts tell what only a watch shows: a record that went without a goodbye, and
the leader. Where a line does not know its duration, the observer's own clock is used, if it was there.

The *timeline* counts seconds from the first line that is kept. Lines from before the observer came are placed by their own
durations. A part of unknown length counts as nothing there, and the round is marked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..core.model import JOURNAL_MAX, CauseKind, JournalEntry, Phase
from ..core.status import Status
from ..operate.journal import histories

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ROUNDS_MAX = 256
"""Rounds of the timeline. The journal of the engine remembers about half as many."""
LINES_MAX = JOURNAL_MAX
"""Journal lines kept for the page."""
LANES_MAX = 48
"""Members that the timeline shows. Members that changed or caused a restart come first."""
NAMES_MAX = 20_000
"""Names whose host and rounds are remembered. A run has at most 10,000 members."""
HOSTS_MAX = 1_000
UNKNOWN = "unknown"
"""The cause of a break that names none."""


class Line(msgspec.Struct, frozen=True):
    """A journal entry and the revision at which the engine stored it."""

    revision: int
    entry: JournalEntry


class Histogram(msgspec.Struct):
    """Counts of durations by bucket, as Prometheus wants them. The last count is that of all above the largest bound."""

    bounds: tuple[float, ...] = BUCKETS_S
    counts: list[int] = []
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


class Counters(msgspec.Struct):
    """Everything about a run that is counted and never goes down."""

    sealed: int = 0
    broken: dict[str, int] = {}
    """Rounds broken, by the kind of the cause."""
    lost_s: dict[str, float] = {}
    """Seconds from a break to the next seal or to the close, by the kind of the cause."""
    evictions: int = 0
    leader_changes: int = 0
    form: Histogram = msgspec.field(default_factory=Histogram)
    restart: Histogram = msgspec.field(default_factory=Histogram)


class RoundSpan(msgspec.Struct):
    """One round on the timeline, and the restart after it."""

    run: str
    """The incarnation."""
    number: int
    size: int
    begin_s: float
    reason: str = ""
    stamp: str = ""
    is_exact: bool = True
    """False: a part of its time is unknown, so it lasted longer than it is drawn."""
    end_s: float | None = None
    """The break or close; None while it runs."""
    cause: str = ""
    text: str = ""
    caused_by: tuple[str, ...] = ()
    cost_s: float | None = None
    """From the break to the next seal, or to the close; None while that lasts or if there was no break."""
    came: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class HostBlame(msgspec.Struct):
    """One host, and what its members cost the run. A cost with several culprits is shared between them."""

    host: str
    restarts: int = 0
    growths: int = 0
    """Restarts because it came in, which is no fault."""
    lost_s: float = 0.0
    last: str = ""
    """The kind of the last cause."""


class Lane(msgspec.Struct, frozen=True):
    """The rounds that one member name was in, as pairs of first and last index into the rounds that are shown."""

    name: str
    host: str
    stays: tuple[tuple[int, int], ...]
    is_there: bool


class RunModel:
    """Everything known of one run id. Every `now` is a reading of one monotonic clock."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.counters = Counters()
        self.status: Status | None = None
        self.run = ""
        """The incarnation that was seen last."""
        self.phase_at = 0.0
        """Since when the present phase has been seen."""
        self.phase_is_exact = False
        self.rounds: deque[RoundSpan] = deque()
        self.entries: deque[JournalEntry] = deque(maxlen=LINES_MAX)
        self.hosts: dict[str, HostBlame] = {}
        self.version = 0
        """Raised whenever rounds, lines or hosts change."""
        self._instance = ""
        self._revision = 0
        self._origin: float | None = None
        """The reading of the clock that is second 0 of the timeline; None before the first line was placed."""
        self._at_s = 0.0
        self._number = 0
        self._phase: Phase | None = None
        self._broken: list[str] | None = None
        """The kind of the break that lasts, and the members that caused it; None while none does."""
        self._cost_s = 0.0
        self._is_cost_exact = True
        self._open_s: float | None = None
        """How long the heads before the first seal have stood, as far as lines tell."""
        self._forming_at: float | None = None
        self._looked = False
        self._leader = ""
        self._first = 0
        """Index of the first round that is kept, counted from the first ever seen."""
        self._names: set[str] | None = None
        """Names of the newest round's members; None: unknown."""
        self._stays: dict[str, list[list[int]]] = {}
        self._host_of: dict[str, str] = {}

    # ---- what comes in

    def tell(self, instance: str, lines: Iterable[Line], now: float, *, live: bool) -> None:
        """Fold the journal lines that were not folded before, oldest first.

        `live`: they were written just now. Other lines lay there when the observer came.
        """
        if instance != self._instance:  # An engine that came back empty has a journal of its own.
            self._instance, self._revision = instance, 0
        for line in sorted(lines, key=lambda line: line.revision):
            if line.revision > self._revision:
                self._revision = line.revision
                self._fold(line.entry, now, live=live)
        if self._origin is None:
            self._origin = now - self._at_s

    def look(self, status: Status | None, now: float) -> None:
        """Take in the run as it is now; None: the engine keeps no such run."""
        looked, self._looked = self._looked, True
        before, self.status = self.status, status
        if _phase_key(before) != _phase_key(status) or not looked:
            self.phase_at, self.phase_is_exact = now, looked
        if status is None:
            self._forming_at = None
            return
        if status.round == 0 and status.phase in ("none", "open"):
            # A run that was there at the first look may have waited before.
            if self._forming_at is None and looked and status.members and (before is None or not before.members):
                self._forming_at = now
        elif status.phase == "sealed":
            self._forming_at = None
        for member in status.members:
            if len(self._host_of) < NAMES_MAX:
                self._host_of[member.name] = member.host
        last = self.rounds[-1] if self.rounds else None
        if last is not None and last.number == status.round:
            self._set_names({member.name for member in status.members if member.rank >= 0})

    def appeared(self, now: float) -> None:
        """Note that the run has just come into being, before the first look."""
        if not self._looked and not self.entries:
            self._looked, self._forming_at, self.phase_at = True, now, now

    def evicted(self, count: int) -> None:
        """Count members whose records went without a goodbye."""
        self.counters.evictions += count

    def leader_is(self, id: str) -> None:
        """Note the id of the leader; empty: there is none."""
        if id and self._leader and id != self._leader:
            self.counters.leader_changes += 1
        self._leader = id or self._leader

    # ---- lines

    def _fold(self, entry: JournalEntry, now: float, *, live: bool) -> None:
        self.version += 1
        before_s = self._at_s
        if live and self._origin is not None:
            self._at_s = max(self._at_s, now - self._origin)
        else:
            self._at_s += entry.lasted_s or 0.0
        # The writer's measure counts; the observer's own is better than none.
        lasted_s = entry.lasted_s if entry.lasted_s is not None else self._at_s - before_s if live else None
        if entry.run != self.run:
            self._begin_incarnation(entry)
        elif lasted_s is None and self.rounds:
            self.rounds[-1].is_exact = False
        if self._broken is not None:
            self._cost_s += lasted_s or 0.0
            self._is_cost_exact = self._is_cost_exact and lasted_s is not None
        elif self._number == 0 and self._open_s is not None and self._phase is not None:
            self._open_s = None if lasted_s is None else self._open_s + lasted_s
        self.entries.append(entry)
        if entry.phase is Phase.SEALED and (self._number != entry.number or self._broken is not None):
            self._sealed(entry, now if live else None)
        elif entry.phase is Phase.BROKEN and self._broken is None:
            self._break(entry)
        elif entry.phase is Phase.BROKEN and entry.cause is not None:
            # The leader found the root cause meanwhile. Its kind gets the cost and the blame; the break is counted once.
            self._blame(entry)
        elif entry.phase is Phase.CLOSED:
            self._closed(entry)
        self._phase = entry.phase

    def _begin_incarnation(self, entry: JournalEntry) -> None:
        self.run, self._number, self._phase, self._broken, self._names = entry.run, 0, None, None, None
        self._open_s = 0.0 if entry.seq <= 2 else None  # A run that fills at once has no first head but a second.

    def _sealed(self, entry: JournalEntry, now: float | None) -> None:
        counters = self.counters
        counters.sealed += 1
        if self._broken is not None:
            self._end_restart(is_sealed=True)
        elif self._number == 0:
            if self._forming_at is not None and now is not None:
                counters.form.observe(now - self._forming_at)
            elif self._open_s is not None:
                counters.form.observe(self._open_s)
        self._forming_at = None
        self._number = entry.number
        begin_s, came, gone = round(self._at_s, 3), entry.came, entry.gone
        span = RoundSpan(entry.run, entry.number, entry.size, begin_s, entry.reason, entry.stamp, came=came, gone=gone)
        self.rounds.append(span)
        if len(self.rounds) > ROUNDS_MAX:
            self._drop_oldest_round()
        if self._names is not None:
            self._names = (self._names - set(entry.gone)) | set(entry.came)
            self._stay(self._newest, self._names)

    def _break(self, entry: JournalEntry) -> None:
        kind = entry.cause.kind.value if entry.cause is not None else UNKNOWN
        self.counters.broken[kind] = self.counters.broken.get(kind, 0) + 1
        self._cost_s, self._is_cost_exact = 0.0, True
        last = self._blame(entry)
        if last is not None:
            last.end_s = round(self._at_s, 3)

    def _blame(self, entry: JournalEntry) -> RoundSpan | None:
        """Note the cause of the break, and return the round that it ended, if that is known."""
        cause = entry.cause
        kind, members = (cause.kind.value, cause.members) if cause is not None else (UNKNOWN, ())
        self._broken = [kind, *members]
        last = self.rounds[-1] if self.rounds else None
        if last is not None and last.number == entry.number and last.run == entry.run:
            last.cause, last.caused_by = kind, members
            last.text = cause.text if cause is not None else entry.reason
            return last
        return None

    def _closed(self, entry: JournalEntry) -> None:
        if self._broken is not None:
            self._end_restart(is_sealed=False)
        last = self.rounds[-1] if self.rounds else None
        if last is not None and last.run == entry.run and last.end_s is None:
            last.end_s, last.text = round(self._at_s, 3), entry.cause.text if entry.cause is not None else entry.reason
            last.cause = entry.cause.kind.value if entry.cause is not None else UNKNOWN

    def _end_restart(self, *, is_sealed: bool) -> None:
        assert self._broken is not None, "asked while a round is broken"
        kind, *members = self._broken
        cost_s, self._broken = round(self._cost_s, 3), None
        self.counters.lost_s[kind] = self.counters.lost_s.get(kind, 0.0) + cost_s
        if is_sealed and self._is_cost_exact:  # A histogram of lower bounds would look better than the truth.
            self.counters.restart.observe(cost_s)
        if self.rounds and self.rounds[-1].end_s is not None:
            self.rounds[-1].cost_s = cost_s
        hosts = list(dict.fromkeys(self._host_of.get(name, name) for name in members))
        for host in hosts:
            blame = self.hosts.get(host)
            if blame is None:
                if len(self.hosts) >= HOSTS_MAX:
                    continue
                blame = self.hosts[host] = HostBlame(host)
            blame.last = kind
            if kind == CauseKind.GROWTH.value:
                blame.growths += 1
            else:
                blame.restarts += 1
                blame.lost_s = round(blame.lost_s + cost_s / len(hosts), 3)

    # ---- members of rounds

    @property
    def _newest(self) -> int:
        return self._first + len(self.rounds) - 1

    def _set_names(self, names: set[str]) -> None:
        """Note the members of the newest round."""
        guessed, self._names = self._names, names
        if guessed == names:
            return
        self.version += 1
        if guessed is None:
            self._fill_earlier_rounds(names)
            return
        for name in guessed - names:  # Lines name 8 members at most, so a guess from a line may be wrong.
            stays = self._stays.get(name)
            if stays and stays[-1][1] == self._newest:
                stays[-1][1] -= 1
                if stays[-1][1] < stays[-1][0]:
                    stays.pop()
        self._stay(self._newest, names)

    def _fill_earlier_rounds(self, names: set[str]) -> None:
        """Find the members of the rounds before the first look: each seal says who came and who was gone."""
        known = []
        for span in reversed(self.rounds):
            if span.run != self.run:
                break
            known.append(names)
            names = (names - set(span.came)) | set(span.gone)
        for back, some in reversed(tuple(enumerate(known))):
            self._stay(self._newest - back, some)

    def _stay(self, index: int, names: set[str]) -> None:
        for name in names:
            stays = self._stays.get(name)
            if stays is None:
                if len(self._stays) >= NAMES_MAX:
                    continue
                stays = self._stays[name] = []
            if stays and stays[-1][1] >= index - 1:
                stays[-1][1] = max(stays[-1][1], index)
            else:
                stays.append([index, index])

    def _drop_oldest_round(self) -> None:
        self.rounds.popleft()
        self._first += 1
        for name, stays in tuple(self._stays.items()):
            while stays and stays[0][1] < self._first:
                stays.pop(0)
            if not stays:
                del self._stays[name]

    # ---- what goes out

    def at_s(self, now: float) -> float:
        """Return the present second of the timeline."""
        return 0.0 if self._origin is None else max(self._at_s, now - self._origin)

    @property
    def is_restarting(self) -> bool:
        return self._broken is not None

    def host_of(self, name: str) -> str:
        return self._host_of.get(name, name)

    def lanes(self) -> tuple[list[Lane], int]:
        """Return the members that the timeline shows, and how many more there are."""
        there = self._names or set()
        blamed = {name for span in self.rounds for name in span.caused_by}

        def is_dull(name: str) -> bool:
            stays = self._stays[name]
            return name not in blamed and len(stays) == 1 and stays[0][0] <= self._first and stays[0][1] == self._newest

        named = sorted((name for name in self._stays if self._stays[name]), key=lambda name: (is_dull(name), name))
        lanes = []
        for name in sorted(named[:LANES_MAX]):
            stays = tuple((max(0, a - self._first), b - self._first) for a, b in self._stays[name])
            lanes.append(Lane(name, self.host_of(name), stays, name in there))
        return lanes, max(0, len(named) - LANES_MAX)

    def blame(self) -> list[HostBlame]:
        """Return the hosts that caused restarts, the worst first."""
        return sorted(self.hosts.values(), key=lambda one: (-one.restarts, -one.lost_s, -one.growths, one.host))

    def lines(self) -> list[Mapping[str, object]]:
        """Return the journal for people, newest first."""
        shown: list[Mapping[str, object]] = []
        for history in histories(self.entries):
            for step in history.steps:
                entry, cause = step.entry, step.entry.cause
                shown.append({
                    "run": history.run, "at_s": step.at.seconds, "exact": step.at.exact, "stamp": entry.stamp,
                    "text": step.text, "by": entry.by, "phase": entry.phase.value, "round": entry.number,
                    "cause": cause.kind.value if cause is not None and entry.phase is not Phase.SEALED else "",
                })  # fmt: skip
        return shown[::-1]


def _phase_key(status: Status | None) -> tuple[int, str] | None:
    return None if status is None else (status.round, status.phase)


def missing(status: Status) -> int:
    """Return how many members more a round needs. 0: there is a round, or a quorum."""
    if status.phase in ("sealed", "closed"):
        return 0
    return max(0, status.min_nodes - status.ready)


def counts(status: Status, states: Sequence[str]) -> dict[str, int]:
    """Return the number of members by state, with 0 for the states that no member is in."""
    found = dict.fromkeys(states, 0)
    for member in status.members:
        found[member.state] = found.get(member.state, 0) + 1
    return found
