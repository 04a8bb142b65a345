"""A training process that stays: `rdzv.torch.rounds` with a small real model. It writes lines of JSON.

`support.staying` forks it from a process that has imported torch already.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rdzv.torch
from rdzv import worker
from rdzv.errors import RoundOver
from rdzv.torchrun.dist_store import OwnedStore

torch.optim.AdamW([torch.zeros(1)])  # The first optimizer imports half of torch: once, before all processes are forked.


@dataclass
class Plan:
    """How the process trains, and what goes wrong in it."""

    steps: int = 1_000_000
    step_s: float = 0.005
    report_every: int = 0
    """Print a line for every so many steps; 0: for the first of a round only."""
    seed: int = 0
    """Of the first weights: a newcomer's differ."""
    lr: float = 1e-2
    first_step: int = 0
    """The step at which the process comes, as if it had loaded a checkpoint."""
    fails_at: int = -1
    """The step before which the program fails, unless it was started later in the run."""
    mismatch_at: int = -1
    """The step in which rank 1 gives a collective a wrong size."""
    again_every: int = 0
    """Rank 0 ends each round after so many steps; 0: it does not."""
    ends_at_call: tuple[int, str] = (0, "")
    """In the second round: the call of the store at which this process sends itself a signal, and the signal's name."""
    sleeps_at: int = -1
    """The step before which this process stands still for an hour."""
    exits_at: int = -1
    """The step before which the program calls `sys.exit(3)`."""
    forks: bool = False
    """Whether a forked child lives as long as this process, as a DataLoader's worker does."""
    subgroup: bool = False
    """Whether the collectives are those of a second group, made in the round."""
    keeps: bool = False
    """Whether the DDP of all rounds are kept."""
    ballast: int = 0
    """The number of values of a part of the state that is not trained."""
    only_reduce: bool = False
    """Whether there is no model: each step is one all-reduce."""
    saves: bool = False
    """Whether the process saves in a step on which all agree, when it is told that the round will end."""
    settings: dict[str, Any] = field(default_factory=dict)


def say(event: str, **fields: object) -> None:
    # One write per line: two processes may share the file.
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n").encode())


