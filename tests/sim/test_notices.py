"""Drains that give notice and rounds without progress, among faults of all kinds: every guarantee holds."""

from __future__ import annotations

import pytest

from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Call, CauseKind, Phase
from rdzv.testing.history import Commit
from rdzv.testing.sim import main, simulate

SEEDS = range(60)


def heads(result):
    """All heads that were written, in order."""
    for commit in result.history.of(Commit):
        for event in commit.events:
            if event.key == Keys("sim").head and event.item is not None:
                yield wire.read_head(event.item.value)


@pytest.mark.seeds
def test_notices_are_given_answered_and_ended_and_runs_in_vain_are_closed():
    results = [simulate(seed, noticed=True) for seed in SEEDS]
    assert [f"{result.replay}: {result.wrong[0]}" for result in results if result.wrong] == []
    written = [head for result in results for head in heads(result) if head is not None]
    drained = [head.cause.text for head in written if head.phase is Phase.BROKEN and head.cause.kind is CauseKind.DRAINED]
    assert sum(head.call is Call.NOTICE for head in written) >= 60
    assert sum(text.endswith("; all workers have saved") for text in drained) >= 10
    assert sum("have not saved within" in text for text in drained) >= 3
    assert sum(head.call is Call.NONE and head.notice is not None for head in written) >= 3, "too few remained"
    assert sum(head.phase is Phase.CLOSED and head.cause.kind is CauseKind.FUTILE for head in written) >= 3


def test_the_command_plays_such_runs():
    assert main(["--seed", "0", "--count", "2", "--noticed"]) == 0
    assert "--noticed" in simulate(0, noticed=True).replay


@pytest.mark.soak
@pytest.mark.parametrize("first", range(4_000_000, 4_005_000, 250))
def test_every_guarantee_holds_in_five_thousand_runs_with_notices(first):
    results = [simulate(seed, noticed=True) for seed in range(first, first + 250)]
    assert [f"{result.replay}: {result.wrong[0]}" for result in results if result.wrong] == []
