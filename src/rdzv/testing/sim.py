"""Run a simulated rendezvous from a seed, and check every guarantee: `python -m rdzv.testing.sim --seed N`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from ..core.keys import Keys
from .checkers import SAFETY_CHECKERS, Calm, CheckContext, run
from .cluster import SimCluster
from .history import Fault, History
from .progress_checkers import G5Progress, G6Notice, G7Cause
from .scenario import Scenario, draw
from .virtual_loop import RunError

CHECKERS = (*SAFETY_CHECKERS, G5Progress, G6Notice, G7Cause)


@dataclass
class Result:
    """The history of a seed, and what the checkers report."""

    scenario: Scenario
    history: History
    wrong: list[str]
    register: bool

    @property
    def replay(self) -> str:
        """The command that repeats the run."""
        engine = " --register" if self.register else ""
        members = len(self.scenario.lives)
        return f"python -m rdzv.testing.sim --seed {self.scenario.seed} --members {members}{engine} --verbose"


def simulate(seed: int, members: int | None = None, *, register: bool = False) -> Result:
    """Run the scenario of that seed, on the reference engine or on a register, and check it."""
    scenario = draw(seed, members)
    stage = SimCluster(scenario, register=register)
    wrong = []
    try:
        stage.play()
    except RunError as error:
        wrong.append(f"the run did not come to an end: {error}")
    return Result(scenario, stage.history, wrong + check(stage), register)


def check(stage: SimCluster) -> list[str]:
    """Return what the checkers report of a run."""
    context = CheckContext(
        keys=Keys("sim"),
        owners={(app.node.host, app.node.pid): name for name, app in stage.apps.items()},
        agreed={name: app.settings.agreed() for name, app in stage.apps.items()},
        slow_stop=frozenset(name for name, app in stage.apps.items() if app.life.stop_s > 10.0),
        loss=stage.scenario.loss,
        register=stage.register,
        # Effects of a fault end when calls have timed out (10 s), leases have ended and members have reconnected.
        calm=Calm(stage.history.of(Fault), 10.0 + stage.scenario.options["lease"] * 1.1 + 5.0),
    )
    return run(context, stage.history, [kind(context) for kind in CHECKERS])


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds that the arguments name. Return 0 if every guarantee held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m rdzv.testing.sim", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the number that all random choices follow from")
    parser.add_argument("--count", type=int, default=1, help="run this many seeds, from --seed on")
    parser.add_argument("--members", type=int, help="how many members (default: drawn, 2 to 12)")
    parser.add_argument("--register", action="store_true", help="keep the run in a compare-and-set register")
    parser.add_argument("--verbose", action="store_true", help="show the whole history")
    options = parser.parse_args(arguments)
    failed = 0
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
            history = result.history
            print(f"seed {seed}: every guarantee held ({len(history)} observations, {history.digest()[:16]})")
    if options.count > 1:
        print(f"{options.count - failed} of {options.count} seeds held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
