"""The import of gRPC, without its own handlers of forks.

These handlers start gRPC's threads again in a forked child. If a thread of the parent was inside gRPC at the fork, their
preparation is skipped, and the new threads crash (grpcio 1.85.1: 6 to 9 of 60 children). A child needs no handlers, because
it uses gRPC in a helper process only (`relay`).
"""

from __future__ import annotations

import os

HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"


def import_grpc() -> None:
    """Import gRPC without its fork handlers, unless the user has asked for them.

    gRPC reads the variable at its import. It is removed again, so that programs started by this one decide for themselves.
    """
    is_chosen = HANDLERS in os.environ
    os.environ.setdefault(HANDLERS, "0")
    try:
        import grpc.aio  # noqa: F401, PLC0415
    finally:
        if not is_chosen:
            del os.environ[HANDLERS]
