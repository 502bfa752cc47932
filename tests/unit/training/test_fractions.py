"""Large JPEGs are decoded at a fraction of their sides where the network's input allows it."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kfp_ddp.pictures import decoder
from kfp_ddp.pictures.header import frame_of
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training.data import loader, transforms
from kfp_ddp.training.data.cache import Cache
from kfp_ddp.training.data.image_files import Need, Needed, decode_part
from kfp_ddp.training.data.loader import Images
from kfp_ddp.training.spec.config import TrainConfig

SIZE = 32
_MIRRORED = (2, 3, 4, 6, 7, 8)


def run(root: Path, **fields: Any) -> TrainConfig:
    settings = {"data": str(root), "output_dir": str(root / "out"), "model": "resnet18"}
    return TrainConfig.create(**{**settings, "image_size": SIZE, "workers": 0, **fields})


def divided(by: int) -> Needed:
    return lambda height, _: Need(by, height)


def photograph(seed: int, width: int, height: int, **options: Any) -> bytes:
    """A JPEG with edges, fine grain and large areas."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = pixels + draw.normal(0, 4, pixels.shape).astype(np.int16)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = draw.integers(0, 256, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", **options)
    return file.getvalue()


def whole_of(content: bytes) -> torch.Tensor:
    return torch.from_numpy(decoder.decode(content)[0]).permute(2, 0, 1)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Two classes of two large photographs each."""
    for number in range(4):
        folder = tmp_path / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(photograph(number, 480, 360, quality=90))
    return tmp_path / "train"


def test_partial_decoding_is_near_the_full(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = transforms._crop

    def on_a_grid(*arguments: Any) -> transforms.Crop:
        return transforms.Crop(*(side // 8 * 8 for side in drawn(*arguments)))

    # Elsewhere the crop of a fraction begins and ends up to half of its pixels away.
    monkeypatch.setattr(transforms, "_crop", on_a_grid)
    index, config = scan(split), run(split)
    keys = [(epoch, position) for epoch in range(4) for position in range(4)]
    small = Images(index, config, for_training=True).__getitems__(keys).images.float()
    assert torch.equal(small, Images(index, config, True).__getitems__(keys).images.float())
    by = {transforms.needed(config, *key, 360, 480).divisor for key in keys}
    assert by == {2, 4}
    monkeypatch.setattr(transforms, "needed", lambda *_: Need(1, 360))
    whole = Images(index, config, for_training=True).__getitems__(keys).images.float()
    errors = (small - whole).flatten(1)
    assert errors.abs().mean(1).max() < 1.5, "of 255, on average"
    assert errors.square().mean(1).sqrt().max() < 3
    assert errors.mean(1).abs().max() < 0.3, "as bright"
    assert not torch.equal(small, whole)


@pytest.mark.parametrize(
    ("height", "width", "fields", "expected"),
    [
        *((95, 200, {}, 1), (96, 96, {}, 2), (192, 192, {}, 4), (4000, 3000, {}, 8)),
        *((384, 384, {"image_size": 128}, 2), (384, 384, {"augment": "shift"}, 1)),
        (384, 384, {"augment": "none"}, 1),
    ],
)
def test_fraction_keeps_one_and_a_half_times_the_pixels_of_the_input(
    tmp_path: Path, height: int, width: int, fields: dict[str, Any], expected: int
) -> None:
    config = run(tmp_path, crop_min_area=1, **fields)
    found = {transforms.needed(config, epoch, 0, height, width).divisor for epoch in range(9)}
    if height == width:
        assert max(found) == expected, "a crop of another aspect is narrower"
    else:
        assert found <= {expected, expected // 2}


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("by", [2, 4, 8])
def test_fraction_is_rotated_and_cut_like_the_full_image(orientation: int, by: int) -> None:
    draw = random.Random(f"{orientation} {by}")
    width, height = draw.randint(150, 260), draw.randint(150, 260)
    if orientation in _MIRRORED:
        width, height = width // by * by, height // by * by
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "camera", orientation
    options = {"exif": exif.tobytes(), "progressive": draw.random() < 0.5, "quality": 95}
    content = photograph(orientation, width, height, **options)
    frame = frame_of(content)
    assert frame is not None
    assert frame[:4] == (height, width, 3, orientation or 1)
    assert frame.baseline is not options["progressive"]
    whole = whole_of(content)
    asked: list[tuple[int, int]] = []

    def needed(*sides: int) -> Need:
        asked.append((sides[0], sides[1]))
        return Need(by, sides[0])

    small = decode_part(content, needed)
    assert small is not None
    assert small.divisor == by
    assert asked == [tuple(whole.shape[1:])] == [small[1:3]]
    assert small.image.shape[1:] == tuple(-(-side // by) for side in whole.shape[1:])
    crop = transforms.Crop(4 * by, 2 * by, 96, 96)
    size = 64 // by
    divided = transforms._in_divided(crop, small.image, by, inside=True)
    parts = (whole, crop), (small.image, divided)
    one, two = (
        transforms.resize(image[:, top : top + high, left : left + wide], size, size).float()
        for image, (top, left, high, wide) in parts
    )
    assert (one - two).abs().mean() < 4, "where it is turned otherwise, 20"


@pytest.mark.parametrize("subsampling", range(3))
@pytest.mark.parametrize("options", [{}, {"restart_marker_rows": 1}, {"progressive": True}])
def test_rows_below_a_crop_are_not_decoded(subsampling: int, options: dict[str, Any]) -> None:
    draw = random.Random(str((subsampling, options)))
    for seed in range(12):
        width, height = draw.randint(90, 160), draw.randint(90, 160)
        content = photograph(seed, width, height, subsampling=subsampling, **options)
        whole = whole_of(content)
        for rows in (*draw.sample(range(1, height), 8), height - 1, height):
            found = decode_part(content, lambda *_, rows=rows: Need(1, rows))
            assert found is not None
            assert found[1:] == (height, width, 1, True)
            there = found.image.shape[1]
            assert rows <= there
            assert there == (height if options.get("progressive") else min(height, rows + 2))
            assert torch.equal(found.image[:, :rows], whole[:, :rows]), (seed, rows)


@pytest.mark.parametrize(("size", "lost", "divided"), [(160, 9000, False), (SIZE, 30_000, True)])
def test_truncated_image_is_named(split: Path, size: int, lost: int, divided: bool) -> None:
    """Whether it would be decoded in part by rows, or at a fraction of its size."""
    index, config = scan(split), run(split, image_size=size)
    path = Path(index.paths[1])
    path.write_bytes(path.read_bytes()[:-lost])
    images = Images(index, config, for_training=True)
    needs = [transforms.needed(config, epoch, 1, 360, 480) for epoch in range(5)]
    assert min(need.rows for need in needs) < 200
    assert (min(need.divisor for need in needs) > 1) is divided
    for epoch in range(5):
        error = images.__getitems__([(epoch, 1)]).error
        assert error.startswith(f"cannot decode {path} (image file is truncated")


def test_mirrored_image_is_divided_only_without_a_remainder() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for height, width, by in ((160, 240, 8), (164, 240, 4), (160, 242, 2), (161, 240, 1)):
        small = decode_part(photograph(0, width, height, exif=exif.tobytes()), divided(8))
        assert small is not None
        assert (small.image.shape[1:], small.divisor) == ((width // by, height // by), by)


def test_complete_decoding(split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("decoded at a fraction")

    monkeypatch.setattr(loader, "read_part", never)
    index = scan(split)
    Images(index, run(split), for_training=False).__getitems__([(0, 0)])
    strict = Images(index, run(split, images="strict"), for_training=True)
    assert "not square" in strict.__getitems__([(0, 0)]).error
    cache = Cache(tmp_path / "cache", "train", 4, parts=1)
    cache.build(index.where, run(split), True, 0)
    Images(index, run(split), True, cache).__getitems__([(0, 0)])


def test_damaged_image_is_left_to_the_full_decoder() -> None:
    draw = random.Random(1)
    exif = Image.Exif()
    exif[0x0112], exif[0x011A], exif[0x0128] = 3, 72.0, 2
    whole = photograph(0, 64, 48, exif=exif.tobytes(), progressive=True)
    came = 0
    for case in range(400):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 5)):
            damaged[draw.randrange(2, draw.choice((150, len(whole))))] = draw.choice((0, 4, 255))
        frame = frame_of(bytes(damaged))
        small = decode_part(bytes(damaged), divided(2))
        came += small is not None
        if small is not None:
            assert frame is not None
            assert small.image.numel() * 4 == frame.height * frame.width * 3, case
    assert 20 < came < 380