class Trainer:
    """A regression with data that depend on the step only."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        torch.manual_seed(plan.seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), plan.lr)
        self.ballast = nn.ParameterList([nn.Parameter(torch.rand(plan.ballast), requires_grad=False)])
        self.state = rdzv.torch.ReplicaState(model=self.model, optimizer=self.optimizer, ballast=self.ballast)
        self.state.step = plan.first_step
        say("begins", digest=self.digest())
        source = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(200, 16, generator=source)
        self.targets = self.inputs @ torch.randn(16, 1, generator=source)
        self.sampler = rdzv.torch.StepSampler(len(self.inputs), 24)
        self.kept: list[object] = []

    def digest(self) -> str:
        """A fingerprint of every bit of the state."""
        state = [*self.model.state_dict().values(), *self.ballast.state_dict().values()]
        state += [value for values in self.optimizer.state_dict()["state"].values() for value in values.values()]
        return hashlib.sha256(b"".join(one.numpy().tobytes() for one in state)).hexdigest()[:16]

    def loss(self) -> float:
        """The loss over all data, with the statistics of the whole: comparable between worlds."""
        self.model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(self.model(self.inputs), self.targets)
        self.model.train()
        return loss.item()

    def play(self, world: Any) -> None:
        plan, state = self.plan, self.state
        steps = state.sync(world)
        place = {"round": world.round, "rank": world.rank, "size": world.size, "reason": world.reason}
        held = {name: len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd")}
        say("world", **place, **held, steps=steps, step=state.step, digest=self.digest())
        group = dist.new_group() if plan.subgroup else None
        parallel = DistributedDataParallel(self.model, init_sync=False, process_group=group)
        if plan.keeps:
            self.kept.append(parallel)
        batches = iter(self.sampler.start(world, state.step))
        first = True
        while state.step < plan.steps:
            world.check()
            self.trouble(world)
            mine = next(batches)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parallel(self.inputs[mine]), self.targets[mine]) * self.sampler.weight
            loss.backward()
            self.optimizer.step()
            state.step += 1
            if first or (plan.report_every and state.step % plan.report_every == 0):
                say("step", round=world.round, size=world.size, step=state.step, loss=self.loss())
            first = False
            time.sleep(plan.step_s)

    def reduce(self, world: Any) -> None:
        """Nothing but collectives, the first and the last of which are told."""
        say("world", round=world.round, rank=world.rank, size=world.size, reason=world.reason)
        value, last = torch.ones(1), 0.0
        try:
            while self.state.step < self.plan.steps:
                world.check()
                self.trouble(world)
                dist.all_reduce(value.fill_(1.0))
                self.state.step += 1
                worker.progress(self.state.step)
                if self.plan.saves and (notice := rdzv.torch.notice()):
                    say("saved", round=world.round, step=self.state.step, reason=notice.reason, seconds=notice.seconds)
                    worker.saved()
                if not last:
                    say("step", round=world.round, size=int(value), step=self.state.step)
                last = time.monotonic()
                time.sleep(self.plan.step_s)
        finally:
            say("stopped", round=world.round, last=last)

    def trouble(self, world: Any) -> None:
        plan, step = self.plan, self.state.step
        if step == plan.fails_at:
            raise ValueError("the data are wrong")
        if step == plan.mismatch_at:
            dist.all_reduce(torch.ones(3 if world.rank == 1 else 1_000_000))
        if step == plan.sleeps_at:
            say("sleeps")
            time.sleep(3600)
        if step == plan.exits_at:
            sys.exit(3)
        if plan.again_every and world.rank == 0 and world.steps == plan.again_every:
            raise RoundOver(world.round, "the test wants another one")


def end_at_call(number: int, name: str) -> None:
    """Let this process die or stand still at a call of the store, while the group of its second round is made."""
    calls = 0

    def counted(call: Any) -> Any:
        def wrapper(store: Any, *args: Any) -> Any:
            nonlocal calls
            if store.timeout.total_seconds() < 60 and store._space._calls.round_number == 2:
                calls += 1
                if calls == number:
                    say("ends", call=call.__name__)
                    os.kill(os.getpid(), signal.Signals[name])
            return call(store, *args)

        return wrapper

    for name_of_call in ("set", "multi_set", "get", "multi_get", "wait", "add"):
        setattr(OwnedStore, name_of_call, counted(getattr(OwnedStore, name_of_call)))


def redirect(out: str) -> None:
    """Write what the process prints to files of its own."""
    for number, name in ((1, out), (2, f"{out}.err")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    faulthandler.register(signal.SIGUSR1)  # A test that waits in vain asks where this process is.


def train(out: str, endpoint: str, name: str, nnodes: tuple[int, int], options: dict[str, Any]) -> None:
    redirect(out)
    plan = Plan(**options)
    torch.set_num_threads(1)
    trainer = Trainer(plan)
    if plan.ends_at_call[0]:
        end_at_call(*plan.ends_at_call)
    settings = {"slot": name, "last_call": 1, "settle": 0.2, "grow_every": 0, "form_s": 3.0, **plan.settings}
    child = 0
    for world in rdzv.torch.rounds(endpoint, run_id="job", min_nodes=nnodes[0], max_nodes=nnodes[1], **settings):
        with world:
            if plan.forks and not child:
                child = os.fork()
                if not child:
                    time.sleep(30)
                    os._exit(0)
                say("forked", child=child)
            (trainer.reduce if plan.only_reduce else trainer.play)(world)
    say("end", step=trainer.state.step, digest=trainer.digest(), loss=trainer.loss())


def run_program(out: str, words: list[str]) -> None:
    """Run a Python program as if it had been started by itself."""
    redirect(out)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
