"""A worker that trains nothing: it writes an event with its rank, and ends when the test tells it to.

It imports torch only to use collectives: the import costs more than everything else in a test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER, NODE, MODE = Path(os.environ["JOB_DIR"]), os.environ["JOB_NODE"], os.environ["JOB_MODE"]


def say(event: str, **fields: object) -> None:
    # A test that shifts the clock still needs the true time in its rows.
    at = float(Path("/proc/uptime").read_text().split()[0]) if "FAKETIME" in os.environ else time.monotonic()
    row = {"at": at, "node": NODE, "event": event, "pid": os.getpid(), **fields}
    with (FOLDER / f"{NODE}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def order() -> str | None:
    """Return the exit code that the test orders: of this node, once, or of all nodes, for ever."""
    try:
        own = FOLDER / f"{NODE}.order"
        text = own.read_text()
        own.unlink()
    except FileNotFoundError:
        try:
            text = (FOLDER / "all.order").read_text()
        except FileNotFoundError:
            return None
    return text


def stopped(*_: object) -> None:
    say("stop")
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    signal.alarm(3600)  # No test lasts an hour: without this it would go on for ever if the test is killed.
    if "ignores SIGTERM" in MODE:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist = None
    if "collectives" in MODE:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(4)
    if "ignores SIGTERM" not in MODE:  # Not before: the handler does not run while torch waits for the other workers.
        signal.signal(signal.SIGTERM, stopped)
    env = os.environ
    say(
        "start",
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        master=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        round=int(env.get("RDZV_ROUND", "0")),
        reason=env.get("RDZV_REASON", ""),
        run_id=env.get("RDZV_RUN_ID", ""),
        clock=time.time(),
    )
    while True:
        if dist is not None:
            dist.all_reduce(tensor)
            tensor /= int(env["WORLD_SIZE"])
        text = order()
        if text is not None:
            say("order", text=text)
            sys.exit(int(text))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
