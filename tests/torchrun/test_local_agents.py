"""Torch's local elastic agents over `etcd-v3`, in one process and forked from it, as in torch's own suite of its agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

LIMIT_S = 150.0
EXPECTED: dict[str, Any] = {
    "a_function": {"0": "hello", "1": "hello"},
    "a_function_that_fails": "FAILED",
    "two_agents_reduce": [4.0, 4.0, 4.0, 4.0],
    "two_agents_fail": ["FAILED", "FAILED"],
    # Only the agent whose worker failed has used up one of its restarts.
    "a_failure_restarts_both": [["2", "0"], ["2", "1"]],
    "a_slow_worker": ["0", "1"],
    "ranks_of_unequal_agents": {
        "ranks": [0, 1, 2, 3, 4, 5], "role ranks": [0, 1, 2, 3, 4, 5], "sizes": [["6", "6"]], "workers": [1, 2, 3],
        "groups": [0, 1, 2],
    },
    "the_others_go_on_after_a_kill": {"0": "1"},
    "a_killed_agent_is_replaced": ["2", "2"],
}  # fmt: skip


@pytest.mark.timeout(LIMIT_S + 30)
def test_agents_over_etcd_do_what_torchs_suite_expects(tmp_path):
    """All scenarios run in one process; the first one is repeated at the end."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-m", "support.local_agents"]
    # Each agent makes a folder for logs, and those that are killed cannot remove it: pytest does.
    environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-6000:]
    observed = json.loads(done.stdout)
    assert observed == [[name, EXPECTED[name]] for name in [*EXPECTED, "a_function"]]
