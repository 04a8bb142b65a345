"""Which key holds which record.

All that the leader must see at one revision lies under one prefix, `group/`, so that one watch shows it in order; what is
busy or large (the rounds' stores, the journal) lies beside it.
"""

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
        self.adopt = self.run + "adopt"
        self.journal = self.run + "journal/"

    def member(self, member_id: str) -> str:
        """Presence of one member."""
        return self.members + member_id

    def table(self, table: str) -> str:
        """Prefix of a rank table."""
        return f"{self.ranks}{table}/"

    def entry(self, table: str, member_id: str) -> str:
        """A member's line in a rank table; of table '*': in any, as a target to watch."""
        return f"{self.ranks}{table}/{member_id}"

    def ask(self, member_id: str) -> str:
        """An operator's request to a member."""
        return self.asks + member_id

    def ban(self, host: str) -> str:
        """An operator's ban of a host."""
        return self.bans + _quoted(host)

    def kv(self, table: str) -> str:
        """Prefix of a round's store."""
        return f"{self.run}kv/{table}/"

    def journal_entry(self, seq: int) -> str:
        """A ring: the newest entry overwrites the oldest, so nothing needs to be deleted."""
        return f"{self.journal}{seq % JOURNAL_MAX:03d}"

    def host_of_ban(self, key: str) -> str:
        """The host that a ban's key names."""
        return unquote(key[len(self.bans) :])


@lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    """Without '/', so that it is one part of a key. It takes longer than all else here, and the names of a run are few."""
    return quote(name, safe="")
