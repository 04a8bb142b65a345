"""One account of a run from the journal files of its agents: each restart, its cause, its cost, and the availability.

Every agent wrote what it was told, with times of its own clock. No two clocks are compared: each duration is the
difference of two times in one file. The files are brought together by the numbers of rounds, and where nodes measured
the same thing, the longest counts. A node that was killed has no end in its file, so the others say how long its last
round ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ..core import causes
from ..core.model import CauseKind
from ..errors import SettingsError
from ..member.journal_file import SUFFIX, VERSION, JournalHeader, JournalLine
from ..member.notices import Notice
from .journal import Duration, Restart

_ENDS = frozenset({"broken", "evicted", "closed", "leaving", "joining"})
"""Kinds of notices that end the round that an agent holds. Any of them may be the first."""
_NO_RECORD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding a line that no agent wrote. One that is nested too deeply raises the last."""
_CAUSES = {kind.value: kind for kind in CauseKind}
_decode_header = msgspec.json.Decoder(JournalHeader).decode
_decode_line = msgspec.json.Decoder(JournalLine).decode


class Stay(msgspec.Struct, frozen=True):
    """One agent in one round."""

    member: str
    round: int
    before: int
    """The round that this agent held before; 0 if none."""
    rank: int
    size: int
    formed_s: float | None
    """Time until the agent was given the round: since it came or, if it held one before, since that ended."""
    ran: Duration


class Incident(msgspec.Struct, frozen=True):
    """Something that happened to one agent, and that no restart of all tells."""

    member: str
    round: int
    text: str


class RoundAccount(msgspec.Struct, frozen=True):
    """One round, as all agents together saw it."""

    number: int
    size: int
    members: tuple[str, ...]
    """Names by rank, of agents whose files are there."""
    formed: Duration
    ran: Duration


class RunAccount(msgspec.Struct, frozen=True):
    """One incarnation of a run id."""

    run_id: str
    incarnation: str
    members: tuple[str, ...]
    rounds: tuple[RoundAccount, ...]
    restarts: tuple[Restart, ...]
    incidents: tuple[Incident, ...]
    end: str
    """Why the run was closed, or that all members of its last round were done; empty if no file says so."""
    succeeded: bool

    @property
    def ran(self) -> Duration:
        """How long all rounds ran together."""
        return _sum(one.ran for one in self.rounds)

    @property
    def cost(self) -> Duration:
        """The cost of all restarts together."""
        return _sum(one.cost for one in self.restarts)

    @property
    def availability(self) -> float | None:
        """The share of the time since the first round, from 0 to 1, in which a round ran; None if none did."""
        whole_s = self.ran.seconds + self.cost.seconds
        return self.ran.seconds / whole_s if whole_s > 0 else None


class AgentJournal(msgspec.Struct, frozen=True):
    """The lines of one agent, in the order of writing."""

    run_id: str
    member: str
    lines: tuple[JournalLine, ...]


def find_files(places: Iterable[str]) -> list[Path]:
    """Return the files, and those in folders. Raises SettingsError if there are none."""
    found: list[Path] = []
    for place in places:
        try:
            path = Path(place).expanduser()
            files = [file for file in (path.rglob(f"*{SUFFIX}*") if path.is_dir() else [path]) if file.is_file()]
        except (OSError, RuntimeError):  # The name is too long, or that of a home that nobody has.
            files = []
        if not files:
            raise SettingsError(f"{place!r} is neither a journal file (*{SUFFIX}) nor a folder with one")
        found += files
    # The older half of a journal that had grown too large comes before the newer one, which says that it is continued.
    return sorted(set(found), key=lambda file: (str(file).removesuffix(".old"), not file.name.endswith(".old")))


def read_files(paths: Iterable[Path]) -> list[AgentJournal]:
    """Read the journals in these files. Lines that are none are left out: a killed agent may have left half of one."""
    journals: list[AgentJournal] = []
    for path in paths:
        header: JournalHeader | None = None
        lines: list[JournalLine] = []
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # Its agent, or a new one, has deleted it since it was found.
            continue
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise SettingsError(f"journal {str(path)!r} cannot be read: {problem}") from None
        for raw in content.splitlines():
            try:
                new = _decode_header(raw)
            except _NO_RECORD:
                line = _line(raw)
                if line is not None and header is not None:
                    lines.append(line)
                continue
            _add(journals, header, lines)
            header, lines = (new if new.rdzv_journal == VERSION else None), []
        _add(journals, header, lines)
    return journals


def _line(raw: bytes) -> JournalLine | None:
    try:
        return _decode_line(raw)
    except _NO_RECORD:
        return None


def _add(journals: list[AgentJournal], header: JournalHeader | None, lines: list[JournalLine]) -> None:
    if header is None or not lines:
        return
    last = journals[-1] if journals else None
    if header.continued and last is not None and (last.run_id, last.member) == (header.run_id, header.member):
        journals[-1] = msgspec.structs.replace(last, lines=(*last.lines, *lines))
    else:
        journals.append(AgentJournal(header.run_id, header.member, tuple(lines)))


def accounts(journals: Iterable[AgentJournal]) -> list[RunAccount]:
    """Merge the journals into one account per incarnation of each run, in the order in which they first appear."""
    parts: dict[tuple[str, str], list[AgentJournal]] = {}
    for journal in journals:
        for incarnation, lines in _lives(journal):
            parts.setdefault((journal.run_id, incarnation), []).append(msgspec.structs.replace(journal, lines=lines))
    return [_account(run_id, incarnation, own) for (run_id, incarnation), own in parts.items()]


