"""The state of a replica, copied from the member that is furthest to all others."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .group import device
from .rounds import LiveWorld

PIECE_BYTES = 256 * 1024
"""The most that gloo sends as one message. If a peer is lost or paused in the middle of one, gloo forgets to end the receive,
which then waits for the whole timeout of the group. A message that fits into the kernel's buffers arrives whole or not at all.
"""


class Part(Protocol):
    """A model, an optimizer, a schedule: an object whose state can be taken out and put back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class ReplicaState:
    """The parts of a replica, and the number of steps that it has completed.

    Every member must have the whole state, as in data parallelism. `step` belongs to the program: count it up when the
    optimizer has made its step, because a member that is interrupted before that does the step again.
    """

    parts: dict[str, Part]
    """The parts, by the names that they were given."""
    step: int
    """How many steps this replica has completed."""

    def __init__(self, **parts: Part) -> None:
        self.parts = parts
        self.step = 0

    def sync(self, world: LiveWorld) -> list[int]:
        """Give all members the state of the member that has completed the most steps. Return the steps of all, by rank.

        A collective of the round: every member calls it, in every round. Survivors stop at different steps when a peer is
        lost, and a newcomer may be rank 0. The state arrives complete or not at all, so that a loss in between does not
        leave a mixture. Until then a member needs room for the state twice.
        """
        place = device()
        mine = torch.tensor([self.step], dtype=torch.int64, device=place)
        all_of_them = [torch.zeros_like(mine) for _ in range(world.size)]
        dist.all_gather(all_of_them, mine)
        steps = [int(one) for one in all_of_them]
        source = steps.index(max(steps))
        if world.rank == source:
            self._send(source, place)
        else:
            state = self._receive(source, place)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.step = steps[source]
        return steps

    def _send(self, source: int, place: torch.device) -> None:
        leaves, shape = pytree.tree_flatten({name: part.state_dict() for name, part in self.parts.items()})
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        bare = [leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        file = io.BytesIO()
        torch.save((pytree.tree_unflatten(bare, shape), [tensor.device.type for tensor in tensors]), file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except Exception as error:  # noqa: BLE001  Unpickling raises whatever it likes.
            raise TypeError(f"state of {', '.join(self.parts)}: only tensors and plain values can be copied: {error}") from None
        outline = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(place)
        dist.broadcast(torch.tensor([len(outline)], dtype=torch.int64, device=place), source)
        _broadcast([outline], source)
        _broadcast([tensor.to(place).contiguous() for tensor in tensors], source)

    def _receive(self, source: int, place: torch.device) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64, device=place)
        dist.broadcast(size, source)
        outline = torch.empty(int(size), dtype=torch.uint8, device=place)
        _broadcast([outline], source)
        # `weights_only`: the text of a peer must not run code here.
        bare, devices = torch.load(io.BytesIO(bytes(outline.cpu().numpy())), weights_only=True)
        leaves, shape = pytree.tree_flatten(bare)
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [torch.empty(leaves[index].shape, dtype=leaves[index].dtype, device=place) for index in where]
        _broadcast(tensors, source)
        for index, tensor, kind in zip(where, tensors, devices, strict=True):
            leaves[index] = tensor.to(kind)
        state: dict[str, Any] = pytree.tree_unflatten(leaves, shape)
        if state.keys() != self.parts.keys():
            here = ", ".join(self.parts)
            raise ValueError(f"the state has the parts {', '.join(state)}, but {here} here: give all members the same")
        return state


def _broadcast(tensors: list[torch.Tensor], source: int) -> None:
    pieces = (piece for tensor in tensors for piece in _pieces(tensor))
    for work in [dist.broadcast(piece, source, async_op=True) for piece in pieces]:
        work.wait()


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensor as bytes that share its memory, in small pieces if gloo sends them."""
    # As bytes, because gloo and NCCL each know only some types of numbers: neither int16, for example.
    whole = tensor.view(-1).view(torch.uint8)
    pieces: Sequence[torch.Tensor] = whole.split(PIECE_BYTES) if whole.device.type == "cpu" else [whole]
    return pieces
