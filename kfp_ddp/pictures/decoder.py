"""Decode pictures, of several pages the first, alike in training and serving."""

import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfp_ddp.core.text import one_line
from kfp_ddp.pictures.header import ORIENTATION, frame_of, orientation_of
from kfp_ddp.pictures.reading import READING, Reading

_MAGIC = re.compile(
    rb"(?P<Jpeg>\xff\xd8\xff)|(?P<Png>\x89PNG\r\n\x1a\n)|(?P<Gif>GIF8[79]a)|(?P<Bmp>BM)"
    rb"|(?P<WebP>RIFF....WEBP)|(?P<Tiff>II[*+]\0|MM\0[*+])|(?P<Avif>....ftypavi[fs])"
    rb"|(?P<Heif>....ftyp(he|mi|ms))|(?P<Ppm>P[1-6][\s#])",
    re.DOTALL,
)
"""First bytes of each format, by the name of its module in Pillow."""
_CONVERT = "save it as JPEG or PNG"
_AGAIN = "download the picture again"
_CAMERA = "a raw file of a camera: export it as JPEG or TIFF"
_OTHERS = {
    rb"version https://git-lfs": "a git-lfs pointer: run git lfs pull",
    rb"\s*<((!doctype )?html|head|body|script|meta)": f"an HTML page: {_AGAIN}, perhaps logged in",
    rb"(\s|<\?xml[^>]*>|<!--.*?-->|<!doctype[^>]*>)*<svg": f"an SVG drawing: {_CONVERT}",
    rb"\s*<": f"XML, as the error of a store: {_AGAIN}",
    rb"\s*[{[]": f"JSON, as the error of a server: {_AGAIN}",
    rb"data:image/|/9j/|iVBORw0KGgo|UklGR": "base64 text: decode it",
    rb"%PDF|%!PS": f"a PDF or PostScript document: {_CONVERT}",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd": "a compressed file, as of gzip: unpack it",
    rb"PK[\3\5]|Rar!|7z\xbc\xaf|.{257}ustar": "an archive: unpack it",
    rb"\xff\x0a|\0\0\0\x0cJXL ": f"JPEG XL: {_CONVERT}",
    rb"\xff\x4f\xff\x51|\0\0\0\x0cjP": f"JPEG 2000: {_CONVERT}",
    rb"8BPS": f"a Photoshop file: {_CONVERT}",
    rb"gimp xcf|v/1\x01|#\?R|DDS |P7\s|Pf|\0\0[\1\2]\0|icns|qoif": f"no known format: {_CONVERT}",
    rb"bplist|\0\x05\x16\x07": "a record of macOS or iCloud: copy the picture itself",
    rb"FUJIFILM|II(U\0|R[OS])|MMOR|\0MRM|FOVb|....ftypcrx": _CAMERA,
    rb"....(ftyp|moov|mdat|wide|free|skip)|\x1aE\xdf\xa3|RIFF....AVI": "a video: save its frames",
    rb".{128}DICM|\x93NUMPY|\x89HDF|CDF|SIMPLE  =": f"scientific data: {_CONVERT}",
    rb"\0+\Z": "of zero bytes, an unfinished copy: copy it again",
}
"""What begins with these bytes, and the remedy; the first match counts."""
_HEAD = 512
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation."""
_SUBFILE = 0x00FE
_BITS_PER_SAMPLE = 0x0102
_PHOTOMETRIC = 0x0106
_PLANES = 0x011C
_SAMPLE_FORMAT = 0x0153
_DNG = 0xC612
"""Tags of TIFF."""
_SEPARATE = 2
_SIGNED = 2
"""Values of `_PLANES` and of `_SAMPLE_FORMAT`."""
_BITS = (8, 12, 14, 16)
_OPAQUE_RGB = ("RGB", "RGBX", "P")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise ValueError, with the reason in one line, for whatever a library raises on a picture."""
    try:
        yield
    except MemoryError:
        raise ValueError("it needs more memory than there is") from None
    except Exception as error:  # noqa: BLE001  Pillow and its plugins raise any
        why = one_line(error) if str(error) else f"it is damaged: {type(error).__name__}"
        raise ValueError(why) from None


@_refusing()
def open_picture(file: BinaryIO, reading: Reading = READING) -> Image.Image:
    """Read the header of a picture, whose file must stay open; raise ValueError."""
    head = file.read(_HEAD)
    match = _MAGIC.match(head)
    file.seek(0)
    if match is None:
        raise ValueError(_other(head))
    kind = match.lastgroup
    try:
        # `Image.open` would try the readers of other formats, and limits the size.
        module = importlib.import_module("pi_heif" if kind == "Heif" else f"PIL.{kind}ImagePlugin")
    except ImportError:
        raise ValueError("HEIC needs pip install 'kfp-ddp[heif]'") from None
    image: Image.Image = getattr(module, f"{kind}ImageFile")(file)
    _refuse_misread(image, head)
    if (pixels := image.width * image.height) > reading.max_pixels:
        raise ValueError(
            f"its {pixels} pixels are more than max_pixels={reading.max_pixels}: make it smaller, "
            "or raise max_pixels of the training, or of serve by --max-pixels"
        )
    is_plain(image)  # it may have no palette
    # Pillow has a limit of its own for TIFF.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or pixels, pixels)
    return image


