"""A notice that all ranks get in the same step, so that they save one state."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .. import worker
from .group import device

OWN_S = 5.0
"""How long a rank waits for the notice that another rank has got already: it is on its way."""


def notice() -> worker.EndNotice | None:
    """Return the notice that the round will end, on all ranks in the same step; None: no rank has one.

    A collective of the default group, over one number: every rank calls it in every step, or in every tenth. When it
    returns a notice, save, and call `rdzv.worker.saved()`.
    """
    own = worker.notice()
    left_s = torch.tensor([-1.0 if own is None else own.seconds], device=device())
    dist.all_reduce(left_s, op=dist.ReduceOp.MAX)
    seconds = float(left_s)
    if seconds < 0:
        return None
    deadline = time.monotonic() + OWN_S
    while own is None and time.monotonic() < deadline:
        time.sleep(0.01)
        own = worker.notice()
    return own or worker.EndNotice("another rank was told that the round will end", seconds)
