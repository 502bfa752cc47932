"""Images in archives are trained on, cached and evaluated as files of their own are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.training.cache import Cache, folder_for
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Images, evaluation_batches, evaluation_keys, loader
from kfp_ddp.training.images import examine
from kfp_ddp.training.prepare import digest_of
from kfp_ddp.training.sampler import ResumableSampler, windows_of
from kfp_ddp.training.splits import Index, splits_of
from tests.training_ranks import ALONE, dataset

SHARD = "shard-00000.tar"
VICTIM = "train/class1/0004.png"


def run(data: Path, **fields: Any) -> TrainConfig:
    settings = {"data": str(data), "output_dir": str(data / "out"), "model": "cifar_resnet8"}
    return TrainConfig.create(**{**settings, "image_size": 8, "workers": 0, **fields})


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return dataset(tmp_path / "folders", train=12, val=9)


@pytest.fixture
def version(folders: Path, tmp_path: Path) -> Path:
    return sync(str(folders), tmp_path / "claim", Options(pack="tar")).path


def at(index: Index, name: str) -> int:
    return next(i for i, path in enumerate(index.paths) if path.endswith(name))


def test_batches_equal_those_of_folders(folders: Path, version: Path) -> None:
    plain, packed = (splits_of(data) for data in (folders, version))
    assert packed.train.targets == plain.train.targets
    for one, other in ((plain.train, packed.train), (plain.val, packed.val)):
        keys = [(1, position) for position in range(len(one))]
        batches = [Images(i, run(version), True).__getitems__(keys) for i in (one, other)]
        assert torch.equal(batches[0].images, batches[1].images)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_read_windows_of_archives_in_order(version: Path, workers: int) -> None:
    index, config = splits_of(version).train, run(version, batch_size=4, shuffle_buffer_mb=0.001)
    windows = windows_of(index.slices, config)
    sampler = ResumableSampler(len(index), 4, 2, 0, 1, 0, windows)
    images = Images(index, config, for_training=True)
    got = [batch.indices for batch in loader(images, sampler.batches(0, 2), workers, pin=False)]
    assert got == [[position for _, position in keys] for keys in sampler.batches(0, 2)]


@pytest.mark.parametrize("world", [1, 2, 4, 9, 10])
def test_each_image_is_evaluated_once_on_any_ranks(version: Path, world: int) -> None:
    index = splits_of(version).val
    shares = [list(evaluation_keys(index, 4, rank, world)) for rank in range(world)]
    seen = [position for share in shares for keys in share for _, position in keys]
    assert sorted(seen) == list(range(9))
    ends = [keys.ahead for share in shares for keys in share]
    assert all(len(pieces) == 1 for pieces in ends), "a batch is one piece of the archive"
    batches = [b for rank in range(world) for b in evaluation_batches(index, 8, 4, rank, world)]
    assert sorted(torch.cat([positions for _, _, positions in batches]).tolist()) == list(range(9))


def _another_header(file: Path, offset: int) -> None:
    with file.open("r+b") as archive:
        archive.seek(offset - 512)
        archive.write(b"another")


def _no_image(file: Path, offset: int) -> None:
    with file.open("r+b") as archive:
        archive.seek(offset)
        archive.write(b"no image")


def _cut(file: Path, offset: int) -> None:
    os.truncate(file, offset + 20)


@pytest.mark.parametrize(
    ("damage", "why", "spoilt"),
    [
        (_another_header, "its header in the archive differs", 1),
        (_no_image, "", 1),
        (_cut, "the archive is truncated", 9),
    ],
)
def test_member_damaged_later_is_named_or_skipped(
    version: Path, damage: Callable[[Path, int], None], why: str, spoilt: int
) -> None:
    splits = splits_of(version)
    index = splits.train
    position = at(index, VICTIM)
    damage(version / SHARD, index.where(position).offset)
    error = Images(index, run(version), True).__getitems__([(0, position)]).error
    assert error.startswith(f"cannot decode {VICTIM} in {version.resolve() / SHARD} ({why}")
    assert "\n" not in error
    with pytest.raises(InputError, match=rf"^cannot decode {VICTIM} in .*{SHARD}"):
        examine(index.where, range(position, len(index)), run(version))
    skipping = run(version, on_bad_image="skip")
    found = examine(index.where, range(len(index)), skipping)
    assert 1 <= found.broken <= spoilt
    batch = Images(index, skipping, True).__getitems__([(0, position)])
    assert (batch.skipped, batch.error) == (1, "")
    left = evaluation_batches(index, 8, 4, on_bad_image="skip")
    assert sum(len(targets) for _, targets, _ in left) == len(index) - found.broken


def test_cache_has_the_images_of_archives(version: Path, tmp_path: Path) -> None:
    index, config = splits_of(version).train, run(version, cache_dir=str(tmp_path))
    folder = folder_for(config, [index, index.only([])])
    assert folder is not None
    cache = Cache(folder, "train", len(index), 1)
    assert cache.build(index.where, config, True, 0).checked == 12
    keys = [(3, position) for position in range(12)]
    read, cached = (Images(index, config, True, one).__getitems__(keys) for one in (None, cache))
    assert torch.equal(read.images, cached.images)
    assert folder_for(config, [index.only(range(11)), index.only([])]) != folder
    os.utime(version / SHARD, ns=(1, 1))
    assert folder_for(config, [index, index.only([])]) != folder


def test_digest_depends_on_images_and_their_position(
    folders: Path, version: Path, tmp_path: Path
) -> None:
    plain, packed = (splits_of(data).train for data in (folders, version))
    digests = {digest_of(index, ALONE) for index in (plain, packed)}
    again = sync(str(folders), tmp_path / "another", Options(pack="tar")).path
    digests.add(digest_of(splits_of(again).train, ALONE))
    assert len(digests) == 2, "the same wherever the claim is mounted"
    (folders / "train/class0/a.png").write_bytes((folders / VICTIM).read_bytes())
    moved = sync(str(folders), tmp_path / "another", Options(pack="tar")).path
    (folders / "train/class0/a.png").unlink()
    shifted = splits_of(moved).train
    shifted = shifted.only([i for i in range(13) if not shifted.paths[i].endswith("/a.png")])
    assert len(digests | {digest_of(shifted, ALONE)}) == 3
