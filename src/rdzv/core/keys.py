"""The keys of a run's records."""

# All that the leader must see lies under one prefix, `group/`. One watch on it shows the run in the order of revisions,
# so every view is the run at one revision, on every engine. With several watches a view could mix two moments. Busy or
# large data (the rounds' stores, the journal, the progress of workers) lies beside that prefix, so that it does not wake
# the leader.

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote

from .model import JOURNAL_MAX

ROOT = "rdzv/"


class Keys:
    """The keys of one run."""

    def __init__(self, run_id: str) -> None:
        self.run = f"{ROOT}{_quoted(run_id)}/"
        self.group = self.run + "group/"
        self.settings = self.group + "settings"
        self.head = self.group + "round"
        self.members = self.group + "members/"
        self.ranks = self.group + "ranks/"
        self.asks = self.group + "asks/"
        self.bans = self.group + "ban/"
        self.strikes = self.group + "strikes/"
        self.quarantines = self.group + "quarantine/"
        self.adopt = self.run + "adopt"
        self.progress = self.run + "progress/"
        self.journal = self.run + "journal/"
        self.notes = self.journal + "notes/"

    def member(self, member_id: str) -> str:
        """Return the key of one member's presence."""
        return self.members + member_id

    def progress_of(self, member_id: str) -> str:
        """Return the key that says how far the workers of one member are."""
        return self.progress + member_id

    def table(self, table: str) -> str:
        """Return the prefix of a rank table."""
        return f"{self.ranks}{table}/"

    def entry(self, table: str, member_id: str) -> str:
        """Return the key of a member's entry in a rank table; table '*' means any, as a target to watch."""
        return f"{self.ranks}{table}/{member_id}"

    def ask(self, member_id: str) -> str:
        """Return the key of an operator's request to a member."""
        return self.asks + member_id

    def watched_by(self, member_id: str, stars: bool) -> tuple[str, ...]:
        """Return the targets that a member watches, beside the ends of its own key and of a member that came earlier.

        `stars`: the engine watches entries of any table.
        """
        return self.head, self.ask(member_id), *((self.entry("*", member_id),) if stars else ())

    def ban(self, host: str) -> str:
        """Return the key of an operator's ban of a host."""
        return self.bans + _quoted(host)

    def strikes_of(self, host: str) -> str:
        """Return the prefix of the strikes of a host."""
        return f"{self.strikes}{_quoted(host)}/"

    def strike(self, host: str, table: str) -> str:
        """Return the key of a host's strike for the round of that rank table."""
        return self.strikes_of(host) + table

    def quarantine(self, host: str) -> str:
        """Return the key that keeps a host out for a time."""
        return self.quarantines + _quoted(host)

    def kv(self, table: str) -> str:
        """Return the prefix of a round's store."""
        return f"{self.run}kv/{table}/"

    def journal_entry(self, seq: int) -> str:
        """Return the key of a journal entry, in a ring: the newest overwrites the oldest."""
        return f"{self.journal}{seq % JOURNAL_MAX:03d}"

    def host_of_ban(self, key: str) -> str:
        """Return the host that a ban's key names."""
        return unquote(key[len(self.bans) :])

    def host_of_quarantine(self, key: str) -> str:
        """Return the host that a quarantine's key names."""
        return unquote(key[len(self.quarantines) :])

    def of_strike(self, key: str) -> tuple[str, str]:
        """Return the host and the rank table that a strike's key names."""
        host, _, table = key[len(self.strikes) :].partition("/")
        return unquote(host), table


@lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    """Escape '/' too, so that the name is one part of a key. Cached: quoting is slow, and names are few."""
    return quote(name, safe="")
