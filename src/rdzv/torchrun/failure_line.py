"""An error of ours that ends torchrun is shown as one line of the log.

Python shows an uncaught error with a traceback through torchrun, torch's agent and rdzv: 30 lines before the one that
says what to do. Nobody looks for a bug in there, because the error is not one: a node is missing, or a setting is wrong.
Other errors are shown as ever, and so are ours with RDZV_LOG=debug or off, and in programs that are not torchrun.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from torch.distributed.elastic.rendezvous import RendezvousError

from ..errors import RdzvError
from ..member import log
from .events import is_torchrun

_previous = sys.excepthook


def install() -> None:
    """Show such errors as one line, if this process is torchrun."""
    global _previous
    if is_torchrun(sys.argv) and sys.excepthook is not _show:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.set_up()  # A wrong setting is found before there is a handler.
    # `torch_error` makes one of torch's errors of ours, and hides ours from the traceback.
    ours = error.__context__ if isinstance(error, RendezvousError) and error.__suppress_context__ else error
    if isinstance(ours, RdzvError) and logging.DEBUG < log.logger.getEffectiveLevel() <= logging.ERROR:
        log.logger.error("%s", ours)
    else:
        _previous(kind, error, trace)
