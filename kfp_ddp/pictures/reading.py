"""Which files are pictures, and how these and their folders are read, by settings of the run."""

import re
from functools import lru_cache
from typing import Literal, NamedTuple

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif"),
)
"""Names of images that `decoder` reads; the only list."""
_SYSTEM = re.compile(
    r"\.|[#@$~](?=[^\W\d])|__(?!.*_$)|(?i:lost\+found|System Volume Information|RECYCLER"
    r"|FOUND\.\d{3}|Network Trash Folder|Temporary Items|_temporary|_delta_log|__pycache__)$"
)
"""Folders that systems make, most by a sign in front that people rarely give to a class."""
MAX_PIXELS = 100_000_000
BACKGROUND = "^(#[0-9a-fA-F]{6})?$"
_NUMBER = r"-?\d{1,15}(\.\d{1,15})?"
VALUE_RANGE = f"^({_NUMBER},{_NUMBER})?$"
Fit = Literal["crop", "pad", "squash"]
PADDING = (124, 116, 104)
"""Colour around a picture with fit=pad: the mean of ImageNet, which networks take for zero."""


class Reading(NamedTuple):
    """How images are read; fields are as in `TrainConfig`, defaults as in runs without them."""

    on_bad_image: str = "fail"
    max_pixels: int = MAX_PIXELS
    background: str = ""
    images: str = "convert"
    value_range: str = ""
    fit: Fit = "crop"
    crop: float = 0.0
    """As in `timm_networks.Preprocessing`; not a field."""

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest file: pixels of 8 bytes, profiles and thumbnails."""
        return 8 * self.max_pixels + 2**26


READING = Reading()


class LayoutRule(NamedTuple):
    """Settings of the layout; see `TrainConfig`."""

    val_fraction: float = 0.1
    labels: str = ""
    layout: str = "auto"
    fold: str = ""


RULE = LayoutRule()
"""The defaults."""


@lru_cache(1 << 16)
def system_folder(path: str) -> str:
    """Return the first folder in a path that a system made; '' without."""
    return next(filter(_SYSTEM.match, path.split("/")), "")


def is_image(name: str) -> bool:
    """Return whether the name of a file is that of an image, and in no folder of a system."""
    folder, _, last = name.rpartition("/")
    return last.lower().endswith(SUFFIXES) and last[0] != "." and not system_folder(folder)


def is_ignored(name: str) -> bool:
    """Return whether a file, of any kind, belongs to a system or to a version and not to a user."""
    folder, _, last = name.rpartition("/")
    if last in ("", "Thumbs.db", "desktop.ini", "Icon\r"):
        return True
    if last.startswith(("_", ".", "~$")) or last.endswith("_$folder$"):
        return True
    return bool(system_folder(folder))


def is_needless(name: str) -> bool:
    """Return whether no step reads a file of this name: it is a system's, and no image."""
    return is_ignored(name) and not is_image(name)
