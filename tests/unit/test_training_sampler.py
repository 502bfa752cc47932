"""Which images each rank reads in which step."""

from collections import Counter
from typing import Any

import pytest

from kfp_ddp.training.sampler import Epochs, ResumableSampler


def _dealt(world: int, first_step: int, micro: int = 4, batch: int = 24) -> list[set[Any]]:
    """The keys of each step from `first_step` to the end of two epochs, over all ranks."""
    steps: list[list[Any]] = []
    for rank in range(world):
        sampler = ResumableSampler(101, batch, micro, rank, world, seed=3)
        batches = list(Epochs(sampler, first_step, epochs=2))
        for number in range(len(batches) // sampler.mine):
            if number == len(steps):
                steps.append([])
            for keys in batches[number * sampler.mine : (number + 1) * sampler.mine]:
                steps[number].append(tuple(keys))
    assert all(len(step) == batch // micro for step in steps)
    return [set(step) for step in steps]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("first_step", [0, 3, 4, 6])
def test_any_world_size_reads_the_same_micro_batches(world: int, first_step: int) -> None:
    assert _dealt(world, first_step) == _dealt(1, 0)[first_step:]


def test_an_epoch_holds_each_image_at_most_once_and_shuffles_anew() -> None:
    steps = _dealt(2, 0)
    for epoch in (0, 1):
        positions = Counter(
            position for step in steps for micro in step for e, position in micro if e == epoch
        )
        assert len(positions) == 96
        assert set(positions.values()) == {1}
    assert {p for m in steps[0] for _, p in m} != {p for m in steps[4] for _, p in m}


def test_seeds_and_epochs_shuffle_apart_and_always_the_same_way() -> None:
    """As every checkpoint that was ever saved counts on it."""

    def order(seed: int, epoch: int) -> list[int]:
        sampler = ResumableSampler(8, 2, 2, 0, 1, seed)
        sampler.set_position(epoch, 0)
        return [position for keys in sampler for _, position in keys]

    assert order(0, 0) == [4, 0, 7, 3, 2, 5, 1, 6]
    assert order(3, 2) == [2, 3, 5, 7, 4, 0, 6, 1]
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


@pytest.mark.parametrize(("world", "mine"), [(1, [5]), (2, [3, 2]), (4, [2, 1, 1, 1])])
def test_a_rank_knows_how_much_it_reads(world: int, mine: list[int]) -> None:
    for rank in range(world):
        sampler = ResumableSampler(47, 10, 2, rank, world, seed=0)
        assert (sampler.per_step, sampler.steps, sampler.mine) == (5, 4, mine[rank])
        assert len(sampler) == 4 * mine[rank] == len(list(sampler))
        sampler.set_position(1, 3)
        assert len(sampler) == mine[rank] == len(list(sampler))
        assert (sampler.rank, sampler.num_replicas, sampler.epoch) == (rank, world, 1)
        assert all(epoch == 1 for keys in sampler for epoch, _ in keys)


def test_epochs_begin_in_the_middle_once() -> None:
    sampler = ResumableSampler(8, 2, 2, 0, 1, seed=0)
    keys = [key for keys in Epochs(sampler, 5, 3) for key in keys]
    assert [epoch for epoch, _ in keys] == [1] * 6 + [2] * 8
    assert not list(Epochs(sampler, 12, 3))
