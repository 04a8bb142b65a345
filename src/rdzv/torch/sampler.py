"""Batches that depend on the step only, so that training goes on with another number of members."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from .rounds import LiveWorld


class StepSampler(Sampler[list[int]]):
    """The samples of each step, divided among the members of a round.

    Epochs follow each other without a gap: each is one permutation of all samples, and a batch may contain the end of one
    and the beginning of the next. So a step has the same samples whatever the world is, and none is lost or repeated when
    a step is done again. `batch` is the number of samples of a step in all members together.
    """

    def __init__(self, samples: int, batch: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if samples < 1 or batch < 1:
            raise ValueError(f"samples is {samples} and batch is {batch}: both must be at least 1")
        self._samples = samples
        self._batch = batch
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self._rank, self._size, self._step = 0, 1, 0

    def start(self, world: LiveWorld, step: int) -> StepSampler:
        """Begin with a step in this round. Returns itself, to be a DataLoader's `batch_sampler`: it does not end."""
        if world.size > self._batch:
            raise ValueError(
                f"a batch of {self._batch} samples cannot be divided among {world.size} members: raise it, or lower max_nodes"
            )
        self._rank, self._size, self._step = world.rank, world.size, step
        return self

    def __iter__(self) -> Iterator[list[int]]:
        # An iterator of its own numbers: a DataLoader's worker reads ahead, and that must not count as done.
        rank, size = self._rank, self._size
        return (self.indices(step)[rank::size] for step in itertools.count(self._step))

    def indices(self, step: int) -> list[int]:
        """Return the samples of a step, of all members together."""
        return [self._at(position) for position in range(step * self._batch, (step + 1) * self._batch)]

    @property
    def weight(self) -> float:
        """The factor for the mean loss of this member's samples: the mean over the members is then that of the batch."""
        mine = len(range(self._rank, self._batch, self._size))
        return mine * self._size / self._batch

    def epoch(self, step: int) -> int:
        """Return the number of the epoch in which a step begins."""
        return step * self._batch // self._samples

    def _at(self, position: int) -> int:
        epoch, index = divmod(position, self._samples)
        if not self._shuffle:
            return index
        if self._order[0] != epoch:
            source = torch.Generator().manual_seed(self._seed + epoch)
            self._order = epoch, torch.randperm(self._samples, generator=source).tolist()
        return self._order[1][index]

