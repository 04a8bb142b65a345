"""Telling the loss of a peer from a defect of the program. Pure.

The type of an error does not tell: gloo raises a plain RuntimeError, and a program that gives a collective a wrong size
aborts one process while its peers see "Connection reset". So there are two rules. An error that a lost peer can cause
leads to the next round; any other is the program's own. And rounds in a row that fail before one step was completed are
no bad luck.
"""

from __future__ import annotations

from ..errors import RoundOver, StoreTimeout, Unreachable

_GLOO = (
    "gloo/transport/", "gloo/rendezvous/", "Gloo connectFullMesh failed", "Connection closed by peer",
    "Connection reset by peer",
)  # fmt: skip
"""Parts of the texts that gloo's errors have when a connection ends, is aborted or is too slow."""
_TORCH = "DistError"
"""The base class of torch's errors of stores and of NCCL, by name: this module needs no torch."""


def is_loss(error: BaseException | None) -> bool:
    """Whether a lost peer or the end of the round may be the cause of this error, or of the one that it was raised from."""
    while error is not None:
        if isinstance(error, (RoundOver, StoreTimeout, Unreachable)):
            return True
        if any(kind.__name__ == _TORCH for kind in type(error).__mro__):
            return True
        if type(error) is RuntimeError and any(text in str(error) for text in _GLOO):
            return True
        error = error.__cause__
    return False


def one_line(error: BaseException) -> str:
    """The type and the first line of an error, for people."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Failures:
    """Counts the rounds in a row that failed before one step was completed.

    The members of these rounds may differ: a process that aborts is started again by its batch system, so that a defect
    comes with another world each time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._first = ""

    def progressed(self) -> None:
        """Note a completed step."""
        self._count = 0

    def failed(self, reason: str) -> str:
        """Note a round that failed without a step. Return why the run should be closed; empty: it should go on."""
        if not self._count:
            self._first = reason
        self._count += 1
        if self._count < self._limit:
            return ""
        return f"{self._count} rounds in a row failed before a step was completed; the first: {self._first}"
