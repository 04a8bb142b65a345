"""How an agent of torch ends: the reason that the other members are told, and which exception ends it cleanly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError

_NO_MESSAGE = "To enable traceback"
"""The beginning of torch's text for a worker that left no message."""


def failure_reason(error: BaseException | None, outer: BaseException | None) -> str:
    """Return one line about the first worker that failed, or "" if this agent has not failed.

    `error` is the exception that the interpreter handles while the agent leaves. `outer` was already being handled when the
    handler was made: it belongs to the caller, who may run all this in an `except` block of its own, and does not count. A
    rendezvous error does not count either, because then the work on this node has not failed.
    """
    if error is None or error is outer or isinstance(error, (RendezvousError, SystemExit, KeyboardInterrupt)):
        return ""
    if not isinstance(error, ChildFailedError):
        return f"{type(error).__name__}: {error}"
    rank, first = error.get_first_failure()
    how = f"exit code {first.exitcode}" if first.exitcode >= 0 else f"killed by {first.signal_name()}"
    # torch's error file holds a text, or a record with a text in it.
    message = first.message.get("message", "") if isinstance(first.message, dict) else first.message
    text = str(message).strip()
    text = "" if text.startswith(_NO_MESSAGE) else text.partition("\n")[0]
    return f"rank {rank} failed: {how}{f': {text}' if text else ''}"


def torch_handles_graceful_exit() -> bool:
    """Try whether this torch survives its own RendezvousGracefulExitError.

    Up to 2.13 at least, it does not: `SimpleElasticAgent.run` returns None, and the launcher reads the result of that. No
    version number tells when this changes. False also means that the trial itself failed.
    """

    def refuse(role: str) -> NoReturn:  # noqa: ARG001
        raise RendezvousGracefulExitError("a trial")

    agent = SimpleNamespace(_invoke_run=refuse, _shutdown=lambda **_: None, _shutdown_timeout=0, _total_execution_time=0)
    try:
        return SimpleElasticAgent.run(agent) is not None
    except Exception:  # noqa: BLE001
        return False
