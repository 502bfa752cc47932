"""Images are read, transformed, cached and loaded."""

import functools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.pictures.reading import PADDING, Fit, Reading
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training.data import image_files, loader, transforms
from kfp_ddp.training.data.cache import Cache, folder_for
from kfp_ddp.training.data.image_files import Decoded, examine
from kfp_ddp.training.data.loader import Batch, Images
from kfp_ddp.training.model import networks
from kfp_ddp.training.spec.config import TrainConfig
from tests.training_ranks import ALONE, config, dataset, run, trainer


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Two classes of six images in all that photographs come in."""
    draw = torch.Generator().manual_seed(0)
    modes = ("RGB", "L", "CMYK", "RGBA", "P", "RGB")
    sizes = ((16, 16), (20, 12), (40, 30), (16, 16), (9, 9), (300, 10))
    for number, (mode, size) in enumerate(zip(modes, sizes, strict=True)):
        channels = len(Image.new(mode, (1, 1)).getbands())
        pixels = torch.randint(256, (size[1], size[0], channels), generator=draw)
        content = pixels.to(torch.uint8).numpy().tobytes()
        image = Image.frombytes("L" if mode == "P" else mode, size, content).convert(mode)
        folder = tmp_path / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.{'jpg' if mode == 'CMYK' else 'png'}")
    return tmp_path / "train"


def test_examine_counts_unusual_images_and_strict_refuses_them(split: Path) -> None:
    index = scan(split)
    found = examine(index.where, range(6), run(split))
    assert (found.checked, found.broken) == (6, ())
    assert found.not_rgb >= 3
    with pytest.raises(InputError, match=r"2\.jpg is not RGB"):
        examine(index.where, range(6), run(split, images="strict"))


def test_skipped_image_is_replaced_in_training_and_left_out_in_evaluation(split: Path) -> None:
    index = scan(split)
    Path(index.paths[3]).write_bytes(b"broken")
    config = run(split, on_bad_image="skip")
    keys = [(0, 2), (0, 3 + len(index))]  # as a repeated image of a small class
    trained = Images(index, config, for_training=True).__getitems__(keys)
    assert (trained.skipped, trained.error) == ([3], "")
    assert trained.indices == [2, 4]
    evaluated = Images(index, config, for_training=False).__getitems__([(0, 2), (0, 3)])
    assert evaluated.skipped == [3]
    assert evaluated.indices == [2]
    assert "1.png" in Images(index, run(split), for_training=True).__getitems__(keys).error


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip", "crop", "crop-flip"])
@pytest.mark.parametrize("training", [True, False])
def test_cached_are_as_decoded(split: Path, tmp_path: Path, augment: str, training: bool) -> None:
    """To the bit, but for random crops of images that the cache had to shrink."""
    index = scan(split)
    config = run(split, augment=augment, image_size=48)
    cache = Cache(tmp_path / "cache", "train", len(index), parts=2)
    for part in range(2):
        cache.build(index.where, config, training, part)
    keys = [(3, i) for i in range(6)]
    plain = Images(index, config, training).__getitems__(keys)
    cached = Images(index, config, training, cache).__getitems__(keys)
    assert torch.equal(plain.images, cached.images)
    assert plain.targets == cached.targets


def test_cache_is_of_its_data(split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = scan(split)
    config = run(split, cache_dir=str(tmp_path))
    folder = folder_for(config, [index, index.only([])])
    assert folder is not None
    assert Cache(folder, "train", 6, 1).build(index.where, config, True, 0).checked == 6
    assert Cache(folder, "train", 6, 1).build(index.where, config, True, 0).checked == 0
    with monkeypatch.context() as full:  # by this cache
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        assert folder_for(config, [index, index.only([])]) == folder
        with pytest.raises(StorageError, match="not enough space"):
            folder_for(config, [index, index.only([0])])
    shutil.copy(index.paths[0], index.paths[5])
    assert folder_for(config, [index, index.only([])]) != folder
    names = {
        folder_for(run(split, cache_dir=str(tmp_path), **checks), [index, index.only([])])
        for checks in ({}, {"images": "strict"}, {"on_bad_image": "skip"}, {"max_pixels": 9})
    }
    assert len(names) == 4
    assert folder_for(run(split, cache_gb=0), [index, index.only([])]) is None


def test_cache_that_cannot_be_written_is_refused(split: Path, tmp_path: Path) -> None:
    index = scan(split)
    tmp_path.joinpath("file").touch()
    cache = Cache(tmp_path / "file" / "cache", "train", 6, 1)
    with pytest.raises(StorageError, match="cache_dir"):
        cache.build(index.where, run(split), True, 0)


def _of_everybody(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)


def _of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)


def _of_somewhere_else(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("made", [_of_everybody, _of_another_user, _of_somewhere_else])
def test_shared_cache_is_refused(split: Path, tmp_path: Path, made: Callable[[Path], None]) -> None:
    """A rank would train on what they put there: the folder's name can be worked out by all."""
    if made is _of_another_user and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    index, config = scan(split), run(split, cache_dir=str(tmp_path))
    folder = folder_for(config, [index, index.only([])])
    assert folder is not None
    first = Cache(folder, "train", 6, 1)
    first.build(index.where, config, True, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rename(tmp_path / "kept")
    made(folder)
    for path in (tmp_path / "kept").iterdir():
        shutil.copy(path, folder)
    for use in (
        lambda: Cache(folder, "train", 6, 1).build(index.where, config, True, 0),
        lambda: first.read(0, index.paths[0]),
    ):
        with pytest.raises(StorageError, match=r"writable by other users.* cache_dir"):
            use()


def test_cache_is_on_the_disk(split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = scan(split)
    Path(index.paths[3]).write_bytes(b"broken")
    synced: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(source: str, target: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        assert source == Path(synced[-1]).name
        assert os.stat(source, dir_fd=src_dir_fd).st_size > 0
        replace(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", renamed)
    cache = Cache(tmp_path / "cache", "train", 6, 1)
    cache.build(index.where, run(split, on_bad_image="skip"), True, 0)
    assert len(synced) == 2
    with pytest.raises(InputError, match=r"cannot decode .*1\.png"):
        cache.read(3, index.paths[3])


FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", FORMATS)
def test_pixels_arrive_as_autocast_would_make_them(precision: str, tmp_path: Path) -> None:
    images = torch.randint(256, (4, 5, 7, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    exact, network = networks.normalise(images), networks.build("cifar_resnet8", 3).eval()
    data = dataset(tmp_path / "data", 8, 4)
    loop = trainer(config(data, tmp_path / "run", precision=precision))
    loop.report.metrics.close()
    for moved in (loop.batches(), loop.validation._batches()):
        assert next(moved).images.dtype == FORMATS[precision]
    pixels = loader.pixels_of(loop.config)
    of_cpu = loader.to_device(iter([Batch(images, [1], [0], [], "")]), ALONE.device, pixels)
    scale, shift = (value.view(1, -1, 1, 1) for value in networks.affine())
    for made in (next(of_cpu).images, loader.normalised(images, scale, shift, pixels)):
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(made, exact.to(FORMATS[precision]))
        with loop.learner.autocast:
            assert torch.equal(network(made), network(exact))
    assert loader.pixel_format(precision, model_code="a user's") == torch.float32


def test_first_batch_waits_for_no_other_and_each_later_one_has_the_next_on_its_way() -> None:
    order: list[str] = []

    def note(what: str) -> Callable[[Any], Any]:
        return lambda batch: order.append(f"{what}{batch.indices[0]}") or batch  # type: ignore[func-returns-value]

    batches = (Batch(torch.zeros(0), [], [number], [], "") for number in range(4))
    moved = loader.one_ahead(map(note("load"), batches), note("move"), note("arrive"))
    assert len(list(map(note("step"), moved))) == 4
    begin = "load0 move0 arrive0 step0 load1 move1 arrive1 load2 move2 step1"
    assert order == f"{begin} arrive2 load3 move3 step2 arrive3 step3".split()


def test_each_choice_of_augment_has_its_parts() -> None:
    known = transforms.AUGMENTATIONS.keys() - {transforms.OWN}
    assert known | {"auto"} == {*TrainConfig.choices("augment")}


def test_augmentation_depends_only_on_seed_epoch_and_position(split: Path) -> None:
    index = scan(split)

    def batch(seed: int, epoch: int, position: int = 5) -> torch.Tensor:
        config = run(split, augment="crop-flip", seed=seed)
        came = Images(index, config, for_training=True).__getitems__([(epoch, position)])
        assert came.indices == [5]
        return came.images

    assert torch.equal(batch(0, 1), batch(0, 1))
    assert not torch.equal(batch(0, 1), batch(0, 2))
    assert not torch.equal(batch(0, 1), batch(1, 1))
    again = 5 + len(index)  # the same image once more in this epoch
    assert torch.equal(batch(0, 1, again), batch(0, 1, again))
    assert not torch.equal(batch(0, 1), batch(0, 1, again))


def test_sizes_grow_and_end_at_the_final_one(split: Path) -> None:
    config = run(split, image_size=224, train_image_size=192, start_image_size=128, epochs=16)
    sizes = [transforms.size_of_epoch(config, epoch) for epoch in range(16)]
    assert sizes[0] == 128
    assert sizes == sorted(sizes)
    assert set(sizes) == {128, 160, 192}
    assert sizes[12:] == [192] * 4


def test_evaluation_cuts_the_centre_as_for_imagenet() -> None:
    image = torch.zeros(3, 256, 512, dtype=torch.uint8)
    image[:, 16:240, 144:368] = 255
    assert bool((transforms.evaluate(image, 224) == 255).all())


STRIPE = F.interpolate(torch.arange(12.0).reshape(1, 1, 1, 12), (32, 64), mode="bilinear")
"""A wide image that becomes brighter from left to right."""


@pytest.mark.parametrize("fit", ["pad", "squash"])
def test_the_whole_image_is_seen(fit: Fit) -> None:
    image = (20 * STRIPE[0]).byte().repeat(3, 1, 1)
    for size in (32, 224):
        seen = transforms.evaluate(image, size, Reading(fit=fit))[0].float()
        assert seen[size // 2, [0, -1]].tolist() == [0, 220]
        bar = size // 4 if fit == "pad" else 0
        assert bool((seen[:bar] == PADDING[0]).all())
        assert bool((seen[size - bar :] == PADDING[0]).all())
        rows = seen[bar : size - bar]
        assert bool((rows == rows[0]).all())


@pytest.mark.parametrize(("fit", "allowed"), [("pad", 0.0), ("squash", 3.0)])
def test_a_random_part_is_one_of_what_is_seen(split: Path, fit: Fit, allowed: float) -> None:
    """A part of the image is that of the square which `fit` makes of it, but for resampling."""
    image = (20 * STRIPE[0]).byte().repeat(3, 1, 1)
    square = transforms.evaluate(image, 64, Reading(fit=fit))
    settings: Any = {"augment": "crop-flip", "image_size": 32, "crop_min_area": 0.08}
    seen = set()
    for position in range(60):
        part, expected = (
            transforms.finish(
                Decoded(one, *one.shape[-2:]), run(split, **settings, fit=of), 3, position, False
            )
            for one, of in ((image, fit), (square, "crop"))
        )
        assert (part.float() - expected.float()).abs().max() <= allowed
        seen.add(bool((part == torch.tensor(PADDING)[:, None, None]).all(0).any()))
    assert seen == ({True, False} if fit == "pad" else {False})


# The sharp edge of a bar moves by up to half a pixel.
@pytest.mark.parametrize(("fit", "allowed"), [("crop", 3), ("pad", 8), ("squash", 3)])
@pytest.mark.parametrize("shape", [(900, 300), (300, 900)])
def test_a_part_is_the_same_however_little_is_decoded(
    split: Path, fit: Fit, allowed: float, shape: tuple[int, int], tmp_path: Path
) -> None:
    photograph = Image.radial_gradient("L").resize(shape).convert("RGB")
    photograph.save(tmp_path / "a.jpg", quality=95)
    config = run(split, augment="crop-flip", image_size=32, fit=fit)
    whole = image_files.read(str(tmp_path / "a.jpg"))
    divided = set()
    for position in range(12):
        need = functools.partial(transforms.needed, config, 1, position)
        part = image_files.read_part(str(tmp_path / "a.jpg"), config.reading, need)
        divided.add(part.divisor)
        seen, expected = (
            transforms.finish(decoded, config, 1, position, False)
            for decoded in (part, Decoded(whole, *whole.shape[-2:]))
        )
        assert (seen.float() - expected.float()).abs().mean() < allowed
    assert max(divided) > 1


@pytest.mark.parametrize("crop", [slice(None), slice(5, 60)])
@pytest.mark.parametrize("mirrored", [[], [-1]])
def test_resized_image_is_channels_last(crop: slice, mirrored: list[int]) -> None:
    decoded = torch.randint(0, 256, (64, 80, 3), dtype=torch.uint8).permute(2, 0, 1)
    image = decoded[:, :, crop].flip(mirrored) if mirrored else decoded[:, :, crop]
    small = transforms.resize(image, 40, 40)
    assert small.permute(1, 2, 0).is_contiguous(), "else the batch takes it ten times as slowly"
    apart = F.interpolate(image.contiguous()[None], size=(40, 40), mode="bilinear", antialias=True)
    assert torch.equal(small, apart[0])


@pytest.mark.parametrize("shape", [(1, 5000), (1, 4999), (2, 8001), (9000, 3), (9001, 4)])
def test_line_takes_little_memory(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    with monkeypatch.context() as whole:
        whole.setattr(transforms, "_LINE", 10_000)
        expected = transforms.evaluate(image, 32)
    made: list[int] = []
    resize = transforms.resize

    def counted(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
        made.append(height * width)
        return resize(image, height, width)

    monkeypatch.setattr(transforms, "resize", counted)
    assert torch.equal(transforms.evaluate(image, 32), expected)
    assert max(made) < 20 * 32 * 32
