"""The import of gRPC, and the variable that decides about its fork handlers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

PROGRAM = """
import importlib.abc, os, sys

class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

sys.meta_path.insert(0, Look())
import rdzv.engines.etcd.client.client
print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
"""


@pytest.mark.parametrize(("chosen", "seen"), [({}, "0\nNone\n"), ({"GRPC_ENABLE_FORK_SUPPORT": "1"}, "1\n1\n")])
def test_grpc_is_imported_without_its_fork_handlers_unless_the_user_wants_them(chosen, seen):
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**environment, **chosen}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == seen
