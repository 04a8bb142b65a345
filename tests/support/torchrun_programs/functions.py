"""Programs that call torch's launcher as a library, with a function as the worker."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from worker import order, say


def config(**more: object) -> LaunchConfig:
    """Return what torchrun makes of the job's arguments."""
    given = dict(word.removeprefix("--").split("=", 1) for word in json.loads(os.environ["JOB_ARGV"])[:-1])
    low, _, high = given["nnodes"].partition(":")
    conf = given.get("rdzv-conf", "")
    return LaunchConfig(
        min_nodes=int(low),
        max_nodes=int(high or low),
        nproc_per_node=1,
        run_id=given["rdzv-id"],
        rdzv_backend=given["rdzv-backend"],
        rdzv_endpoint=given["rdzv-endpoint"],
        rdzv_configs=dict(word.split("=", 1) for word in conf.split(",") if word),
        max_restarts=int(given["max-restarts"]),
        monitor_interval=0.1,
        **more,
    )


def rank() -> int:
    """Return the worker's rank, for the launcher's result."""
    say("ran", round=os.environ["RDZV_ROUND"])
    return int(os.environ["RANK"])


def store() -> TCPStore:
    """Return the store at the bootstrap address, as `env://` makes it."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=40))


def meeting() -> None:
    """Write the round on node a, from the second one on late; read it on node b at once."""
    signal.alarm(3600)  # No test lasts an hour: without this it would go on for ever if the test is killed.
    bootstrap, number = store(), os.environ["RDZV_ROUND"]
    if os.environ["JOB_NODE"] == "a":
        time.sleep(1.5 if number != "1" else 0)
        bootstrap.set("round", number)
    else:
        say("met", value=bootstrap.get("round").decode())
    while (text := order()) is None:
        time.sleep(0.05)
    raise SystemExit(int(text))


def meet() -> None:
    elastic_launch(config(start_method="fork"), meeting)()


def launch_forked() -> None:
    _launch("fork")


def launch_spawned() -> None:
    _launch("spawn")


def _launch(method: str) -> None:
    say("result", ranks=elastic_launch(config(start_method=method), rank)())


def launch_after_a_failure() -> None:
    """Launch in an `except` block, as code that tries again does."""
    try:
        int("the first attempt")
    except ValueError:
        _launch("fork")
