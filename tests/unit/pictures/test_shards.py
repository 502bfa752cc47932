"""Images in the archives of a packed version: their positions, their damage, their use."""

import json
import os
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.pictures import shards
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.shards import Members, content, members
from kfp_ddp.pictures.splits import Index, splits_of
from kfp_ddp.storage import manifest
from kfp_ddp.training.data.cache import Cache, folder_for
from kfp_ddp.training.data.image_files import examine
from kfp_ddp.training.data.loader import Images, evaluation_batches, evaluation_keys, loader
from kfp_ddp.training.data.sampler import ResumableSampler, windows_of
from kfp_ddp.training.prepare import digest_of
from tests.files import write
from tests.training_ranks import ALONE, dataset, run

SHARD = "shard-00000.tar"
ENDS = r"should end at byte \d+ of .*shard-00000\.tar"
NO_ARCHIVE = r"cannot read the archive .*shard-00000\.tar"
DAMAGED = r"line 3 of .*_MANIFEST\.jsonl is damaged"
VICTIM = "train/class1/0004.png"
LONG = f"train/a/{'x' * 150}.png"
FILES = {
    LONG: b"long",
    "train/a/1.png": b"one",
    "train/a/äö ü.png": b"umlaut",
    "train/b/2.png": b"two" * 900,
    "val/b/3.png": b"",
}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A sync of `FILES` with pack=tar."""
    for name, data in FILES.items():
        path = tmp_path / "bucket" / name
        write(path, data)
    done = sync(str(tmp_path / "bucket"), tmp_path / "data", SyncOptions(pack="tar"))
    return done.path


def read(found: Members, name: str) -> bytes:
    at = found.names.index(name)
    return content(found.slices.where(at, f"{found.slices.root}/{name}"), 10_000)


def listed(root: Path) -> Members:
    found = members(root)
    assert found is not None
    return found


def rewritten(version: Path, number: int, change: Callable[[list[object]], None]) -> None:
    """Change the columns of a line of the manifest."""
    path = version / manifest.NAME
    lines = path.read_text().splitlines()
    row = json.loads(lines[number])
    change(row)
    lines[number] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")


def test_archives_without_a_manifest_are_listed(version: Path, tmp_path: Path) -> None:
    (version / manifest.NAME).unlink()
    (version / "_SUCCESS").unlink()
    found = listed(version)
    assert {name: read(found, name) for name in FILES} == FILES
    with tarfile.open(tmp_path / "data" / "gnu.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(tmp_path / "bucket", ".")
    home = tmp_path / "others"
    home.mkdir()
    (tmp_path / "data" / "gnu.tar").rename(home / "gnu.tar")
    found = listed(home)
    assert {name: read(found, name) for name in FILES} == FILES


def test_plain_folders_are_not_packed(tmp_path: Path, version: Path) -> None:
    assert members(tmp_path / "bucket") is None
    assert members(tmp_path / "nothing") is None
    (tmp_path / "bucket" / "x.tar").write_bytes(b"beside the folders")
    assert members(tmp_path / "bucket") is None


def _linked(version: Path) -> None:
    (version / SHARD).rename(version / "elsewhere")
    (version / SHARD).symlink_to(version / "elsewhere")


def _column(number: Any, value: Any) -> Callable[[Path], None]:
    return lambda version: rewritten(version, 2, lambda row: row.__setitem__(number, value))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda version: os.truncate(version / SHARD, 2048), rf"{ENDS}, which has 2048: .*full"),
        (lambda version: (version / SHARD).unlink(), rf"{NO_ARCHIVE} \(No such file"),
        (_linked, NO_ARCHIVE),
        (_column(7, 1 << 40), rf"^train/a/.*png {ENDS}"),
        (_column(7, 0), r"^train/a/.*png should .*shard-00000\.tar"),
        (_column(6, "../../secret.tar"), DAMAGED),
        (_column(slice(5, None), []), DAMAGED),
    ],
)
def test_damage_is_one_line(version: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(version)
    with pytest.raises(InputError, match=message):
        members(version)


@pytest.mark.parametrize("kind", ["no archive at all", "cut"])
def test_damaged_archive_alone_is_refused(version: Path, tmp_path: Path, kind: str) -> None:
    data = (version / SHARD).read_bytes()
    home = tmp_path / "others"
    write(home / "a.tar", data[:5000] if kind == "cut" else b"no archive" * 100)
    with pytest.raises(InputError, match=r"a\.tar"):
        members(home)


def test_other_header_of_a_member_is_refused(version: Path) -> None:
    found = listed(version)
    path = version / SHARD
    whole = path.read_bytes()
    where = found.slices.where(found.names.index("train/b/2.png"), "train/b/2.png")
    for at, byte in ((where.offset - 512, b"z"), (where.offset - 512 + 130, b"7")):
        path.write_bytes(whole[:at] + byte + whole[at + 1 :])
        with pytest.raises(ValueError, match="its header in the archive differs"):
            read(found, "train/b/2.png")
    path.write_bytes(whole[: where.offset + 10])
    with pytest.raises(ValueError, match="truncated"):
        read(found, "train/b/2.png")
    with pytest.raises(ValueError, match="larger"):
        content(where, 2000)


def test_threads_open_an_archive_at_the_same_time(version: Path) -> None:
    shard = str(version / SHARD)
    expected = Path(shard).read_bytes()[:100]
    for _ in range(20):
        shards._opened.cache_clear()
        together = threading.Barrier(6)

        def read_first(together: threading.Barrier = together) -> bytes:
            together.wait()
            return shards.pread(shard, 100, 0)

        with ThreadPoolExecutor(6) as pool:
            found = [pool.submit(read_first) for _ in range(6)]
        assert [one.result() for one in found] == [expected] * 6


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return dataset(tmp_path / "folders", train=12, val=9)


@pytest.fixture
def packed(folders: Path, tmp_path: Path) -> Path:
    return sync(str(folders), tmp_path / "claim", SyncOptions(pack="tar")).path


def at(index: Index, name: str) -> int:
    return next(i for i, path in enumerate(index.paths) if path.endswith(name))


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_read_windows_of_archives_in_order(packed: Path, workers: int) -> None:
    index, config = splits_of(packed).train, run(packed, batch_size=4, shuffle_buffer_mb=0.001)
    windows = windows_of(index.slices, config)
    sampler = ResumableSampler(len(index), 4, 2, 0, 1, 0, windows)
    images = Images(index, config, for_training=True)
    got = [batch.indices for batch in loader(images, sampler.batches(0, 2), workers, pin=False)]
    assert got == [[position for _, position in keys] for keys in sampler.batches(0, 2)]


@pytest.mark.parametrize("world", [1, 2, 4, 9, 10])
def test_each_image_is_evaluated_once_on_any_ranks(packed: Path, world: int) -> None:
    index = splits_of(packed).val
    shares = [list(evaluation_keys(index, 4, rank, world)) for rank in range(world)]
    seen = [position for share in shares for keys in share for _, position in keys]
    assert sorted(seen) == list(range(9))
    ends = [keys.ahead for share in shares for keys in share]
    assert all(len(pieces) == 1 for pieces in ends), "a batch is one piece of the archive"
    batches = evaluation_batches(index, 8, 4)
    assert sorted(at for batch in batches for at in batch.indices) == list(range(9))


def _overwritten(at: int, data: bytes) -> Callable[[Path, int], None]:
    def damage(file: Path, offset: int) -> None:
        with file.open("r+b") as archive:
            archive.seek(offset + at)
            archive.write(data)

    return damage


@pytest.mark.parametrize(
    ("damage", "why", "spoilt"),
    [
        (_overwritten(-512, b"another"), "its header in the archive differs", 1),
        (_overwritten(0, b"no image"), "", 1),
        (lambda file, offset: os.truncate(file, offset + 20), "the archive is truncated", 9),
    ],
)
def test_member_damaged_later_is_named_or_skipped(
    packed: Path, damage: Callable[[Path, int], None], why: str, spoilt: int
) -> None:
    splits = splits_of(packed)
    index = splits.train
    position = at(index, VICTIM)
    damage(packed / SHARD, index.where(position).offset)
    error = Images(index, run(packed), True).__getitems__([(0, position)]).error
    assert error.startswith(f"cannot decode {VICTIM} in {packed.resolve() / SHARD} ({why}")
    assert "\n" not in error
    with pytest.raises(InputError, match=rf"^cannot decode {VICTIM} in .*{SHARD}"):
        examine(index.where, range(position, len(index)), run(packed))
    skipping = run(packed, on_bad_image="skip")
    found = examine(index.where, range(len(index)), skipping)
    assert 1 <= len(found.broken) <= spoilt
    batch = Images(index, skipping, True).__getitems__([(0, position)])
    assert (batch.skipped, batch.error) == ([position], "")
    left = evaluation_batches(index, 8, 4, reading=Reading("skip"))
    assert sum(len(batch.targets) for batch in left) == len(index) - len(found.broken)


def test_cache_has_the_images_of_archives(packed: Path, tmp_path: Path) -> None:
    index, config = splits_of(packed).train, run(packed, cache_dir=str(tmp_path))
    folder = folder_for(config, [index, index.only([])])
    assert folder is not None
    cache = Cache(folder, "train", len(index), 1)
    assert cache.build(index.where, config, True, 0).checked == 12
    keys = [(3, position) for position in range(12)]
    read, cached = (Images(index, config, True, one).__getitems__(keys) for one in (None, cache))
    assert torch.equal(read.images, cached.images)
    assert folder_for(config, [index.only(range(11)), index.only([])]) != folder
    os.utime(packed / SHARD, ns=(1, 1))
    assert folder_for(config, [index, index.only([])]) != folder


def test_digest_is_of_images_and_positions(folders: Path, packed: Path, tmp_path: Path) -> None:
    plain, archived = (splits_of(data).train for data in (folders, packed))
    digests = {digest_of(index, ALONE) for index in (plain, archived)}
    again = sync(str(folders), tmp_path / "another", SyncOptions(pack="tar")).path
    digests.add(digest_of(splits_of(again).train, ALONE))
    assert len(digests) == 2, "the same wherever the claim is mounted"
    (folders / "train/class0/a.png").write_bytes((folders / VICTIM).read_bytes())
    moved = sync(str(folders), tmp_path / "another", SyncOptions(pack="tar")).path
    (folders / "train/class0/a.png").unlink()
    shifted = splits_of(moved).train
    shifted = shifted.only([i for i in range(13) if not shifted.paths[i].endswith("/a.png")])
    assert len(digests | {digest_of(shifted, ALONE)}) == 3
