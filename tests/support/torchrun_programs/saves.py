"""A worker that saves when it hears that its round will end, answers, and goes on until it is stopped.

It prints when it begins, is told and has saved. SIGTERM ends it at once, as it ends any program that does not handle it.
"""

from __future__ import annotations

import os
import signal
import time

from rdzv import worker

SAVE_S = 1.0
WHO = f"round {os.environ['RDZV_ROUND']}: rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def say(text: str) -> None:
    print(f"{WHO} {text}", flush=True)  # noqa: T201


def main() -> None:
    signal.alarm(3600)  # No test lasts an hour: without this it would go on for ever if the test is killed.
    step = 0
    say("trains")
    while True:
        time.sleep(0.1)
        step += 1
        worker.progress(step)
        notice = worker.notice()
        if notice is not None:
            say(f"is told: {notice.reason}, {notice.seconds:.0f} s")
            time.sleep(SAVE_S)
            say("has saved")
            worker.saved()


if __name__ == "__main__":
    main()
