"""Walk every interleaving of small worlds, and check every guarantee in each state: `python -m rdzv.testing.explore`.

The walk is depth first. Where there are several choices the process forks, and each child goes on with one of them. So
the operating system keeps a state, with all its suspended coroutines, until all choices in it have been walked. States are
compared by their fingerprints, in memory that all these processes share. A state that was met before is not walked again,
except by choices that it did not offer then.

The guarantees are checked after every choice, and *progress* at the end: from every state some way without further faults
must lead to a world at rest. A violation is shown as a story, which `--replay` tells again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import mmap
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .checkers import SAFETY_CHECKERS
from .choices import FAULTS, TARGETS, VERBS, Choice
from .fingerprint import PORT
from .notice_checkers import T7Notices, T11Futile
from .progress_checkers import G5Progress, G6Notice, G7Cause, T8Evictions, T17Quarantine
from .small_world import SmallWorld, WorldPlan

CHECKERS = (*SAFETY_CHECKERS, G5Progress, G6Notice, G7Cause, T7Notices, T8Evictions, T11Futile, T17Quarantine)
STATES_MAX = 1 << 21
CHOICES_MAX = 1 << 23
WRONG_MAX = 20
"""Violations that are kept."""
START, REST = 0, 1
"""Two states that have no fingerprint."""
_STATES, _EDGES, _PATHS, _DEPTH, _STOP, _WRONG = range(6)

_CRASHES = ("crash", "crash late")
_MESSAGES = ("lose request", "lose answer", "hold")
_PAUSES = ("pause", "stall")
_ALL = (*_CRASHES, *_MESSAGES, *_PAUSES, "expire", "restart", "gap", "newcomer")
_DEEDS = ("fail", "leave", "done", "close", "drain", "give up")

WORLDS = {
    plan.name: plan
    for plan in (
        WorldPlan("two form", 2, _ALL, 1),
        WorldPlan("two form on etcd", 2, _ALL, 1, stars=False),
        WorldPlan("two re-form", 2, _ALL, 2, formed=True),
        WorldPlan("three form", 3, _ALL, 1, chooses_reads=False),
        WorldPlan("three re-form", 3, _ALL, 1, formed=True, chooses_reads=False),
        *(
            WorldPlan(f"three re-form: {name}", 3, faults, 2, formed=True, chooses_reads=False)
            for name, faults in {
                "losses": (*_CRASHES, "expire"),
                "messages": (*_MESSAGES, "crash"),
                "pauses": (*_PAUSES, "crash"),
                "engine": ("restart", "gap", "crash", "hold"),
                "growth": ("newcomer", "crash", "expire"),
                "ends": (*_DEEDS, "crash"),
            }.items()
        ),
        # With those above, each fault of `_ALL` meets each.
        *(
            WorldPlan(f"three re-form: {name}", 3, (*one, *other), 2, one, formed=True, chooses_reads=False)
            for name, one, other in (
                ("messages and losses", _MESSAGES, ("crash late", "expire", "newcomer")),
                ("messages and pauses", _MESSAGES, _PAUSES),
                ("engine and losses", ("restart", "gap"), ("lose request", "lose answer", "crash late", "expire", "newcomer")),
                ("engine and pauses", ("restart", "gap"), _PAUSES),
                ("losses and pauses", ("crash late", "expire"), _PAUSES),
                ("growth and pauses", ("newcomer",), (*_PAUSES, "crash late")),
            )
        ),
        WorldPlan(
            "three form: last call", 3, (*_CRASHES, "expire"), 1, chooses_reads=False,
            # Part of a last call is over when a new engine has its first head. With a fourth place this one is waited out.
            options={"last_call": 5.0, "max_nodes": 4},
        ),
        WorldPlan(
            "three re-form: racks", 3, ("newcomer", "crash"), 2, formed=True, chooses_reads=False,
            options={"segment": 2, "max_nodes": 4}, racks=("a", "b", "a", "b"),
        ),
        WorldPlan(
            "three re-form: same ports", 3, ("crash", "respawn"), 2, formed=True, chooses_reads=False,
            options={"bootstrap_port": f"{PORT}-{PORT + 3}"},
        ),
        WorldPlan(
            "two re-form: slow stops", 2, ("fail", "reset", "crash"), 2, formed=True, stop_s=2.0,
            options={"min_nodes": 1, "max_nodes": 2},
        ),
        # T8.6: one gives up the round, and the leader is killed, slow, or back after a lost connection.
        WorldPlan(
            "three miss their leader", 3, ("fail", *_CRASHES, *_MESSAGES, "pause"), 2, formed=True, chooses_reads=False,
            options={"min_nodes": 1},
        ),
        WorldPlan(
            "three re-form: sick nodes", 3, ("sick", "crash"), 2, formed=True, chooses_reads=False, options={"check": "check"},
        ),
        WorldPlan(
            "three re-form: quarantine", 3, ("crash", "respawn"), 2, formed=True, chooses_reads=False,
            options={"quarantine": "1/1h", "min_nodes": 1},
        ),
        WorldPlan(
            "three re-form: notices", 3, ("drain", "crash"), 2, formed=True, chooses_reads=False, saves_s=0.5,
            options={"drain_notice": 3.0},
        ),
        # T11.13: workers that get no further. A newcomer can break the next round before all have taken it.
        WorldPlan(
            "three re-form: in vain", 3, ("crash", "newcomer"), 2, formed=True, chooses_reads=False, gains=0,
            options={"futile_rounds": 1, "min_nodes": 1},
        ),
        WorldPlan("two use the store", 2, ("fail", "expire", "stall", "hold"), 1, uses_store=True, options={"max_nodes": 2}),
        WorldPlan("seals in parts", 3, (*_CRASHES, *_PAUSES, "expire"), 1, writes_max=4, chooses_reads=False),
        WorldPlan("other settings", 2, ("restart", "expire", "crash"), 1, odd={"last_call": 2.0}),
        WorldPlan(
            "lone survivors", 2, ("restart unseen", "host down", "crash", "pause"), 2, formed=True,
            chooses_reads=False, options={"min_nodes": 1, "max_nodes": 2},
        ),
        WorldPlan("two engines", 2, ("lead astray", "crash"), 2, formed=True, options={"min_nodes": 1, "max_nodes": 2}),
    )
}
"""The worlds that are explored, by name."""


@dataclass
class Report:
    """The outcome of an exploration."""

    plan: WorldPlan
    states: int
    choices: int
    paths: int
    depth: int
    seconds: float
    complete: bool
    wrong: list[tuple[str, list[Choice]]] = field(default_factory=list)
    """Each violation, with the decisions that lead to it."""

    def __str__(self) -> str:
        how = "all of them" if self.complete else "stopped before the end"
        return (
            f"{self.plan.name}: {self.states} states, {self.choices} choices, {self.paths} paths of up to {self.depth} "
            f"decisions in {self.seconds:.1f} s, {how}; {len(self.wrong)} wrong"
        )


def explore(
    plan: WorldPlan, limit_s: float = 3600.0, *, choices_max: int = CHOICES_MAX, first_only: bool = True
) -> Report:
    """Walk the plan's world. `first_only`: stop at the first violation."""
    began_at = time.monotonic()
    shared = _Shared()
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if not child:
            walker = _Walker(shared, began_at + limit_s, choices_max, out.fileno(), first_only)
            walker.walk(plan)
        os.waitpid(child, 0)
        out.seek(0)
        wrong = [(problem, [Choice(*one) for one in path]) for problem, path in map(json.loads, out)]
    counters = shared.counters
    complete = not counters[_STOP]
    if complete:
        wrong += list(shared.stuck())
    counts = counters[_STATES], counters[_EDGES], counters[_PATHS], counters[_DEPTH]
    return Report(plan, *counts, time.monotonic() - began_at, complete, wrong)


