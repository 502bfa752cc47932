"""Decode pictures of all formats to RGB, alike in training and serving; without torch.

Pillow reads them, HEIC needs the extra `heif`. Of several frames or pages the first one counts.
"""

import importlib
import io
import re
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfp_ddp.core.text import one_line
from kfp_ddp.training.config import READING, Reading
from kfp_ddp.training.data.header import ORIENTATION, frame_of, orientation_of

_MAGIC = re.compile(
    rb"(?P<Jpeg>\xff\xd8\xff)|(?P<Png>\x89PNG\r\n\x1a\n)|(?P<Gif>GIF8[79]a)|(?P<Bmp>BM)"
    rb"|(?P<WebP>RIFF....WEBP)|(?P<Tiff>II[*+]\0|MM\0[*+])|(?P<Avif>....ftypavi[fs])"
    rb"|(?P<Heif>....ftyp(he|mi|ms))",
    re.DOTALL,
)
"""First bytes of each format, by the name of its module in Pillow."""
_MAGIC_BYTES = 16
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
_BITS_PER_SAMPLE, _PLANES, _APART = 0x0102, 0x011C, 2
"""Tags of TIFF, and the value for a plane of each colour."""
_BITS = (8, 12, 14, 16)
_OPAQUE_RGB = ("RGB", "RGBX", "P")


def open_picture(file: BinaryIO, reading: Reading = READING) -> Image.Image:
    """Read the header of a picture, whose file must stay open; raise ValueError."""
    head = file.read(_MAGIC_BYTES)
    match = _MAGIC.match(head)
    file.seek(0)
    kind = (match and match.lastgroup) or ""
    if not kind:
        raise ValueError("it is not a picture" if head else "it is empty")
    try:
        # `Image.open` would try the readers of other formats, and limits the size.
        module = importlib.import_module("pi_heif" if kind == "Heif" else f"PIL.{kind}ImagePlugin")
        image: Image.Image = getattr(module, f"{kind}ImageFile")(file)
    except ImportError:
        raise ValueError("HEIC needs pip install 'kfp-ddp[heif]'") from None
    except Exception as error:  # noqa: BLE001  the readers of Pillow raise many
        raise ValueError(f"its header cannot be read: {one_line(error)}") from None
    tags = getattr(image, "tag_v2", {})
    if tags.get(_PLANES) == _APART and max(tags.get(_BITS_PER_SAMPLE, (8,))) > 8:
        # Pillow reads these as 8 bits, without an error.
        raise ValueError("its planes of 16 bits cannot be read: save it with interleaved pixels")
    if (pixels := image.width * image.height) > reading.max_pixels:
        raise ValueError(f"its {pixels} pixels are more than max_pixels={reading.max_pixels}")
    # Pillow has a limit of its own for TIFF.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or pixels, pixels)
    return image


def is_plain(image: Image.Image) -> bool:
    """Return whether its pixels are RGB of 8 bits, none of them transparent."""
    return image.mode in _OPAQUE_RGB and not image.has_transparency_data


def to_rgb(image: Image.Image, background: str, orientation: int = 0) -> Image.Image:
    """Return a picture in RGB of 8 bits, upright by `orientation` or its own; raise ValueError.

    `background` is the colour behind transparent pixels; '' drops the alpha channel.
    """
    try:
        image.load()
        orientation = orientation or _orientation(image)
        if image.mode[0] in "IF":
            image = Image.fromarray(_to_8_bits(np.asarray(image), image.format == "PNG"))
        elif image.has_transparency_data:
            clear = image.convert("RGBA")
            image = Image.new("RGB", clear.size, background) if background else clear
            if background:
                image.paste(clear, mask=clear)
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        return rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb
    except Exception as error:  # noqa: BLE001  the decoders of Pillow raise many
        raise ValueError(one_line(error)) from None


def _orientation(image: Image.Image) -> int:
    exif = image.info.get("exif") or b""
    tags = getattr(image, "tag_v2", {})
    return tags.get(ORIENTATION, 1) if tags else orientation_of(exif.removeprefix(b"Exif\0\0"))


def _to_8_bits(values: NDArray[Any], full_range: bool) -> NDArray[np.uint8]:
    """Scale values of 16 or 32 bits, or fractions, to 0..255.

    Microscopes store 12 or 14 bits in 16: unless all 16 are used (`full_range`), the largest value
    decides, and fractions up to 1 are scaled by 255.
    """
    deep = np.nan_to_num(values.astype(np.float32), copy=False)
    largest = deep.max()
    limits = [1.0] if values.dtype.kind == "f" else []
    limits += [2.0**bits - 1 for bits in _BITS]
    limit = next((one for one in limits if largest <= one), largest)
    limit = limits[-1] if full_range else limit
    deep.clip(0, limit, out=deep)
    deep *= 255 / limit
    deep += 0.5
    return deep.astype(np.uint8)


def decode(data: bytes, reading: Reading = READING) -> tuple[NDArray[np.uint8], bool]:
    """Return uint8 [H, W, 3], RGB, upright, and whether the file is RGB; raise ValueError."""
    image = open_picture(io.BytesIO(data), reading)
    frame = frame_of(data)
    plain = is_plain(image)
    rgb = to_rgb(image, reading.background, frame.orientation if frame else 0)
    return np.array(rgb), plain
