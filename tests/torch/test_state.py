"""The copy of a replica's state between two real processes, with tensors of all kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

PROGRAM = """
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from rdzv.torch import ReplicaState

rank, path = int(sys.argv[1]), sys.argv[2]
kinds = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
         "float64", "float8_e4m3fn", "complex64", "complex128"]
shapes = {"none": (0, 3), "one": (), "some": (5, 3), "many": (100, 1000)}


class Part:
    def __init__(self):
        self.tensors = {
            f"{kind} {name}": (torch.arange(len(torch.empty(shape).view(-1))) % 7 if rank else torch.zeros(shape))
            .reshape(shape).to(getattr(torch, kind))
            for kind in kinds for name, shape in shapes.items()
        }
        self.tensors["across"] = torch.arange(6.0).reshape(2, 3).t() * rank

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
state = ReplicaState(part=Part())
state.step = rank
state.sync(SimpleNamespace(rank=rank, size=2))
assert state.step == 1
rank = 1
for (name, one), other in zip(state.parts["part"].tensors.items(), Part().tensors.values(), strict=True):
    assert one.dtype is other.dtype and one.shape == other.shape, name
    assert one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8)), name
dist.barrier()
"""


def test_tensors_of_all_kinds_arrive_as_they_were(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    pair = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for one in pair:
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said
