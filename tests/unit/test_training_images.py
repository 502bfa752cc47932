"""The size of an image is known before a pixel is decoded."""

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torchcodec.decoders import decode_image  # type: ignore[attr-defined]

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Images, evaluation_batches
from kfp_ddp.training.header import pixels_of
from kfp_ddp.training.images import examine, read
from kfp_ddp.training.splits import scan

MODES = {"JPEG": ("RGB", "L", "CMYK"), "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")}
MODES |= {"WEBP": ("RGB", "RGBA"), "GIF": ("P", "L", "RGB")}


def picture(draw: random.Random, kind: str) -> tuple[bytes, int]:
    """A file of a kind, in one of the forms that its encoder has, and its pixels."""
    width, height = draw.randint(1, 70), draw.randint(1, 70)
    mode = draw.choice(MODES[kind])
    frames = 1
    image = Image.effect_noise((width, height), draw.randint(0, 90)).convert(mode)
    options: dict[str, Any] = {}
    if kind == "JPEG":
        options = {
            "progressive": draw.random() < 0.5,
            "quality": draw.randint(1, 95),
            "comment": draw.randbytes(draw.choice((0, 9, 60_000))),
            "restart_marker_rows": draw.randint(0, 2),
        }
        exif = Image.Exif()
        exif[0x0112] = draw.randint(1, 8)
        options |= {"exif": exif.tobytes()} if draw.random() < 0.5 else {}
    if kind == "WEBP":
        options = {"lossless": draw.random() < 0.5}
        options |= {"icc_profile": b"x" * 51} if draw.random() < 0.3 else {}
    if kind in ("WEBP", "GIF") and draw.random() < 0.4:
        frames = draw.randint(2, 4)
        others = [Image.effect_noise((width, height), 90 + i) for i in range(frames - 1)]
        options |= {"save_all": True, "append_images": others, "disposal": 2, "minimize_size": True}
        options.pop("disposal" if kind == "WEBP" else "minimize_size")
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue(), width * height * frames


def checked_again(data: bytearray) -> None:
    """Make a PNG's checksums fit: without them the decoder looks at nothing else."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            return
        body = data[at + 4 : at + 8 + length]
        data[at + 8 + length : at + 12 + length] = struct.pack(">I", zlib.crc32(body))
        at += 12 + length


def decoded(data: bytes) -> int:
    """How many pixels the decoder makes of it; 0 if it refuses."""
    try:
        image = decode_image(data, mode="RGB")
    except (RuntimeError, ValueError):
        return 0
    return image.numel() // 3


@pytest.mark.parametrize("kind", MODES)
def test_header_has_the_pixels_that_the_decoder_makes(kind: str) -> None:
    draw = random.Random(kind)
    for case in range(150):
        data, pixels = picture(draw, kind)
        assert pixels_of(data) == decoded(data) == pixels, (case, kind)


@pytest.mark.parametrize("kind", MODES)
def test_damaged_file_never_decodes_to_more_pixels_than_its_header(kind: str) -> None:
    draw = random.Random(f"damaged {kind}")
    took = 0
    for case in range(500):
        data = bytearray(picture(draw, kind)[0])
        for _ in range(draw.randint(1, 4)):
            damage = draw.choice(("flip", "set", "cut", "insert", "remove", "repeat"))
            at = min(draw.choice((draw.randrange(64), draw.randrange(len(data)))), len(data) - 1)
            if damage == "flip":
                data[at] ^= 1 << draw.randrange(8)
            elif damage == "set":
                data[at] = draw.choice((0, 1, 0xC0, 0xC2, 0xD8, 0xFF))
            elif damage == "cut":
                del data[max(4, at) :]
            elif damage == "insert":
                data[at:at] = draw.randbytes(draw.randint(1, 9))
            elif damage == "remove":
                del data[at : at + draw.randint(1, 9)]
            else:
                data[at:at] = data[at : at + draw.randint(1, 200)]
        if kind == "PNG":
            checked_again(data)
        try:
            pixels = pixels_of(bytes(data))
        except ValueError:
            continue
        if pixels > 10_000_000:
            continue
        size = decoded(bytes(data))
        took += size > 0
        assert size <= pixels, (case, kind, bytes(data).hex())
    assert took >= 5, "too few of the damaged still decode to show anything"


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels in a few kilobytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    packed = zlib.compressobj(9)
    row = bytes(1 + side)
    body = b"".join(packed.compress(row) for _ in range(side)) + packed.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Two classes with three small images each, one of which is replaced by a large one."""
    for number in range(6):
        folder = tmp_path / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 0, 0)).save(folder / f"{number}.png")
    (tmp_path / "train" / "class0" / "2.png").write_bytes(bomb(1500))
    return tmp_path / "train"


def run(root: Path, **fields: Any) -> TrainConfig:
    settings = {"data": str(root), "output_dir": str(root / "out"), "model": "cifar_resnet8"}
    more = {"image_size": 16, "workers": 0, "max_pixels": 1_000_000, **fields}
    return TrainConfig.create(**{**settings, **more})


def test_image_of_too_many_pixels_counts_as_unreadable(split: Path) -> None:
    index, strict = scan(split), {"images": "strict"}
    for fields in ({}, strict):
        with pytest.raises(
            InputError, match=r"2\.png \(its 2250000 pixels .* max_pixels=1000000\)"
        ):
            examine(index.where, range(6), run(split, **fields))
    found = examine(index.where, range(6), run(split, on_bad_image="skip"))
    assert (found.checked, found.broken) == (6, 1)
    assert "2.png" in Images(index, run(split), for_training=True).__getitems__([(0, 1)]).error
    skipping = run(split, on_bad_image="skip")
    assert Images(index, skipping, for_training=True).__getitems__([(0, 1)]).indices == [2]
    larger = run(split, max_pixels=2_250_000)
    assert examine(index.where, range(6), larger).broken == 0
    with pytest.raises(InputError, match="max_pixels=1000000"):
        list(evaluation_batches(index, 16, 6, max_pixels=1_000_000))
    (left,) = evaluation_batches(index, 16, 6, on_bad_image="skip", max_pixels=1_000_000)
    assert left[2].tolist() == [0, 2, 3, 4, 5]


def test_file_larger_than_any_image_is_not_read(split: Path) -> None:
    path = split / "class0" / "0.png"
    with path.open("r+b") as file:
        file.truncate(2**36)
    with pytest.raises(InputError, match=r"0\.png \(the file is larger than any image"):
        read(str(path))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a JPEG"),
        (b"BM" + bytes(60), "not a JPEG"),
        (b"\xff\xd8\xff", "truncated"),
        (b"\xff\xd8\xff\xd9", "no size"),
        (b"\xff\xd8\xff\xda\x00\x02", "no size"),
        (b"\xff\xd8\xff\xc0\x00\x0b\x08\x00", "truncated"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "truncated"),
        (b"GIF89a\1\0\1", "truncated"),
        (b"RIFF\0\0\0\0WEBP", "truncated"),
        (b"RIFF\0\0\0\0WEBPVP8 \x0a\0\0\0\0", "truncated"),
    ],
)
def test_header_without_a_size_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pixels_of(data)
