"""How an agent's end is told to the others: in one line, with the first worker that failed."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

_NO_TEXT = "To enable traceback"
"""How torch's text begins when a worker has left none."""


def failure(error: BaseException | None, outer: BaseException | None) -> str:
    """Why we gave up, or nothing if we did not.

    `error` is what the interpreter is handling as we leave. It may be another's: the caller of all this may stand in an
    `except` block of its own, so what was there before (`outer`) does not count. Neither does what a rendezvous said: then our
    work has not failed here.
    """
    if error is None or error is outer or isinstance(error, (RendezvousError, SystemExit, KeyboardInterrupt)):
        return ""
    if not isinstance(error, ChildFailedError):
        return f"{type(error).__name__}: {error}"
    rank, first = error.get_first_failure()
    how = f"exit code {first.exitcode}" if first.exitcode >= 0 else f"killed by {first.signal_name()}"
    text = _first_line(first.message)
    return f"rank {rank} failed: {how}{f': {text}' if text else ''}"


def _first_line(message: object) -> str:
    """What the worker said, from torch's error file: a text, or a record with one in it."""
    if isinstance(message, dict):
        message = message.get("message", "")
    text = str(message).strip()
    return "" if text.startswith(_NO_TEXT) else text.partition("\n")[0]
