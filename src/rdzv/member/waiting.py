"""The reports of a join that lasts: what the run waits for, every 30 s, for a member whose log is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..core.status import Status
from ..engines.port import EngineReset
from ..errors import RdzvError
from ..system.node import Node
from ..system.timers import sleep

REPORT_EVERY_S = 30.0  # Rare enough for a log that is kept, often enough that a waiting agent does not look stuck.
SPARE_REPORTS_EVERY = 20
"""A spare may wait for days beside a round that runs well, so it logs only one in this many reports."""
_NAMES_MAX = 8


async def report_waiting(
    node: Node, ask: Callable[[], Awaitable[Status]], limit_s: float, tell: Callable[[str, float], None]
) -> None:
    """Ask for the status again and again, and tell what is waited for and since when. `limit_s`: for a first round."""
    began_at, as_spare = node.now(), 0
    while True:
        await sleep(node, REPORT_EVERY_S)
        try:
            status = await ask()
            waited_s = node.now() - began_at
            text = describe(status, limit_s - waited_s)
            as_spare = as_spare + 1 if status.phase == "sealed" else 0
        except RdzvError as error:
            waited_s, text = node.now() - began_at, error.sentence
        except EngineReset as reset:
            waited_s, text = node.now() - began_at, f"the engine was restarted: {reset}"
        if as_spare == 0 or as_spare % SPARE_REPORTS_EVERY == 1:
            tell(text, waited_s)


def describe(status: Status, left_s: float) -> str:
    """Describe what a run waits for: the count, who is here, lost or late, and what happens if nobody comes."""
    parts = [status.reason.removeprefix(f"{status.phase}: ")]
    for states, word in (
        (("in", "ready", "waiting", "spare", "done"), "here"), (("lost",), "lost"), (("draining",), "about to leave"),
        (("straggling",), "still stopping their workers"),
    ):  # fmt: skip
        names = [member.name for member in status.members if member.state in states]
        if names:
            more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
            parts.append(f"{word}: {', '.join(names[:_NAMES_MAX])}{more}")
    if status.ready < status.min_nodes:
        forever = "a run that had a round is waited for without limit"
        parts.append(forever if status.round else f"gives up in {max(left_s, 0.0):.0f} s (join_timeout)")
    return "; ".join(parts)
