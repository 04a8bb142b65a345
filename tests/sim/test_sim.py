"""The simulator itself: it repeats a run exactly, reports what is wrong, and its clocks are independent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rdzv.operate import commands
from rdzv.testing import nodes
from rdzv.testing.history import Commit
from rdzv.testing.sim import main, simulate
from support.planted_bugs import planted


@pytest.mark.parametrize("seed", [1, 7, 42, 19])
def test_a_seed_is_repeated_exactly(seed, monkeypatch):
    """An operator closes the run in the last one: the journal must not show the wall clock."""
    first = simulate(seed).history.digest()
    monkeypatch.setattr(commands, "stamp", lambda: "another time")
    assert simulate(seed).history.digest() == first


def test_a_seed_is_repeated_in_another_process():
    """The order of sets, which differs between processes, has no effect."""
    digests = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "rdzv.testing.sim", "--seed", "11"]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
        digests.add(done.stdout)
    assert len(digests) == 1
    assert "every guarantee held" in digests.pop()


@pytest.mark.parametrize("seed", range(20, 30))
def test_g10_clocks_of_other_machines_do_not_matter(seed, monkeypatch):
    """The same happens if all clocks are shifted by other amounts.

    Hours apart, not billions of seconds as elsewhere: clocks so large round by a microsecond, each in its own way, so two
    timers of one instant may change places.
    """

    def story(offsets_s):
        monkeypatch.setattr(nodes, "OFFSETS_S", offsets_s)
        return [keys(one) for one in simulate(seed).history if isinstance(one, Commit)]

    assert story((1e3, 9e3)) == story((5e3, 5e3 + 1.0))


def keys(commit):
    """The writer and keys of each commit. Times differ in the last digits: clocks with other offsets round differently."""
    return round(commit.at, 3), commit.actor, tuple(event.key for event in commit.events)


def test_the_command_says_that_all_is_well(capsys):
    assert main(["--seed", "3"]) == 0
    assert "seed 3: every guarantee held" in capsys.readouterr().out


def test_the_command_shows_what_is_wrong_and_how_to_see_it_again(capsys):
    with planted("seals below quorum"):
        assert main(["--seed", "7", "--members", "4", "--verbose"]) == 1
    shown = capsys.readouterr().out
    assert "replay: python -m rdzv.testing.sim --seed 7 --members 4 --verbose" in shown
    assert "G2 ranks" in shown


def test_several_seeds_are_counted(capsys):
    assert main(["--seed", "0", "--count", "3"]) == 0
    assert "3 of 3 seeds held" in capsys.readouterr().out