class _Shared:
    """Memory that all processes of an exploration share. One of them runs at a time."""

    def __init__(self) -> None:
        self.counters = memoryview(mmap.mmap(-1, 64)).cast("Q")
        self._table = memoryview(mmap.mmap(-1, 32 * STATES_MAX)).cast("Q")
        """For each state its fingerprint, and three words of bits for the choices that were taken in it."""
        self._edges = memoryview(mmap.mmap(-1, 12 * (CHOICES_MAX + 1000))).cast("I")
        """For each choice taken: from which state, which choice, to which state."""

    def state(self, fingerprint: bytes) -> int:
        """Return the number of a state."""
        key = int.from_bytes(fingerprint, "big") or 1
        number = key % (STATES_MAX - 2) + 2
        while self._table[4 * number] not in (0, key):
            number = number + 1 if number + 1 < STATES_MAX else 2
        if not self._table[4 * number]:
            self._table[4 * number] = key
            self.counters[_STATES] += 1
            if self.counters[_STATES] > STATES_MAX * 0.9:
                self.counters[_STOP] = 1
        return number

    def take_new(self, state: int, choices: list[Choice]) -> list[Choice]:
        """Return the choices that were not taken in that state before."""
        new = []
        for choice in choices:
            word, bit = divmod(_code(choice), 64)
            at = 4 * state + 1 + word
            if not self._table[at] >> bit & 1:
                self._table[at] |= 1 << bit
                new.append(choice)
        return new

    def add_edge(self, source: int, choice: Choice, target: int) -> None:
        at = 3 * self.counters[_EDGES]
        self._edges[at], self._edges[at + 1], self._edges[at + 2] = source, _code(choice), target
        self.counters[_EDGES] += 1

    def stuck(self) -> Iterator[tuple[str, list[Choice]]]:
        """Yield the states from which no way without further faults leads to rest."""
        came_from: dict[int, tuple[int, int]] = {}
        before: dict[int, list[int]] = {}
        first_fault = VERBS.index(next(iter(FAULTS)))
        for at in range(0, 3 * self.counters[_EDGES], 3):
            source, code, target = self._edges[at], self._edges[at + 1], self._edges[at + 2]
            came_from.setdefault(target, (source, code))
            if code // len(TARGETS) < first_fault:
                before.setdefault(target, []).append(source)
        good, found = {REST}, [REST]
        while found:
            news = [source for source in before.get(found.pop(), ()) if source not in good]
            good.update(news)
            found += news
        for state in list(came_from.keys() - good)[:WRONG_MAX]:
            path: list[Choice] = []
            at = state
            while at != START:
                at, code = came_from[at]
                path.append(Choice(VERBS[code // len(TARGETS)], TARGETS[code % len(TARGETS)]))
            yield "no way without further faults leads to rest", path[-2::-1]


def _code(choice: Choice) -> int:
    return VERBS.index(choice.verb) * len(TARGETS) + TARGETS.index(choice.target)


class _Walker:
    """Takes every choice, each in a process of its own."""

    def __init__(self, shared: _Shared, deadline: float, choices_max: int, out: int, first_only: bool) -> None:
        self._shared = shared
        self._deadline = deadline
        self._choices_max = choices_max
        self._out = out
        self._first_only = first_only
        self._state = START
        self._came_by = Choice("wait")

    def walk(self, plan: WorldPlan) -> None:
        """Walk, and end this process."""
        try:
            logging.disable(logging.CRITICAL)
            # What is there now stays: the collector would only touch, and so copy, memory that processes share.
            gc.collect()
            gc.freeze()
            gc.disable()
            SmallWorld(plan, self.choose, self.ended, CHECKERS).play()
        except BaseException:  # noqa: BLE001  Nothing may escape into the caller's copy in this process.
            self._report(traceback.format_exc(), [])
        finally:
            os._exit(0)

    def choose(self, world: SmallWorld, choices: list[Choice]) -> Choice | None:
        """Return in one process for each choice that is new in this state."""
        shared = self._shared
        if time.monotonic() > self._deadline or shared.counters[_EDGES] >= self._choices_max:
            shared.counters[_STOP] = 1
        if shared.counters[_STOP]:
            return None
        state = shared.state(world.fingerprint())
        shared.add_edge(self._state, self._came_by, state)
        self._state = state
        shared.counters[_DEPTH] = max(shared.counters[_DEPTH], len(world.decisions))
        new = shared.take_new(state, choices)
        for choice in new[:-1]:
            child = os.fork()
            if not child:
                asyncio._set_running_loop(world.loop)  # noqa: SLF001  asyncio forgets it in a forked process.
                self._came_by = choice
                return choice
            os.waitpid(child, 0)
            if shared.counters[_STOP]:
                return None
        self._came_by = new[-1] if new else self._came_by
        return new[-1] if new else None

    def ended(self, world: SmallWorld) -> None:
        """Note how a path ended, and end the process without cleaning up."""
        self._shared.counters[_PATHS] += 1
        if world.outcome == "at rest":
            self._shared.add_edge(self._state, self._came_by, REST)
        elif world.outcome:
            self._report("; ".join(world.judge.wrong) or "no progress", world.decisions)
        os._exit(0)

    def _report(self, problem: str, decisions: Sequence[Choice]) -> None:
        self._shared.counters[_WRONG] += 1
        if self._shared.counters[_WRONG] <= WRONG_MAX:
            os.write(self._out, json.dumps([problem, decisions]).encode() + b"\n")
        if self._first_only:
            self._shared.counters[_STOP] = 1


# ---- stories


def tell(plan: WorldPlan, decisions: Sequence[Choice]) -> tuple[str, SmallWorld]:
    """Make these decisions again, and return the story as text: each decision, and indented what came of it."""
    left = list(decisions)
    lines = [f"world {plan.name}"]
    told = 0

    def show_news(world: SmallWorld) -> None:
        nonlocal told
        lines.extend(f"    {observation}" for observation in world.history[told:])
        told = len(world.history)

    def choose(world: SmallWorld, choices: list[Choice]) -> Choice | None:
        show_news(world)
        if not left:
            return None
        choice = left.pop(0)
        if choice not in choices:
            raise ValueError(f"{choice} cannot happen here; what can: {', '.join(map(str, choices))}")
        lines.append(str(choice))
        return choice

    world = SmallWorld(plan, choose, show_news, CHECKERS)
    world.play()
    lines += [f"# {problem}" for problem in world.judge.wrong] or [f"# {world.outcome or 'the story ends here'}"]
    return "\n".join(lines), world


def read_story(text: str) -> tuple[WorldPlan, list[Choice]]:
    """Return plan and decisions of a story."""
    plain = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    name = plain[0].removeprefix("world ") if plain else ""
    if name not in WORLDS:
        raise ValueError(f"a story begins with 'world ' and one of {', '.join(WORLDS)}, not with {name!r}")
    return WORLDS[name], [Choice.parse(line) for line in plain[1:]]


def main(arguments: list[str] | None = None) -> int:
    """Explore the worlds that the arguments name, or tell a story again. Return 0 if every guarantee held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m rdzv.testing.explore", description=__doc__.splitlines()[0])
    parser.add_argument("world", nargs="*", help=f"default: all; there are {', '.join(WORLDS)}")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each world")
    parser.add_argument(
        "--fault", action="append",
        help="walk only the part with this fault; may be given several times. A world of two faults is walked by all its pairs",
    )
    parser.add_argument("--replay", type=Path, help="a file with a story, to be told again")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        try:
            story, world = tell(*read_story(options.replay.read_text()))
        except (OSError, ValueError) as error:
            parser.error(f"{options.replay}: {error}")
        print(story)
        return 1 if world.judge.wrong else 0
    wrong = 0
    for name in options.world or WORLDS:
        if name not in WORLDS:
            parser.error(f"there is no world {name!r}; there are {', '.join(WORLDS)}")
        plan = WORLDS[name]
        if options.fault is not None:
            if strange := set(options.fault) - set(plan.faults):
                parser.error(f"{name!r} has no fault {', '.join(sorted(strange))}; it has {', '.join(plan.faults)}")
            plan = replace(plan, faults=tuple(kind for kind in plan.faults if kind in options.fault))
        report = explore(plan, options.limit)
        print(report, flush=True)
        for problem, decisions in report.wrong[:1]:
            wrong += 1
            print(f"wrong: {problem}", tell(report.plan, decisions)[0], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
