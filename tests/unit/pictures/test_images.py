"""Pictures of all formats are decoded alike; too large ones before a pixel is decoded."""

import base64
import functools
import io
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from kfp_ddp import predict
from kfp_ddp.core.errors import InputError
from kfp_ddp.local.survey import _open
from kfp_ddp.pictures import decoder
from kfp_ddp.pictures.header import plain_pixels
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training.data.cache import Cache
from kfp_ddp.training.data.image_files import examine, read
from kfp_ddp.training.data.loader import Images, evaluation_batches
from tests import training_ranks

FORMS = {
    "jpg": ("RGB", "L", "CMYK"),
    "png": ("RGB",) * 6 + ("RGBA", "L", "LA", "P", "1", "I;16"),
    "webp": ("RGB", "RGBA"),
    "gif": ("P", "L", "RGB"),
    "bmp": ("RGB", "L", "1", "P"),
    "tif": ("RGB", "RGBA", "L", "P", "CMYK", "I;16", "F"),
    "avif": ("RGB", "RGBA"),
    "ppm": ("RGB", "L", "1", "I;16"),
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


def odd(draw: random.Random, kind: str) -> bytes:
    """A file of a kind that is complete, damaged, cut, longer, or has other chunks."""
    data = bytearray(picture(draw, kind))
    for _ in range(draw.choice((0, 1, 1, 1, 3))):
        place, size = draw.choice((64, 64, len(data), len(data))), draw.choice((1, 2, 4))
        at = draw.randrange(min(place, len(data)) or 1)
        value = draw.choice((bytes(4), b"\xff" * 4, draw.randbytes(4), b"\0\0\0\1"))[:size]
        match draw.randrange(6):
            case 0:
                data[at : at + size] = value
            case 1:
                data[at : at + 1] = bytes([data[at] ^ 1 << draw.randrange(8)] if data else [])
            case 2:
                data = data[: draw.choice((at, -draw.randint(1, 20)))]
            case 3:
                data += draw.choice(
                    (value, picture(draw, kind)[: draw.randint(1, 99)], bytes(data))
                )
            case 4:
                data[at:at] = value
            case _:
                data = bytearray(rewritten(draw, kind, bytes(data)))
    return bytes(data)


def rewritten(draw: random.Random, kind: str, data: bytes) -> bytes:
    """A PNG with other chunks and right checksums, a JPEG with one more segment, or a cut file."""
    random_bytes = draw.randbytes(draw.choice((0, 1, 13, 30)))
    if kind == "jpg":
        begins = (b"JFIF\0", b"Adobe", b"ICC_PROFILE\0", b"Photoshop 3.0\x008BIM", b"Exif\0\0", b"")
        body = draw.choice(begins) + random_bytes
        marker = draw.choice(b"\xe0\xe1\xe2\xed\xee\xfe\xdb\xdd\xc0\xc4\x02\xd0")
        return data[:2] + struct.pack(">BBH", 255, marker, len(body) + 2) + body + data[2:]
    if kind != "png":
        return data[: draw.randrange(len(data) + 1)]
    parts, at = [], 8
    while at + 12 <= len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        parts.append((name, data[at + 8 : at + 8 + size]))
        at += 12 + size
    at = draw.randrange(len(parts) or 1)
    names = b"tEXt zTXt iCCP PLTE tRNS eXIf pHYs IHDR IEND \xff".split()
    other = draw.choice(names), random_bytes
    change = draw.choice(([], [other], [(b"IDAT", zlib.compress(bytes(9)))], parts[at : at + 1]))
    parts[at : at + draw.randrange(2)] = change
    return data[:8] + b"".join(chunk(*part) for part in parts)


def answers(path: Path, reading: Reading) -> list[NDArray[np.uint8] | str]:
    """What training, predict, serve and the survey see, or why they refuse it."""
    results: list[NDArray[np.uint8] | str] = []
    ways: list[Callable[[], NDArray[np.uint8]]] = [
        lambda: read(str(path), reading).permute(1, 2, 0).numpy(),
        lambda: np.asarray(predict._decode(path, reading)),
        lambda: np.asarray(predict._decode(path.read_bytes(), reading)),
    ]
    for decode in ways:
        try:
            results.append(decode())
        except InputError as error:
            results.append(str(error).partition(" (")[2].rpartition("):")[0])
    surveyed = _open(path, reading, True)
    return [*results, surveyed if isinstance(surveyed, str) else results[0]]


def check_alike(path: Path, reading: Reading, case: object) -> bool:
    """Whether it is refused; fails where two paths differ."""
    first, *others = answers(path, reading)
    for other in others:
        assert type(first) is type(other), (case, first, other)
        assert np.array_equal(first, other), (case, first, other)
    return isinstance(first, str)


@pytest.mark.filterwarnings("ignore")  # of Pillow, about damage
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("files", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_odd_file_is_handled_alike_everywhere(kind: str, files: int, tmp_path: Path) -> None:
    draw = random.Random(f"{kind} {files}")
    path, few = tmp_path / f"picture.{kind}", Reading(background="#ffffff", max_pixels=70 * 70)
    refused = 0
    for case in range(files):
        path.write_bytes(odd(draw, kind))
        refused += check_alike(path, few, case)
    assert 0.1 < refused / files < 0.8


def png(*chunks: tuple[bytes, bytes], color: int = 2) -> bytes:
    """A PNG of 2 x 2 pixels with these chunks before its pixels."""
    header = struct.pack(">IIBBBBB", 2, 2, 8, color, 0, 0, 0)
    pixels = zlib.compress(bytes(2 * (1 + 2 * (3 if color == 2 else 1))))
    parts = ((b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(values: NDArray[Any], **tags: int) -> bytes:
    """A TIFF of one channel; a tag is `t` and its number."""
    form = {"i": 2, "f": 3}.get(values.dtype.kind, 1)
    height, width = values.shape
    known = {256: width, 257: height, 258: 8 * values.itemsize, 259: 1, 262: 1, 273: 8, 277: 1}
    known |= {278: height, 279: values.nbytes, 339: form} | {int(k[1:]): v for k, v in tags.items()}
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, known[tag]) for tag in sorted(known))
    body = struct.pack("<4sI", b"II*\0", 8 + values.nbytes) + values.tobytes()
    return body + struct.pack("<H", len(known)) + rows + bytes(4)


RAMP = np.array([[-1000, -700, -100, 40, 1000]] * 4)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(color=3), "damaged"),
        (png()[:-12] + chunk(b"tEXt", bytes(90))[:20], "runcated"),
        (png((b"zTXt", b"a\0\1")), "compression method"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html>", "HTML"),
        (b"<?xml version='1.0'?><Error><Code>NoSuchKey", "XML"),
        (b'{"error": 1}', "JSON"),
        (b"PK\3\4", "archive"),
        (b"\0\0\0\x0cjP  ", "JPEG 2000"),
        (b"FUJIFILMCCD-RAW", "camera"),
        (tiff(RAMP.astype("<u2"), t254=1), "camera"),
        (tiff(RAMP.astype("<u2"), t50706=1), "camera"),
        (b"\0\0\0\x18ftypmp42", "video"),
        (bytes(600), "zero bytes"),
        (b"", "empty"),
        (b"hello", "begins with 'hello'"),
        (tiff(RAMP.astype("<i2")), "value_range"),
        (tiff((RAMP / 1000).astype("<f4")), "value_range"),
        (tiff((RAMP + 10**6).astype("<i4")), "value_range"),
        (tiff((RAMP / 10).astype("i1")), "signed"),
    ],
)
def test_reason_of_a_refusal(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(data)
    assert check_alike(tmp_path / "a.jpg", WHITE, why)
    assert why in str(answers(tmp_path / "a.jpg", WHITE)[0])


@pytest.mark.parametrize("kind", ["<i2", "<i4", "<f4"])
def test_value_range_scales_all_images_alike(kind: str, tmp_path: Path) -> None:
    for name, values in (("all.tif", RAMP), ("part.tif", RAMP[:, 1:4])):
        (tmp_path / name).write_bytes(tiff(np.ascontiguousarray(values).astype(kind)))
        reading = Reading(value_range="-1000,1000")
        assert not check_alike(tmp_path / name, reading, name)
        pixels = read(str(tmp_path / name), reading)[0, 0].tolist()
        assert pixels == [0, 38, 115, 133, 255][slice(1, 4) if name == "part.tif" else slice(5)]
    inverted = tiff(np.ascontiguousarray(RAMP % 1001).astype("<u2"), t262=0)  # 1 … 1000
    values, _ = decoder.decode(inverted, Reading(value_range="1,1000"))
    assert values[0, ::4, 0].tolist() == [255, 0]


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
        with pytest.raises(InputError, match=r"2\.png \(its 2250000 pixels .* max_pixels=1000000"):
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
    assert left.indices == [0, 2, 3, 4, 5]


def test_file_larger_than_any_image_is_not_read(split: Path) -> None:
    path = split / "class0" / "0.png"
    with path.open("r+b") as file:
        file.truncate(2**36)
    with pytest.raises(InputError, match=r"0\.png \(the file is larger than any image"):
        read(str(path))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"BM" + bytes(60), b"\xff\xd8\xff\xda\x00\x02"),
        *(b"\xff\xd8\xff\xc0\x00\x0b\x08\x00", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0"),
        *(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\x02\0\0", b"GIF89a\1\0\1"),
        *(b"RIFF\0\0\0\0WEBPVP8 \x0a\0\0\0\0", b"II*\0\x08\0\0\0", b"\0\0\0\x1cftypavif"),
    ],
)
def test_header_without_a_size_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(InputError, match="cannot decode"):
        read(str(tmp_path / "file"))
    assert plain_pixels(data) in (0, 1)
