"""Images made up for tests: textured JPEGs of several sizes and orientations, and plain ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("bark", "gravel", "water")
SIZES = ((96, 64), (64, 96), (80, 80), (120, 70))


def write(folder: Path, each: int, classes: Sequence[str] = CLASSES) -> Path:
    """Write so many images of each class to `<folder>/<class>/`; a class is a grain of texture."""
    draw = np.random.default_rng(7)
    for grain, name in enumerate(classes, start=1):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            width, height = SIZES[number % len(SIZES)]
            coarse = draw.integers(0, 256, (height >> grain, width >> grain, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
            image.getexif()[0x112] = 6 if number % 2 else 1  # turned, as a phone's are
            image.save(folder / name / f"img {number}.jpg", quality=85, exif=image.getexif())
    return folder


def plain(folder: Path, each: int, side: int = 16) -> Path:
    """Write so many images of one colour to `<folder>/dark/` and `<folder>/light/`."""
    for name, shade in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            image = Image.new("RGB", (side, side), (shade + number, shade, shade))
            image.save(folder / name / f"{number}.png")
    return folder
