"""The gate: a member takes part only if the check of its node passes (T4.6).

The check is a command of the member's own settings. It runs before each put that says ready, and again, less and less often,
while it fails. Meanwhile the member is present and says that it is unhealthy, so the others see why and go on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..config.settings import Settings
from ..core.text import clip
from ..system.node import Node
from ..system.timers import Timer, backoff_s

logger = logging.getLogger("rdzv.gate")

CHECKING = "its check has not ended yet"
AGAIN_S = (5.0, 300.0)
"""First and longest pause before a check that failed is tried again."""


class Gate:
    """The check of one member's node, and what came of it last."""

    def __init__(self, settings: Settings, node: Node, again: Callable[[], None]) -> None:
        """`again`: called when it is time to try again."""
        self._command = settings.check
        self._timeout_s = settings.check_timeout
        self._node = node
        self._again = again
        self._failures = 0
        self._timer: Timer | None = None
        self._kept_out = ""
        """Why the caller keeps this member out."""
        self.problem = ""
        """Why this member must not take part; empty: it may."""

    def begin(self) -> None:
        """A join begins: what the check said before does not count any more."""
        self.stop()
        self.problem = self._kept_out or (CHECKING if self._command else "")

    def keep_out(self, reason: str) -> None:
        """Keep the member out for as long as the reason is not empty, and check the node only then."""
        changed, self._kept_out = reason != self._kept_out, reason
        if changed and not reason:
            self._again()

    async def judge(self) -> str:
        """Run the check, if there is one and nothing else keeps the member out, and return the problem."""
        if self._kept_out or not self._command:
            self.problem = self._kept_out
            return self.problem
        self.stop()
        problem = clip(await self._node.check(self._command, self._timeout_s))
        if problem:
            pause_s = backoff_s(self._failures, AGAIN_S, self._node.jitter())
            self._failures += 1
            self._timer = self._node.call_later(pause_s, self._again)
            if problem != self.problem:
                logger.warning("this node does not take part: %s; it is checked again in %.0f s", problem, pause_s)
        else:
            self._failures = 0
        self.problem = problem
        return problem

    def stop(self) -> None:
        """Do not try again by itself."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
