"""The benchmarks' figures: what idle members cost the server. `make test` allows three times as much, for fewer members."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rdzv

BENCH = Path(__file__).parent.parent / "bench"


def steady(low, high, idle_s):
    """Kilobytes per member, and the share of a core that `low` idle members take."""
    command = [sys.executable, str(BENCH / "steady.py"), "--members", str(low), str(high), "--idle", str(idle_s)]
    environ = {**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent)}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, env=environ).stdout
    share, each = re.search(r"([\d.]+)% of one core", shown), re.search(r"members: (-?[\d.]+) KB each", shown)
    assert share, shown
    assert each, shown
    return float(each[1]), float(share[1]) / 100


def test_an_idle_member_costs_little():
    each_kb, share = steady(100, 500, 3)
    assert each_kb < 3 * 10
    assert share < 3 * 0.03


@pytest.mark.soak
def test_a_thousand_idle_members_cost_under_3_percent_of_a_core_and_each_under_10_kb():
    each_kb, share = steady(1000, 3000, 20)
    assert each_kb < 10
    assert share < 0.03
