"""The output of `rdzv join`: a line per world, change and notice, for people or for programs."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from ..core.member_rules import Change
from ..member.notices import Notice
from ..member.world import AsyncWorld


class Printer:
    """Prints lines to stdout. Each is flushed, because its reader waits for it."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def world(self, world: AsyncWorld) -> None:
        """Print a world, with all fields that a reader needs to compare it with the worlds of other members."""
        fields = {name: getattr(world, name) for name in ("incarnation", "era", "round", "rank", "size", "digest")}
        text = f"round {world.round}: rank {world.rank} of {world.size}, bootstrap {world.bootstrap}"
        self.line({"event": "world", "run": world.run_id, **fields, "bootstrap": str(world.bootstrap)}, text)

    def notice(self, notice: Notice) -> None:
        fields = {"kind": notice.kind, "round": notice.round, "member": notice.member, "reason": notice.reason}
        self.line({"event": "notice", **fields}, f"{notice.kind}: {notice.reason}")

    def changed(self, round: int, change: Change) -> None:
        """Print that the world of that round (0: there was none) is no longer valid."""
        text = f"round {round} is over: {change.reason}" if round else change.reason
        self.line({"event": "changed", "kind": change.kind, "round": round, "reason": change.reason}, text)

    def line(self, fields: dict[str, Any], text: str) -> None:
        """Print the fields as JSON for programs, or the text for people."""
        sys.stdout.write((msgspec.json.encode(fields).decode() if self._as_json else text) + "\n")
        sys.stdout.flush()