def _refuse_misread(image: Image.Image, head: bytes) -> None:
    """Raise ValueError for a TIFF of the three kinds that Pillow reads wrong, without an error."""
    tags = getattr(image, "tag_v2", {})
    if not tags:
        return
    reduced = tags.get(_SUBFILE, 0) & 1
    raw = _DNG in tags or head[8:10] == b"CR"
    if reduced or raw:
        raise ValueError(f"its first page is a preview; it is {_CAMERA}")
    if tags.get(_PLANES) == _SEPARATE and max(tags.get(_BITS_PER_SAMPLE, (8,))) > 8:
        raise ValueError("its planes of 16 bits cannot be read: save it with interleaved pixels")
    if _SIGNED in tags.get(_SAMPLE_FORMAT, ()) and not is_deep(image):
        raise ValueError("its signed bytes cannot be read: save it as 16 bits, or unsigned")


def _other(head: bytes) -> str:
    """Return what a file is that is no picture."""
    if not head:
        return "it is empty"
    text = head.removeprefix(b"\xef\xbb\xbf")
    for magic, what in _OTHERS.items():
        if re.match(magic, text, re.DOTALL | re.IGNORECASE):
            return f"it is {what}"
    return f"it is not a picture, and begins with {ascii(head[:12])[1:]}"


def is_plain(image: Image.Image) -> bool:
    """Return whether its pixels are RGB of 8 bits, none of them transparent."""
    return image.mode in _OPAQUE_RGB and not image.has_transparency_data


def is_deep(image: Image.Image) -> bool:
    """Return whether its values are of more than 8 bits, or fractions."""
    return image.mode[0] in "IF"


@_refusing()
def to_rgb(image: Image.Image, reading: Reading, orientation: int = 0) -> Image.Image:
    """Return a picture in RGB of 8 bits, upright by `orientation` or its own; raise ValueError."""
    image.load()
    orientation = orientation or _orientation(image)
    if is_deep(image):
        image = _shallow(image, reading)
    elif image.has_transparency_data:
        image = _on_background(image, reading)
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb


def _shallow(image: Image.Image, reading: Reading) -> Image.Image:
    """Return a deep picture in 8 bits; raise ValueError if black and white are not clear."""
    values = np.asarray(image)
    black, white = _range_of(values, image.format in ("PNG", "PPM"), reading.value_range)
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
        return Image.fromarray(_to_8_bits(values, white, black))
    return Image.fromarray(_to_8_bits(values, black, white))


def _on_background(image: Image.Image, reading: Reading) -> Image.Image:
    """Return a picture with transparent pixels on the background, or as it is without one."""
    clear = image.convert("RGBA")
    if not reading.background:
        return clear
    opaque = Image.new("RGB", clear.size, reading.background)
    opaque.paste(clear, mask=clear)
    return opaque


def _orientation(image: Image.Image) -> int:
    exif = image.info.get("exif") or b""
    tags = getattr(image, "tag_v2", {})
    return tags.get(ORIENTATION, 1) if tags else orientation_of(exif.removeprefix(b"Exif\0\0"))


def _range_of(values: NDArray[Any], full_range: bool, value_range: str) -> tuple[float, float]:
    """Return the values of black and white; raise ValueError if they are not clear.

    Microscopes store 12 or 14 bits in 16: unless `full_range`, the largest value decides.
    """
    if value_range:
        black, white = map(float, value_range.split(","))
        return black, white
    fractions = values.dtype.kind == "f"
    if full_range and not fractions:
        return 0.0, 2.0**16 - 1
    values = np.nan_to_num(values)
    least = float(values.min())
    largest = float(values.max())
    if fractions and _are_shares(least, largest):
        return 0.0, 1.0
    whole = not (values != np.rint(values)).any()
    if not whole or not 0 <= least <= largest < 2**16:
        raise ValueError(
            f"its values from {least:g} to {largest:g} have no known black and white: set "
            "value_range to both for all images of the dataset, such as value_range=-1000,1000"
        )
    return 0.0, next(2.0**bits - 1 for bits in _BITS if largest < 2**bits)


def _are_shares(least: float, largest: float) -> bool:
    """Return whether fractions are shares of white; of smaller ones white is not known."""
    return least >= 0 and (largest == 0 or 1 / 255 <= largest <= 1)


def _to_8_bits(values: NDArray[Any], black: float, white: float) -> NDArray[np.uint8]:
    """Scale values of 16 or 32 bits, or fractions, to 0..255, and NaN to 0."""
    deep = values.astype(np.float32)
    deep -= black
    deep *= 255 / (white - black)
    deep.clip(0, 255, out=deep)
    deep += 0.5
    return np.nan_to_num(deep, copy=False).astype(np.uint8)


@_refusing()
def decode(data: bytes, reading: Reading = READING) -> tuple[NDArray[np.uint8], bool]:
    """Return uint8 [H, W, 3], RGB, upright, and whether the file is RGB; raise ValueError."""
    image = open_picture(io.BytesIO(data), reading)
    frame = frame_of(data)
    plain = is_plain(image)
    rgb = to_rgb(image, reading, frame.orientation if frame else 0)
    return np.array(rgb), plain
