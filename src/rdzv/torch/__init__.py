"""Rounds inside the training process: workers that stay while members are lost and come.

    for world in rdzv.torch.rounds("node1:29400", run_id="job", min_nodes=2, max_nodes=4):
        with world:
            state.sync(world)
            ...

Each process is a member. `rounds` is the loop; `group` makes and ends torch's process group, `gloo_sockets` frees a thread
that gloo blocks, `watchdog` does so when the round is over, and `failures` tells the loss of a peer from a defect of the
program. `notice` lets all ranks save in the same step before a node goes. `state` and `sampler` are for the usual cases:
replicas that are equal, and data that go on where they were.
docs/stay.md explains the use.
"""

from .notice import notice
from .rounds import LiveWorld, Rounds, rounds
from .sampler import StepSampler
from .state import Part, ReplicaState

__all__ = ["LiveWorld", "Part", "ReplicaState", "Rounds", "StepSampler", "notice", "rounds"]
