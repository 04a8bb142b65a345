"""Run a simulated rendezvous from a seed, and check every guarantee: `python -m rdzv.testing.sim --seed N`."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from ..core.keys import Keys
from . import planted_bugs
from .checkers import (
    Calm,
    CheckContext,
    Checker,
    G1Agreement,
    G2Ranks,
    G3Order,
    G4Ghosts,
    G8Fencing,
    G9Closing,
    G10Clocks,
    T1Settings,
    run,
)
from .cluster import SimCluster
from .history import Fault, History
from .progress_checkers import G5Progress, G6Notice, G7Cause
from .scenario import Scenario, draw
from .virtual_loop import RunError

CHECKERS: tuple[type[Checker], ...] = (
    G1Agreement,
    G2Ranks,
    G3Order,
    G4Ghosts,
    G5Progress,
    G6Notice,
    G7Cause,
    G8Fencing,
    G9Closing,
    G10Clocks,
    T1Settings,
)


class Result:
    """What came of a seed."""

    def __init__(self, scenario: Scenario, history: History, wrong: list[str], *, register: bool) -> None:
        self.scenario = scenario
        self._register = register
        self.history = history
        self.wrong = wrong

    @property
    def replay(self) -> str:
        """The command that shows it again."""
        engine = " --register" if self._register else ""
        members = len(self.scenario.lives)
        return f"python -m rdzv.testing.sim --seed {self.scenario.seed} --members {members}{engine} --verbose"


def simulate(seed: int, members: int | None = None, *, register: bool = False) -> Result:
    """Play the scenario of that seed and check it, on the reference engine or on a register."""
    scenario = draw(seed, members)
    stage = SimCluster(scenario, register=register)
    wrong = []
    try:
        stage.play()
    except RunError as error:
        wrong.append(f"the run did not come to an end: {error}")
    return Result(scenario, stage.history, wrong + check(stage), register=register)


def check(stage: SimCluster) -> list[str]:
    """What the checkers say of a run."""
    nodes = {name: app.node for name, app in stage.apps.items()}
    scenario = stage.scenario
    slow = {name for name, app in stage.apps.items() if app.life.stop_s > 10.0}
    case = CheckContext(
        keys=Keys("sim"),
        owners={(node.host, node.pid): name for name, node in nodes.items()},
        agreed=stage.agreed,
        slow_stop=frozenset(slow),
        loss=scenario.loss,
        register=stage.register,
    )
    # A fault's effects are over when timed-out calls have been noticed, leases have run out and everybody has reconnected.
    case.calm = Calm(stage.history.of(Fault), 10.0 + scenario.options["lease"] * 1.1 + 5.0)
    return list(run(case, stage.history, [kind(case) for kind in CHECKERS]))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every guarantee held; 1: not."""
    parser = argparse.ArgumentParser(prog="python -m rdzv.testing.sim", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="what everything random is drawn from")
    parser.add_argument("--count", type=int, default=1, help="run this many seeds, from --seed on")
    parser.add_argument("--members", type=int, help="how many members (default: drawn, 2 to 12)")
    parser.add_argument("--register", action="store_true", help="keep the run in a compare-and-set register")
    parser.add_argument("--verbose", action="store_true", help="show all that happened")
    parser.add_argument("--bug", help="plant a defect by its name, to see it caught")
    options = parser.parse_args(arguments)
    failed = 0
    with planted_bugs.planted(options.bug) if options.bug else nullcontext():
        for seed in range(options.seed, options.seed + options.count):
            result = simulate(seed, options.members, register=options.register)
            if options.verbose:
                print(result.scenario)
                print(result.history)
            if result.wrong:
                failed += 1
                print(f"seed {seed}: {len(result.wrong)} wrong; replay: {result.replay}")
                for problem in result.wrong[: 100 if options.verbose else 3]:
                    print(f"  {problem}")
            elif options.count == 1:
                print(f"seed {seed}: every guarantee held ({len(result.history)} observations, {result.history.digest()[:16]})")
    if options.count > 1:
        print(f"{options.count - failed} of {options.count} seeds held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
