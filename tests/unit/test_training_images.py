"""Pictures of all formats are decoded alike; too large ones before a pixel is decoded."""

import base64
import functools
import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.config import Reading
from kfp_ddp.training.data import decoder
from kfp_ddp.training.data.cache import Cache
from kfp_ddp.training.data.header import plain_pixels
from kfp_ddp.training.data.image_files import examine, read
from kfp_ddp.training.data.loader import Images, evaluation_batches
from kfp_ddp.training.data.splits import scan
from tests import training_ranks

FORMS = {
    "jpg": ("RGB", "L", "CMYK"),
    "png": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "webp": ("RGB", "RGBA"),
    "gif": ("P", "L", "RGB"),
    "bmp": ("RGB", "L", "1", "P"),
    "tif": ("RGB", "RGBA", "L", "P", "CMYK", "I;16", "F"),
    "avif": ("RGB", "RGBA"),
}
WHITE = Reading(background="#ffffff")
run = functools.partial(training_ranks.run, max_pixels=1_000_000)
HEIC = (
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAX1tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAA"
    "AAAAAAAAACJpbG9jAAAAAERAAAEAAQAAAAABoQABAAAAAAAAABgAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABo"
    "dmMxAAAAAA5waXRtAAAAAAABAAAA/WlwcnAAAADdaXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEA"
    "GEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbq5Ka5uAhoMCAAAAMDIAAA"
    "AwAhYgABAAZEAcFzwIkAAAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAAAAAoY2xhcAAAADAAAAAB"
    "AAAAIAAAAAH////wAAAAAv///+AAAAACAAAAEHBpeGkAAAAAAwgICAAAABhpcG1hAAAAAAAAAAEAAQWBAgMFhAAAACBt"
    "ZGF0AAAAFCgBrwQY+Mpx1//ys5+BgLhOkhHn"
)
"""48 x 32 pixels of one colour, as `pillow_heif` writes them."""


