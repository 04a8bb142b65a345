"""A worker of `rdzv run --stay`: all-reduces with a state that counts, and lines of JSON about it.

`python staying_worker.py FILE`. The work is done once FILE exists, at a step that all workers agree on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn

import rdzv.torch
from rdzv import worker

DONE = 1000.0
"""What a worker adds that wants to end."""


def say(event: str, **fields: object) -> None:
    facts = {"event": event, "at": time.monotonic(), "pid": os.getpid(), "node": os.environ.get("TEST_NODE", ""), **fields}
    os.write(1, (json.dumps(facts) + "\n").encode())


def main(file: Path) -> None:
    signal.alarm(3600)  # No test lasts an hour: without this it would go on for ever if the test is killed.
    local = int(os.environ.get("LOCAL_RANK", "0"))
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    model = nn.Linear(4, 4)
    state = rdzv.torch.ReplicaState(model=model)
    say("begins", local=local, life=life)
    value = torch.ones(1)
    for world in rdzv.torch.rounds(form_s=5.0):
        with world:
            state.sync(world)
            weights = model.weight.sum().item()
            place = {"round": world.round, "rank": world.rank, "size": world.size, "reason": world.reason}
            environ = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "RDZV_ROUND")]
            say("world", **place, step=state.step, weights=weights, environ=environ)
            first = True
            while value < DONE:
                world.check()
                dist.all_reduce(value.fill_(DONE if file.exists() else 1.0))
                state.step += 1
                worker.progress(state.step)
                if os.environ.get("TEST_SAVES") and rdzv.torch.notice():
                    say("saved", round=world.round, step=state.step)
                    worker.saved()
                if first:
                    say("step", round=world.round, size=int(value), step=state.step)
                first = False
                time.sleep(0.01)
    say("end", step=state.step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
