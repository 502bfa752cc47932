from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kfp_ddp.base.errors import InputError
from kfp_ddp.predict.picture import square
from kfp_ddp.training import images, transforms


def noise(width: int, height: int, channels: int) -> Image.Image:
    draw = np.random.default_rng(width * height)
    pixels = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


@pytest.mark.parametrize("size", [16, 96, 128])
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("wide.jpg", noise(640, 171, 3)),
        ("tall.jpg", noise(97, 333, 3)),
        ("small.png", noise(20, 31, 3)),
        ("as-is.png", noise(16, 16, 3)),
        ("line.png", noise(300, 1, 3)),
        ("gray.jpg", noise(80, 60, 1)),
        ("printed.jpg", noise(80, 60, 3).convert("CMYK")),
        ("glass.png", noise(80, 60, 4)),
        ("palette.png", noise(80, 60, 3).quantize(16)),
        ("web.webp", noise(80, 60, 3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_picture_is_to_the_bit_what_training_makes_of_it(
    name: str, made: Image.Image, size: int, tmp_path: Path
) -> None:
    path, short = tmp_path / name, transforms.short_side(size)
    made.save(path)
    trained = transforms.evaluate(images.read(str(path)), size).numpy()
    assert np.array_equal(square(path, short, size), trained)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_exif_data_say(orientation: int, tmp_path: Path) -> None:
    path, exif = tmp_path / "turned.jpg", Image.Exif()
    exif[0x112] = orientation
    noise(90, 50, 3).save(path, exif=exif)
    trained = transforms.evaluate(images.read(str(path)), 32).numpy()
    assert np.array_equal(square(path, 32, 32), trained)


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    draw = np.random.default_rng(1)
    Image.fromarray(draw.integers(0, 1 << 16, (40, 50), dtype=np.uint16)).save(path)
    trained = transforms.evaluate(images.read(str(path)), 32).numpy()
    assert np.array_equal(square(path, 32, 32), trained)


def test_what_is_no_picture_is_one_line(tmp_path: Path) -> None:
    text, cut, moving = (tmp_path / name for name in ("notes.jpg", "cut.jpg", "moving.webp"))
    text.write_text("hello")
    noise(60, 60, 3).save(cut)
    cut.write_bytes(cut.read_bytes()[:500])
    noise(8, 8, 3).save(moving, save_all=True, append_images=[noise(9, 8, 3).resize((8, 8))])
    reasons = {
        text: "it is no picture",
        cut: "runcated",
        moving: "it is an animation",
        tmp_path / "none.jpg": "No such file or directory",
    }
    for path, why in reasons.items():
        with pytest.raises(InputError) as refused:
            square(path, 16, 16)
        line = str(refused.value)
        assert str(path) in line
        assert why in line
        assert "\n" not in line
