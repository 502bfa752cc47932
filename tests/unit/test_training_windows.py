"""In which order the images of archives are trained on, and what is read ahead for them."""

from array import array
from collections import Counter

import pytest
import torch

from kfp_ddp.training.sampler import Epochs, Key, Keys, ResumableSampler, Windows
from kfp_ddp.training.shards import PIECE, Slices, in_store_order, pieces, runs

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


def dealt(world: int, first_step: int = 0, micro: int = MICRO) -> list[list[tuple[Key, ...]]]:
    """The micro-batches of each step of two epochs, as all ranks together read them."""
    steps: list[dict[int, tuple[Key, ...]]] = []
    for rank in range(world):
        sampler = ResumableSampler(IMAGES, BATCH, micro, rank, world, 3, windows())
        for number, keys in enumerate(Epochs(sampler, first_step, 2)):
            step, own = divmod(number, sampler.mine)
            steps += [{}] * (step + 1 - len(steps))
            steps[step] = steps[step] | {rank + own * world: tuple(keys)}
    return [[step[slot] for slot in sorted(step)] for step in steps]


@pytest.mark.parametrize("world", [2, 3, 6])
@pytest.mark.parametrize("first_step", [0, 5, 82, 120])
def test_the_order_is_the_same_on_any_ranks_and_after_any_stop(world: int, first_step: int) -> None:
    assert dealt(world, first_step) == dealt(1)[first_step:]


def test_the_global_batch_does_not_depend_on_the_micro_batch() -> None:
    joined = [
        [[key for part in step for key in part] for step in dealt(2, micro=micro)]
        for micro in (2, 4, 12)
    ]
    assert joined[0] == joined[1] == joined[2]


def test_an_epoch_holds_each_image_at_most_once_and_epochs_differ() -> None:
    both = [[key for micro in step for key in micro] for step in dealt(1)]
    steps = IMAGES // BATCH
    first, second = (
        Counter(position for step in epoch for _, position in step)
        for epoch in (both[:steps], both[steps:])
    )
    assert len(first) == len(second) == steps * BATCH
    assert set(first) != set(second), "another rest is left out"
    assert both[0] != both[steps]


def test_the_order_is_the_one_that_checkpoints_count_on() -> None:
    order = Windows(archives(400), 8, 200 * SIZE).epoch(torch.Generator().manual_seed(1)).order
    assert order.shape == (50, 8)
    assert order[[0, 49]].tolist() == [
        [312, 112, 339, 163, 8, 2, 323, 190],
        [44, 367, 363, 0, 187, 295, 79, 22],
    ]


def test_one_window_over_all_gives_the_order_of_plain_files() -> None:
    plain = ResumableSampler(IMAGES, BATCH, MICRO, 0, 1, 3)
    packed = ResumableSampler(IMAGES, BATCH, MICRO, 0, 1, 3, windows(IMAGES * SIZE))
    assert [list(keys) for keys in packed] == list(plain)


def test_pieces_end_with_their_archive_and_before_large_gaps() -> None:
    slices = archives()
    stored = in_store_order(slices)
    found = runs(slices, stored)
    assert [position for run in found for position in run] == list(range(IMAGES))
    assert max(map(len, found)) == 9, "with their headers ten are more than a piece"
    assert all(len({slices.shards[stored[at]] for at in run}) == 1 for run in found)
    assert pieces(slices, [stored[0], stored[2], stored[9]]) == [
        (stored[0], stored[2]),
        (stored[9], stored[9]),
    ]
    assert pieces(slices, []) == []


@pytest.mark.parametrize("first_step", [0, 17])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_trained_on_was_read_before_and_no_rank_reads_anothers(
    first_step: int, world: int
) -> None:
    """But for what the first micro-batches of a start read together."""
    slices = archives()
    stored = in_store_order(slices)
    at = {position: number for number, position in enumerate(stored)}
    rank_of = [set[int]() for _ in range(world)]
    for rank in range(world):
        sampler = ResumableSampler(IMAGES, BATCH, 12, rank, world, 3, windows())
        sampler.set_position(0, first_step)
        for number, keys in enumerate(sampler):
            assert isinstance(keys, Keys)
            for first, last in keys.ahead:
                run = stored[at[first] : at[last] + 1]
                assert len(run) <= 9
                assert rank_of[rank].isdisjoint(run), "read once"
                rank_of[rank].update(run)
            if number >= 16:
                assert rank_of[rank].issuperset(position for _, position in keys)
    assert sum(map(len, rank_of)) == len(set.union(*rank_of)), "each piece on one rank"


def test_no_more_than_two_windows_are_held() -> None:
    sampler = ResumableSampler(IMAGES, BATCH, BATCH, 0, 1, 3, windows())
    at = {position: number for number, position in enumerate(in_store_order(archives()))}
    held = most = 0
    for keys in sampler:
        assert isinstance(keys, Keys)
        held += sum(at[last] - at[first] + 1 for first, last in keys.ahead)
        held -= len(keys)
        most = max(most, held)
    assert IMAGES // 5 <= most <= 2 * IMAGES // 5
