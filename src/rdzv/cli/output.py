"""What a member's command prints: a line per world, change and notice, for people or for programs."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from ..core.member_rules import Change
from ..member.notices import Notice
from ..member.world import AsyncWorld


class Printer:
    """Lines on stdout, flushed one by one, because whoever reads them waits for them."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def world(self, world: AsyncWorld) -> None:
        """We were given a world, with all that is needed to see that others were given the same."""
        fields = {
            "run": world.run_id,
            "incarnation": world.incarnation,
            "era": world.era,
            "round": world.round,
            "rank": world.rank,
            "size": world.size,
            "bootstrap": str(world.bootstrap),
            "digest": world.digest,
        }
        self._line("world", fields, f"round {world.round}: rank {world.rank} of {world.size}, bootstrap {world.bootstrap}")

    def notice(self, notice: Notice) -> None:
        """Something happened."""
        fields = {"kind": notice.kind, "round": notice.round, "member": notice.member, "reason": notice.reason}
        self._line("notice", fields, f"{notice.kind}: {notice.reason}")

    def changed(self, round: int, change: Change) -> None:
        """The world we hold, of that round (0: we hold none), no longer stands."""
        text = f"round {round} is over: {change.reason}" if round else change.reason
        self._line("changed", {"kind": change.kind, "round": round, "reason": change.reason}, text)

    def _line(self, event: str, fields: dict[str, Any], text: str) -> None:
        line = msgspec.json.encode({"event": event, **fields}).decode() if self._as_json else text
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
