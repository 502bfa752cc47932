"""The images that each rank reads in each step, from plain files and from archives."""

import dataclasses
from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.pictures.shards import PIECE, Slices, pieces, runs, sort_by_offset
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data.sampler import Classes, Key, Keys, ResumableSampler, Windows, classes_of
from kfp_ddp.training.spec.config import TrainConfig

IMAGES, BATCH, MICRO = 2000, 24, 4
SIZE = PIECE // 10


def archives(images: int = IMAGES, size: int = SIZE) -> Slices:
    """Three archives whose images are in the index in another order than they are stored."""
    slices = Slices("/v", ("/v/0", "/v/1", "/v/2"), array("I"), array("Q"), array("Q"))
    for number in range(images):
        at = number * 7 % images
        slices.shards.append(at * 3 // images)
        slices.offsets.append(512 + at * (size + 512))
        slices.sizes.append(size)
    return slices


def windows(buffer: int = IMAGES * SIZE // 5) -> Windows:
    return Windows(archives(), BATCH, buffer)


RARE = (0,) * 80 + (1,) * 16 + (3,) * 5
"""Classes of 101 images; class 2 has none."""


def steps_of_ranks(
    world: int, first_step: int = 0, micro: int = MICRO, packed: bool = False, sampling: str = ""
) -> list[list[tuple[Key, ...]]]:
    """The micro-batches of each step of two epochs over all ranks, in the global order."""
    steps: list[dict[int, tuple[Key, ...]]] = []
    images = IMAGES if packed else 101
    order = windows() if packed else None, Classes(RARE, sampling) if sampling else None
    for rank in range(world):
        sampler = ResumableSampler(images, BATCH, micro, rank, world, 3, *order)
        for number, keys in enumerate(sampler.batches(first_step, 2)):
            step, own = divmod(number, sampler.mine)
            steps += [{}] * (step + 1 - len(steps))
            steps[step] = steps[step] | {rank + own * world: tuple(keys)}
    return [[step[slot] for slot in sorted(step)] for step in steps]


@pytest.mark.parametrize(
    ("packed", "sampling", "world", "first_step"),
    [
        *((False, "", world, step) for world in (1, 2, 3, 6) for step in (0, 3, 4, 6)),
        *((False, "balanced", world, step) for world in (1, 2, 3) for step in (0, 3, 4, 6)),
        *((False, "sqrt", world, 3) for world in (1, 2, 3)),
        *((True, "", world, step) for world in (2, 3, 6) for step in (0, 5, 82, 120)),
    ],
)
def test_order_of_resumes(packed: bool, sampling: str, world: int, first_step: int) -> None:
    steps = steps_of_ranks(world, first_step, packed=packed, sampling=sampling)
    assert all(len(step) == BATCH // MICRO for step in steps)
    assert steps == steps_of_ranks(1, packed=packed, sampling=sampling)[first_step:]


@pytest.mark.parametrize(
    ("sampling", "expected"), [("balanced", [34, 33, 34]), ("sqrt", [60, 26, 15])]
)
def test_classes_have_their_shares_of_an_epoch(sampling: str, expected: list[int]) -> None:
    roots = [n**0.5 if sampling == "sqrt" else 1 for n in (80, 16, 5)]
    assert expected == pytest.approx([root / sum(roots) * 101 for root in roots], abs=1)
    sampler = ResumableSampler(101, 1, 1, 0, 1, 3, classes=Classes(RARE, sampling))
    both = [[key for keys in sampler.epoch(epoch) for _, key in keys] for epoch in (0, 1)]
    assert both[0] != both[1]
    for drawn in both:
        assert len(set(drawn)) == 101, "a repetition has a number of its own"
        uses = Counter(key % 101 for key in drawn)
        by_class = [[uses[at] for at in range(101) if RARE[at] == label] for label in (0, 1, 3)]
        assert [sum(counts) for counts in by_class] == expected
        assert all(max(counts) - min(counts) <= 1 for counts in by_class)


def test_archives_are_not_sampled_by_class() -> None:
    index = Index(Path(), ("a", "b"), ("x", "y"), (0, 1))
    config = TrainConfig.create(data="/d", output_dir="/o", sampling="sqrt")
    assert classes_of(index, config) is not None
    packed = dataclasses.replace(index, slices=archives(2))
    with pytest.raises(InputError, match=r"sampling=sqrt .* pack=none"):
        classes_of(packed, config)


def test_global_batch_does_not_depend_on_the_micro_batch() -> None:
    joined = [
        [[key for part in step for key in part] for step in steps_of_ranks(2, 0, micro, True)]
        for micro in (2, 4, 12)
    ]
    assert joined[0] == joined[1] == joined[2]


@pytest.mark.parametrize("packed", [False, True])
def test_epoch_has_each_image_at_most_once_in_a_new_order(packed: bool) -> None:
    both = [[key for micro in step for key in micro] for step in steps_of_ranks(1, packed=packed)]
    steps = len(both) // 2
    first, second = (
        Counter(position for step in epoch for _, position in step)
        for epoch in (both[:steps], both[steps:])
    )
    assert len(first) == len(second) == steps * BATCH
    assert set(first) != set(second), "other images are left out"
    assert both[0] != both[steps]


def test_order_of_existing_checkpoints_stays() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ResumableSampler(8, 2, 2, 0, 1, seed)
        return [position for keys in sampler.epoch(epoch) for _, position in keys]

    assert order(0, 0) == [4, 0, 7, 3, 2, 5, 1, 6]
    assert order(3, 2) == [2, 3, 5, 7, 4, 0, 6, 1]
    assert len(order(2**63 - 1, 0)) == 8
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    packed = Windows(archives(400), 8, 200 * SIZE).epoch(torch.Generator().manual_seed(1)).order
    assert packed.shape == (50, 8)
    assert packed[[0, 49]].tolist() == [
        [312, 112, 339, 163, 8, 2, 323, 190],
        [44, 367, 363, 0, 187, 295, 79, 22],
    ]


@pytest.mark.parametrize(("world", "mine"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_ranks_have_equal_numbers_of_micro_batches(world: int, mine: int) -> None:
    for rank in range(world):
        sampler = ResumableSampler(53, 12, 2, rank, world, seed=0)
        assert (sampler.per_step, sampler.steps, sampler.mine) == (6, 4, mine)
        assert len(list(sampler.epoch(0))) == 4 * mine
        assert len(list(sampler.epoch(1, 3))) == mine


def test_one_window_over_all_images_gives_the_order_of_plain_files() -> None:
    plain = ResumableSampler(IMAGES, BATCH, MICRO, 0, 1, 3)
    packed = ResumableSampler(IMAGES, BATCH, MICRO, 0, 1, 3, windows(IMAGES * SIZE))
    assert [list(keys) for keys in packed.epoch(0)] == list(plain.epoch(0))


def test_pieces_end_with_their_archive_and_before_large_gaps() -> None:
    slices = archives()
    stored = sort_by_offset(slices)
    ranges = runs(slices, stored)
    assert [position for run in ranges for position in run] == list(range(IMAGES))
    assert max(map(len, ranges)) == 9, "with their headers ten are more than a piece"
    assert all(len({slices.shards[stored[at]] for at in run}) == 1 for run in ranges)
    assert pieces(slices, [stored[0], stored[2], stored[9]]) == [
        (stored[0], stored[2]),
        (stored[9], stored[9]),
    ]
    assert pieces(slices, []) == []


@pytest.mark.parametrize("first_step", [0, 17])
@pytest.mark.parametrize("world", [1, 2])
def test_images_are_read_ahead_and_each_piece_by_one_rank(first_step: int, world: int) -> None:
    """Except those of the first micro-batches of a start."""
    slices = archives()
    stored = sort_by_offset(slices)
    at = {position: number for number, position in enumerate(stored)}
    read = [set[int]() for _ in range(world)]
    for rank in range(world):
        sampler = ResumableSampler(IMAGES, BATCH, 12, rank, world, 3, windows())
        for number, keys in enumerate(sampler.epoch(0, first_step)):
            assert isinstance(keys, Keys)
            for first, last in keys.ahead:
                run = stored[at[first] : at[last] + 1]
                assert len(run) <= 9
                assert read[rank].isdisjoint(run), "read once"
                read[rank].update(run)
            if number >= 16:
                assert read[rank].issuperset(position for _, position in keys)
    assert sum(map(len, read)) == len(set.union(*read)), "each piece on one rank"


def test_at_most_two_windows_are_in_memory() -> None:
    sampler = ResumableSampler(IMAGES, BATCH, BATCH, 0, 1, 3, windows())
    at = {position: number for number, position in enumerate(sort_by_offset(archives()))}
    images = most = 0
    for keys in sampler.epoch(0):
        assert isinstance(keys, Keys)
        images += sum(at[last] - at[first] + 1 for first, last in keys.ahead)
        images -= len(keys)
        most = max(most, images)
    assert IMAGES // 5 <= most <= 2 * IMAGES // 5
