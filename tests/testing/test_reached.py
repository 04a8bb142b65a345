"""The report of what seeds have reached."""

from __future__ import annotations

import pytest

from rdzv.core.model import NO_ROUND
from rdzv.testing.decisions import MOMENTS, Decided, Moment
from rdzv.testing.history import Changed, ClosedTold, EvictedTold, Fault, History
from rdzv.testing.reached import AFTER_S, IMPOSSIBLE, KINDS, NO_FAULT, POSSIBLE, Reached
from rdzv.testing.scenario import FAULTS
from rdzv.testing.virtual_loop import VirtualLoop

SEAL = Moment("seal", "open")


def history(*faults: tuple[float, str, bool]) -> History:
    found = History(VirtualLoop())
    found.extend(Fault(at=at, kind=kind, target="m0", stop=stop) for at, kind, stop in faults)
    return found


def reached(at: float, *faults: tuple[float, str, bool]) -> list[str]:
    """The faults that count for a decision at that time."""
    found = Reached()
    found.see(history(*faults), [Decided(at, "m0", SEAL)])
    return [kind for moment, kind in found.counts if moment == SEAL]


CRASH = [(10.0, "crash", False), (12.0, "crash", True)]


@pytest.mark.parametrize(
    ("at", "kind"),
    [
        (9.9, NO_FAULT),
        (10.0, "crash"),
        (12.0, "crash"),
        (12.0 + AFTER_S, "crash"),
        (12.1 + AFTER_S, NO_FAULT),
    ],
)
def test_a_fault_counts_while_it_is_active_and_a_while_after(at, kind):
    assert reached(at, *CRASH) == [kind]


def test_the_fault_that_struck_last_counts():
    faults = [*CRASH, (11.0, "cut", False)]
    assert reached(10.5, *faults) == ["crash"]
    assert reached(11.0, *faults) == ["cut"]
    assert reached(500.0, *faults) == ["cut"], "it never healed"


def test_parts_of_a_scenario_are_no_faults():
    assert reached(11.0, (10.0, "calm", False), (10.5, "moved", False)) == [NO_FAULT]


def test_a_seed_counts_once_per_triple():
    found = Reached()
    found.see(history(), [Decided(at, "m0", SEAL) for at in (1.0, 2.0)])
    found.see(history(), [Decided(3.0, "m1", SEAL)])
    assert (found.seeds, dict(found.counts)) == (2, {(SEAL, NO_FAULT): 2})


def test_words_to_members_are_counted_too():
    seen = history(*CRASH)
    seen += [
        Changed(at=11.0, round=NO_ROUND, kind="round", reason="lost"),
        EvictedTold(at=11.0, member="m", reason="late"),
        ClosedTold(at=30.0, member="m", reason="done"),
    ]
    found = Reached()
    found.see(seen, [])
    assert set(found.counts) == {
        (Moment("told", "round"), "crash"), (Moment("told", "evicted"), "crash"), (Moment("told", "closed"), NO_FAULT)
    }  # fmt: skip


def test_the_counts_of_processes_are_added_and_kept_in_a_file():
    one, other = Reached(), Reached()
    one.see(history(), [Decided(1.0, "m0", SEAL)])
    other.see(history(*CRASH), [Decided(11.0, "m0", SEAL), Decided(30.0, "m0", SEAL)])
    one.merge(other)
    assert one.seeds == 2
    assert +one.counts == {(SEAL, NO_FAULT): 2, (SEAL, "crash"): 1}
    again = Reached.decode(one.encode())
    assert (again.seeds, +again.counts) == (one.seeds, +one.counts)


def test_the_table_shows_every_rule_what_is_missing_and_what_cannot_be():
    found = Reached()
    found.see(history(*CRASH), [Decided(11.0, "m0", SEAL)])
    lines = str(found).splitlines()
    rows = {line.partition("  ")[0]: line for line in lines}
    assert all(str(moment) in rows for moment in MOMENTS)
    numbers = rows["seal, open"].split()[2:]
    assert dict(zip(KINDS, numbers, strict=True)) == {kind: "1" if kind == "crash" else "." for kind in KINDS}
    assert "impossible: no round was sealed" in rows["evict_stragglers, open"]
    assert lines[-1].startswith(f"1 seeds reached 1 of {len(POSSIBLE)} triples")


def test_all_triples_are_possible_but_those_with_a_reason():
    assert set(IMPOSSIBLE) < set(MOMENTS)
    assert len(POSSIBLE) == (len(MOMENTS) - len(IMPOSSIBLE)) * (len(FAULTS) + 1)
