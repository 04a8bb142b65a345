"""The benchmarks' figures: what idle members cost the server. `make test` allows three times as much, for fewer members."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rdzv

BENCH = Path(__file__).parent.parent / "bench"


def steady(members, idle_s, folder):
    """Kilobytes per member, and the share of a core that so many idle members take."""
    command = [sys.executable, BENCH / "steady.py", "--members", str(members), "--idle", str(idle_s), "--out", folder]
    environ = {**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent)}
    subprocess.run(command, timeout=280, check=True, env=environ)
    (row,) = json.loads((folder / "steady.json").read_text("utf-8"))["rows"]
    return row["kb_per_member"], row["server_cpu"]


def test_an_idle_member_costs_little(tmp_path):
    each_kb, share = steady(100, 3, tmp_path)
    assert each_kb < 3 * 10
    assert share < 3 * 0.03


@pytest.mark.soak
def test_a_thousand_idle_members_cost_under_3_percent_of_a_core_and_each_under_10_kb(tmp_path):
    each_kb, share = steady(1000, 20, tmp_path)
    assert each_kb < 10
    assert share < 0.03
