"""The log of a member: one line per notice, under the logger `rdzv`.

A library does not configure logging, so a program's own settings decide about these lines. A launcher (torchrun's
agent, `rdzv run`) has nobody else to do it: it calls `set_up`, and its lines look like those of torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..printable import clean, shown
from .notices import Notice
from .sentences import LOUD, level_of, sentence

logger = logging.getLogger("rdzv")

LEVEL_ENV = "RDZV_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "off": logging.CRITICAL + 1}


def is_logged(kind: str) -> bool:
    """Whether a notice of this kind may be logged."""
    return logger.isEnabledFor(logging.WARNING if kind in LOUD else logging.INFO)


class Log:
    """Writes notices to the logger `rdzv`, with the fields of the notice as `extra`."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, notice: Notice) -> None:
        """Log a notice, unless its line is the same as the one before."""
        level = level_of(notice)
        if not logger.isEnabledFor(level):
            return
        line = sentence(notice)
        if line == self._said:
            return
        self._said = line
        fields = {f"rdzv_{name}": getattr(notice, name) for name in Notice.__struct_fields__}
        logger.log(level, "[%s] %s", shown(notice.run_id), line, extra=fields)


@contextmanager
def taken_over() -> Iterator[None]:
    """Let no other handler show the log, and give the logger back at the end, as a test that calls a command needs it."""
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.propagate, logger.handlers[:] = False, []
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(level)


@contextmanager
def leaves_without_reason() -> Iterator[None]:
    """Log a leave without its reason, for a command that shows the reason as its error."""

    def shorten(record: logging.LogRecord) -> bool:
        if getattr(record, "rdzv_kind", "") == "leaving" and isinstance(record.args, tuple):
            run_id, line = record.args
            record.args = run_id, str(line).removesuffix(f": {clean(record.rdzv_reason)}")  # type: ignore[attr-defined]
        return True

    logger.filters.insert(0, shorten)  # Before those that print the line.
    try:
        yield
    finally:
        logger.filters.remove(shorten)


class TorchFormatter(logging.Formatter):
    """Formats lines as torch does: level, date, time, process, and the logger where torch names a source file."""

    def __init__(self) -> None:
        super().__init__("%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s] %(message)s", "%m%d %H:%M:%S")


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever `sys.stderr` is now, and keeps silent once the program has configured logging itself."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(TorchFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless the root logger writes it."""
        if logger.propagate and logging.getLogger().handlers:
            return
        self.stream = sys.stderr
        super().emit(record)


def set_up(environ: Mapping[str, str] = os.environ) -> None:
    """Show the log of this process on stderr, from the level that RDZV_LOG names on (info).

    A program that has configured logging itself keeps its own way: only the variable changes the level then.
    """
    given = environ.get(LEVEL_ENV, "").strip().lower()
    unset = not (logger.propagate and logging.getLogger().handlers)
    if given in LEVELS or unset:
        logger.setLevel(LEVELS.get(given, logging.INFO))
    if unset and not any(isinstance(one, StderrHandler) for one in logger.handlers):
        logger.addHandler(StderrHandler())
    if given and given not in LEVELS:
        allowed = ", ".join(LEVELS)
        logger.warning("%s is %r: it must be one of %s; it counts as info", LEVEL_ENV, shown(given, 60), allowed)