def chunk(kind: bytes, body: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def picture(draw: random.Random, kind: str) -> bytes:
    """A file of a kind, in one of the forms that its encoder has."""
    size = draw.randint(1, 70), draw.randint(1, 70)
    image = Image.effect_noise(size, draw.randint(0, 90)).convert(draw.choice(FORMS[kind]))
    options: dict[str, Any] = {}
    exif = Image.Exif()
    exif[0x0112] = draw.randint(1, 8)
    if kind == "jpg":
        options = {"progressive": draw.random() < 0.5, "exif": exif.tobytes()}
    if kind in ("webp", "gif", "tif") and draw.random() < 0.4:
        others = [Image.effect_noise(size, 90 + i) for i in range(draw.randint(1, 3))]
        options |= {"save_all": True, "append_images": others}
    file = io.BytesIO()
    image.save(file, {"jpg": "JPEG", "tif": "TIFF"}.get(kind, kind.upper()), **options)
    data = file.getvalue()
    if kind == "png" and draw.random() < 0.4:
        late = chunk(b"eXIf", exif.tobytes()[6:]) + chunk(b"teSt", bytes(1 << 17))
        data = data[:-12] + late + data[-12:]
    return data


@pytest.mark.parametrize("kind", FORMS)
def test_training_and_predict_decode_to_the_same_pixels(kind: str, tmp_path: Path) -> None:
    draw = random.Random(kind)
    path = tmp_path / f"picture.{kind}"
    for case in range(30):
        path.write_bytes(picture(draw, kind))
        pixels, plain = decoder.decode(path.read_bytes(), WHITE)
        assert torch.equal(read(str(path), WHITE), torch.from_numpy(pixels).permute(2, 0, 1)), case
        with Image.open(path) as image:
            assert plain is decoder.is_plain(image), case


@pytest.mark.parametrize("kind", FORMS)
def test_damaged_file_is_refused_or_decoded_within_its_size(kind: str, tmp_path: Path) -> None:
    draw = random.Random(f"damaged {kind}")
    path, few, decoded = tmp_path / f"picture.{kind}", Reading(max_pixels=70 * 70), 0
    for _ in range(150):
        data = bytearray(picture(draw, kind))
        for _ in range(draw.randint(1, 4)):
            at = min(draw.choice((draw.randrange(64), draw.randrange(len(data)))), len(data) - 1)
            if draw.random() < 0.7:
                data[at] ^= 1 << draw.randrange(8)
            else:
                data[at : at + draw.randint(1, 9)] = draw.randbytes(draw.randint(0, 9))
        path.write_bytes(data)
        try:
            image = read(str(path), few)
        except InputError:
            continue
        decoded += 1
        assert image.numel() <= 3 * few.max_pixels
    assert decoded >= 5 or kind == "png", "its checksums reveal all"


@pytest.mark.parametrize("form", ["rgba.png", "rgba.webp", "rgba.tif", "palette.png", "clear.gif"])
def test_transparency_is_composited_on_the_background(form: str, tmp_path: Path) -> None:
    image = Image.new("RGBA", (40, 40), (10, 20, 30, 0))
    image.paste((200, 30, 40, 255), (10, 10, 30, 30))
    options: dict[str, Any] = {"lossless": True} if form.endswith("webp") else {}
    if form.startswith("palette"):
        image = image.quantize(8)
    image.save(tmp_path / form, **options)
    for background, corner in (("#ffffff", (255, 255, 255)), ("#102030", (16, 32, 48))):
        pixels = read(str(tmp_path / form), Reading(background=background))
        assert tuple(pixels[:, 0, 0].tolist()) == corner
        assert tuple(pixels[:, 20, 20].tolist()) == (200, 30, 40)
    if form == "rgba.png":  # as versions without the setting
        assert read(str(tmp_path / form))[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("cached", [False, True])
def test_cut_out_trains_and_evaluates_as_its_flat_copy(cached: bool, tmp_path: Path) -> None:
    batches = []
    for kind in ("cut", "flat"):
        for label in "ab":
            (tmp_path / kind / label).mkdir(parents=True)
            cut = Image.frombytes("RGBA", (50, 40), random.Random(label).randbytes(8000))
            flat = Image.new("RGB", cut.size, "white")
            flat.paste(cut, mask=cut)
            (cut if kind == "cut" else flat).save(tmp_path / kind / label / "1.png")
        index, config = scan(tmp_path / kind), run(tmp_path / kind)
        for training in (True, False):
            cache = Cache(tmp_path / f"{kind} {training}", "train", 2, parts=1) if cached else None
            if cache:
                cache.build(index.where, config, training, 0)
            images = Images(index, config, training, cache)
            batches.append(images.__getitems__([(0, 0), (0, 1)]).images)
    assert torch.equal(batches[0], batches[2])
    assert torch.equal(batches[1], batches[3])


def test_deep_values_are_scaled_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    files: dict[str, NDArray[Any]] = {
        "microscope.tif": ramp,
        "full.tif": ramp * 16,
        "full.png": ramp * 16,
        "fractions.tif": (ramp / 4096).astype(np.float32),
    }
    for name, values in files.items():
        Image.fromarray(values).save(tmp_path / name)
        pixels = read(str(tmp_path / name))[0].numpy()
        assert np.abs(pixels - ramp / 4095 * 255).max() <= 1.1, name
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow's own limit, of TIFF
    assert read(str(tmp_path / "full.tif")).shape == (3, 64, 64)
    Image.fromarray(ramp).save(tmp_path / "dark.png")
    assert read(str(tmp_path / "dark.png")).max() == 16, "a PNG uses all its bits"
    planes = io.BytesIO()
    Image.new("RGB", (8, 8)).save(planes, "TIFF", tiffinfo={284: 2})  # PlanarConfiguration
    deep = planes.getvalue().replace(struct.pack("<3H", 8, 8, 8), struct.pack("<3H", 16, 16, 16))
    (tmp_path / "planes.tif").write_bytes(deep)
    with pytest.raises(InputError, match="planes of 16 bits"):
        read(str(tmp_path / "planes.tif"))


def test_phone_picture_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "phone.heic"
    path.write_bytes(base64.b64decode(HEIC))
    pytest.importorskip("pi_heif")
    assert tuple(read(str(path)).shape) == (3, 32, 48)
    monkeypatch.setitem(__import__("sys").modules, "pi_heif", None)
    with pytest.raises(InputError, match=r"kfp-ddp\[heif\]"):
        read(str(path))


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels in a few kilobytes."""
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


def test_image_of_too_many_pixels_counts_as_unreadable(split: Path) -> None:
    index, strict = scan(split), {"images": "strict"}
    for fields in ({}, strict):
        with pytest.raises(
            InputError, match=r"2\.png \(its 2250000 pixels .* max_pixels=1000000\)"
        ):
            examine(index.where, range(6), run(split, **fields))
    found = examine(index.where, range(6), run(split, on_bad_image="skip"))
    assert (found.checked, found.broken) == (6, ("class0/2.png",))
    assert "2.png" in Images(index, run(split), for_training=True).__getitems__([(0, 1)]).error
    skipping = run(split, on_bad_image="skip")
    assert Images(index, skipping, for_training=True).__getitems__([(0, 1)]).indices == [2]
    larger = run(split, max_pixels=2_250_000)
    assert examine(index.where, range(6), larger).broken == ()
    with pytest.raises(InputError, match="max_pixels=1000000"):
        list(evaluation_batches(index, 16, 6, reading=Reading(max_pixels=1_000_000)))
    (left,) = evaluation_batches(index, 16, 6, reading=Reading("skip", 1_000_000))
    assert left[2].tolist() == [0, 2, 3, 4, 5]


def test_file_larger_than_any_image_is_not_read(split: Path) -> None:
    path = split / "class0" / "0.png"
    with path.open("r+b") as file:
        file.truncate(2**36)
    with pytest.raises(InputError, match=r"0\.png \(the file is larger than any image"):
        read(str(path))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF",
        b"BM" + bytes(60),
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xda\x00\x02",
        b"\xff\xd8\xff\xc0\x00\x0b\x08\x00",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\x02\0\0",
        b"GIF89a\1\0\1",
        b"RIFF\0\0\0\0WEBP",
        b"RIFF\0\0\0\0WEBPVP8 \x0a\0\0\0\0",
        b"II*\0\x08\0\0\0",
        b"\0\0\0\x1cftypavif",
    ],
)
def test_header_without_a_size_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(InputError, match="cannot decode"):
        read(str(tmp_path / "file"))
    assert plain_pixels(data) in (0, 1)