def _lives(journal: AgentJournal) -> Iterator[tuple[str, tuple[JournalLine, ...]]]:
    """Split a journal by incarnation. Lines from before the first head belong to the incarnation that follows."""
    current, lines = "", list[JournalLine]()
    for line in journal.lines:
        named = line.notice.incarnation
        if named and current and named != current:
            yield current, tuple(lines)
            lines = []
        current = named or current
        lines.append(line)
    yield current, tuple(lines)


def _account(run_id: str, incarnation: str, journals: list[AgentJournal]) -> RunAccount:
    stays = [stay for journal in journals for stay in _stays(journal)]
    notices = [line.notice for journal in journals for line in journal.lines]
    breaks: dict[int, Notice] = {}
    for notice in notices:
        known = breaks.get(notice.round)
        # The root cause may be found after the round was broken because workers had failed.
        if notice.kind == "broken" and (known is None or known.cause == CauseKind.RESTARTED.value):
            breaks[notice.round] = notice
    closed = next((notice for notice in notices if notice.kind == "closed"), None)
    numbers = sorted({one.round for one in stays})
    rounds = [_round(number, [one for one in stays if one.round == number]) for number in numbers]
    restarts = []
    for this, following in zip(rounds, [*rounds[1:], None], strict=False):
        broken = breaks.get(this.number)
        if following is None and broken is None:
            continue  # The last round ended with the run, or still runs.
        if following is None:
            cost = _longest(_until_end(journal, this.number) for journal in journals)
        else:
            both = (following.number, this.number)
            cost = _longest(one.formed_s for one in stays if (one.round, one.before) == both)
        kind, members, reason = (None, (), "no file says why") if broken is None else (
            _CAUSES.get(broken.cause), broken.members, broken.reason
        )  # fmt: skip
        came, gone = _difference(this, following)
        then = (0, 0) if following is None else (following.number, following.size)
        restarts.append(Restart(this.number, kind, members, reason, "", this.ran, cost, this.size, *then, came, gone))
    return RunAccount(
        run_id, incarnation, tuple(sorted({journal.member for journal in journals})), tuple(rounds), tuple(restarts),
        tuple(_incidents(journals)), *_end(closed, journals, rounds),
    )  # fmt: skip


def _end(closed: Notice | None, journals: list[AgentJournal], rounds: list[RoundAccount]) -> tuple[str, bool]:
    """Return how the run ended, and whether it succeeded."""
    if closed is not None:
        return closed.reason, closed.cause == CauseKind.SUCCESS.value
    if not rounds:
        return "", False
    # Members that are done may leave before the last of them is, and the run is closed without them.
    last, mark = rounds[-1], ("done", rounds[-1].number)
    done = [one for one in journals if any((line.notice.kind, line.notice.round) == mark for line in one.lines)]
    ranks = {stay.rank for journal in done for stay in _stays(journal) if stay.round == last.number}
    return (causes.success(last.size, last.number).text, True) if len(ranks) == last.size else ("", False)


def _stays(journal: AgentJournal) -> Iterator[Stay]:
    """Find the rounds that an agent held."""
    before, given, end = 0, None, 0.0
    for line in journal.lines:
        kind = line.notice.kind
        if given is not None and (kind in _ENDS or kind == "given"):
            yield _stay(given, before, Duration(round(line.at - given.at, 3)))
            before, given = given.notice.round, None
        if kind == "given":
            given = line
        end = line.at
    if given is not None:
        yield _stay(given, before, Duration(round(end - given.at, 3), exact=False))


def _stay(given: JournalLine, before: int, ran: Duration) -> Stay:
    notice = given.notice
    before = before if notice.cause else 0  # An agent that was started anew held nothing, whatever its name did.
    return Stay(notice.member, notice.round, before, notice.rank, notice.size, notice.seconds, ran)


def _round(number: int, stays: list[Stay]) -> RoundAccount:
    known = [one.ran for one in stays if one.ran.exact] or [one.ran for one in stays]
    by_rank = sorted({(one.rank, one.member) for one in stays})
    return RoundAccount(
        number, max(one.size for one in stays), tuple(member for _, member in by_rank),
        _longest(one.formed_s for one in stays), max(known, key=lambda one: one.seconds),
    )  # fmt: skip


def _until_end(journal: AgentJournal, number: int) -> float | None:
    """How long an agent was without a round after this one, until it heard of the run's close or left."""
    broken: JournalLine | None = None
    for line in journal.lines:
        if line.notice.kind == "broken" and line.notice.round == number:
            broken = line
        elif broken is not None and line.notice.kind in ("closed", "leaving"):
            return line.at - broken.at
    return None


def _longest(seconds: Iterable[float | None]) -> Duration:
    known = [one for one in seconds if one is not None]
    return Duration(round(max(known), 3)) if known else Duration(exact=False)


def _difference(this: RoundAccount, following: RoundAccount | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return who came and who is gone; nothing if not all files of both rounds are there."""
    if following is None or len(this.members) < this.size or len(following.members) < following.size:
        return (), ()
    old, new = set(this.members), set(following.members)
    return tuple(sorted(new - old)), tuple(sorted(old - new))


def _incidents(journals: list[AgentJournal]) -> Iterator[Incident]:
    for journal in journals:
        for line in journal.lines:
            notice, lasted = line.notice, line.notice.seconds
            if notice.kind == "engine back":
                known = lasted is not None and lasted >= 1
                text = f"for {lasted:.1f} s" if known else "or restarted, for an unknown time"
                yield Incident(notice.member, notice.round, f"the engine was away {text}")
            elif notice.kind == "evicted":
                yield Incident(notice.member, notice.round, f"evicted: {notice.reason}")


def _sum(durations: Iterable[Duration]) -> Duration:
    parts = list(durations)
    return Duration(round(sum(one.seconds for one in parts), 3), all(one.exact for one in parts))
