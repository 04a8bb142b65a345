"""The samples of a step do not depend on the world, and none is lost or repeated."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
StepSampler = pytest.importorskip("rdzv.torch").StepSampler


def world(rank, size):
    return SimpleNamespace(rank=rank, size=size)


def share(sampler, rank, size, step):
    return next(iter(sampler.start(world(rank, size), step)))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_members_divide_the_samples_of_a_step_whatever_the_size_of_the_world(size):
    sampler = StepSampler(100, 8)
    for step in (0, 3, 12):
        parts = [share(sampler, rank, size, step) for rank in range(size)]
        assert sorted(itertools.chain(*parts)) == sorted(sampler.indices(step))
        assert all(parts)


def test_an_epoch_has_each_sample_once_although_the_world_changes_within_it():
    sampler = StepSampler(100, 8)
    seen = []
    for step, size in enumerate([1, 3, 2, 4, 4, 1, 2, 3, 8, 5, 2, 1, 4, 4, 2, 2, 1, 3, 3, 1, 1, 2, 2, 2, 2]):
        seen += [sample for rank in range(size) for sample in share(sampler, rank, size, step)]
    epochs = [sampler.indices(step)[place] for step in range(25) for place in range(8)]
    assert sorted(epochs[:100]) == sorted(epochs[100:]) == list(range(100))
    assert sorted(seen) == sorted(epochs)
    assert epochs[:100] != epochs[100:], "each epoch has an order of its own"


def test_reading_ahead_does_not_count_as_done():
    sampler = StepSampler(100, 8)
    ahead = iter(sampler.start(world(0, 2), 5))
    taken = [next(ahead) for _ in range(4)]
    assert share(sampler, 0, 2, 6) == taken[1]


def test_the_mean_of_weighted_means_is_the_mean_over_the_batch():
    sampler = StepSampler(50, 7)
    values = list(range(50))
    for size in (1, 2, 3, 5):
        means = []
        for rank in range(size):
            mine = share(sampler, rank, size, 4)
            means.append(sum(values[one] for one in mine) / len(mine) * sampler.weight)
        whole = sampler.indices(4)
        assert sum(means) / size == pytest.approx(sum(values[one] for one in whole) / len(whole))


def test_without_shuffling_the_order_is_that_of_the_data():
    sampler = StepSampler(5, 3, shuffle=False)
    assert [sampler.indices(step) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert [sampler.epoch(step) for step in range(5)] == [0, 0, 1, 1, 2]


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="a batch of 2 samples cannot be divided among 3 members"):
        StepSampler(10, 2).start(world(0, 3), 0)
    with pytest.raises(ValueError, match="must be at least 1"):
        StepSampler(0, 2)
