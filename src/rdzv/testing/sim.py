"""Run a simulated rendezvous from a seed, and check every guarantee: `python -m rdzv.testing.sim --seed N`."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..core.keys import Keys
from .checkers import SAFETY_CHECKERS, Calm, CheckContext, run
from .cluster import SimCluster
from .decisions import Decided
from .history import Fault, History
from .notice_checkers import T7Notices, T11Futile
from .progress_checkers import G5Progress, G6Notice, G7Cause, T8Evictions, T17Quarantine
from .reached import Reached
from .scenario import BROKEN, KEPT, Scenario, draw, draw_broken, draw_noticed, draw_promised
from .steering import draw_steered
from .virtual_loop import RunError

CHECKERS = (*SAFETY_CHECKERS, G5Progress, G6Notice, G7Cause, T7Notices, T8Evictions, T11Futile, T17Quarantine)


@dataclass
class Result:
    """The history of a seed, and what the checkers report."""

    scenario: Scenario
    history: History
    decisions: list[Decided]
    wrong: list[str]
    steered: bool
    register: bool
    broken: bool
    evicted: int
    """How many killed processes were evicted before their linger was over (T8.5)."""
    promise: str
    noticed: bool = False

    @property
    def replay(self) -> str:
        """The command that repeats the run."""
        kind = " --steered" * self.steered + " --broken" * self.broken + " --register" * self.register
        kind += " --noticed" * self.noticed
        kind += f" --promise {self.promise}" * bool(self.promise)
        members = len(self.scenario.lives)
        return f"python -m rdzv.testing.sim --seed {self.scenario.seed} --members {members}{kind} --verbose"


def simulate(
    seed: int, members: int | None = None, *,
    steered: bool = False, broken: bool = False, register: bool = False, observed: bool = False, promise: str = "",
    noticed: bool = False,
) -> Result:  # fmt: skip
    """Run the scenario of that seed, on the reference engine or on a register, and check it.

    `steered`: a scenario that aims at what plain seeds seldom reach. `broken`: one with connections that end in broken
    rounds. `observed`: collect the leaders' decisions. `promise`: the server has a declared place, and the platform keeps or
    breaks its promise about it (T16.4). `noticed`: drains give notice, and rounds without progress may be counted.
    """
    if promise:
        scenario = draw_promised(seed, promise, members)
    else:
        drawn = draw_steered if steered else draw_broken if broken else draw_noticed if noticed else draw
        scenario = drawn(seed, members)
    stage = SimCluster(scenario, register=register, observed=observed)
    wrong = []
    try:
        stage.play()
    except RunError as error:
        wrong.append(f"the run did not come to an end: {error}")
    context = facts(stage)
    evictions = T8Evictions(context)
    wrong += run(context, stage.history, [evictions, *(kind(context) for kind in CHECKERS if kind is not T8Evictions)])
    kind = steered, register, broken, evictions.evicted, promise, noticed
    return Result(scenario, stage.history, stage.decisions, wrong, *kind)


def check(stage: SimCluster) -> list[str]:
    """Return what the checkers report of a run."""
    context = facts(stage)
    return run(context, stage.history, [kind(context) for kind in CHECKERS])


def facts(stage: SimCluster) -> CheckContext:
    """Return what the checkers must know of a run besides its history."""
    return CheckContext(
        keys=Keys("sim"),
        owners={(app.node.host, app.node.pid): name for name, app in stage.apps.items()},
        agreed={name: app.settings.agreed() for name, app in stage.apps.items()},
        slow_stop=frozenset(name for name, app in stage.apps.items() if app.life.stop_s > 10.0),
        loss=stage.scenario.loss,
        register=stage.register,
        steps=any(app.node.steps for app in stage.apps.values()),
        # Effects of a fault end when calls have timed out (10 s), leases have ended and members have reconnected.
        calm=Calm(stage.history.of(Fault), 10.0 + stage.scenario.options["lease"] * 1.1 + 5.0),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds that the arguments name. Return 0 if every guarantee held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m rdzv.testing.sim", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the number that all random choices follow from")
    parser.add_argument("--count", type=int, default=1, help="run this many seeds, from --seed on")
    parser.add_argument("--jobs", type=int, default=1, help="share the seeds among this many processes")
    parser.add_argument("--members", type=int, help="how many members (default: drawn, 2 to 12)")
    parser.add_argument("--steered", action="store_true", help="aim at what plain seeds seldom reach")
    parser.add_argument("--broken", action="store_true", help="end connections and processes in broken rounds")
    parser.add_argument("--noticed", action="store_true", help="let drains give notice, and count rounds without progress")
    parser.add_argument("--register", action="store_true", help="keep the run in a compare-and-set register")
    parser.add_argument(
        "--promise", choices=[KEPT, BROKEN], default="", help="declare the server's place, and keep or break that promise"
    )
    parser.add_argument("--verbose", action="store_true", help="show the whole history")
    parser.add_argument("--reached", action="store_true", help="show which rules decided in which phase under which fault")
    parser.add_argument("--save-reached", type=Path, metavar="FILE", help="write that as JSON, which steers --steered")
    options = parser.parse_args(arguments)
    options.observed = options.reached or options.save_reached is not None
    failed, evicted, reached = 0, 0, Reached()
    seeds = range(options.seed, options.seed + options.count)
    with ExitStack() as stack:
        judge = partial(_judge, options)
        parallel = options.jobs > 1 and stack.enter_context(multiprocessing.Pool(options.jobs))
        for lines, wrong, gone, seen in parallel.imap(judge, seeds, 8) if parallel else map(judge, seeds):
            failed += wrong
            evicted += gone
            reached.merge(seen)
            print(*lines, sep="", end="")
    if options.count > 1:
        early = f"; {evicted} members were evicted before their linger was over" if options.broken else ""
        print(f"{options.count - failed} of {options.count} seeds held{early}")
    if options.reached:
        print(reached)
    if options.save_reached is not None:
        options.save_reached.write_bytes(reached.encode())
    return 1 if failed else 0


def _judge(options: argparse.Namespace, seed: int) -> tuple[list[str], bool, int, Reached]:
    """Run one seed. Return the lines to print, whether a guarantee was broken, its early evictions, and what it reached."""
    kind = {name: getattr(options, name) for name in ("steered", "broken", "register", "observed", "promise", "noticed")}
    result = simulate(seed, options.members, **kind)
    lines, reached = [], Reached()
    if options.observed:
        reached.see(result.history, result.decisions)
    if options.verbose:
        lines += [f"{result.scenario}\n", f"{result.history}\n"]
    if result.wrong:
        lines.append(f"seed {seed}: {len(result.wrong)} wrong; replay: {result.replay}\n")
        lines += [f"  {problem}\n" for problem in result.wrong[: 100 if options.verbose else 3]]
    elif options.count == 1:
        history = result.history
        lines.append(f"seed {seed}: every guarantee held ({len(history)} observations, {history.digest()[:16]})\n")
    return lines, bool(result.wrong), result.evicted, reached


if __name__ == "__main__":
    logging.getLogger("rdzv").setLevel(logging.CRITICAL)  # The history tells more, and thousands of lines hide the result.
    sys.exit(main())
