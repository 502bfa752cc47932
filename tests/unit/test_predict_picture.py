import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kfp_ddp.cli import predict
from kfp_ddp.core.errors import InputError
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


@pytest.mark.parametrize("shape", [(1, 100_000), (20_000, 2), (300, 90_000)])
def test_of_a_line_no_more_is_made_than_the_square(shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "line.png"
    Image.new("RGB", shape, (10, 200, 30)).save(path)
    tracemalloc.start()
    try:
        found = square(path, 256, 224)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found == np.array([10, 200, 30], np.uint8)[:, None, None]).all()
    assert most < 300 << 20  # the largest is 81 MB as it is


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


def test_names_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """That of a file is whoever's who made it, and so is that of a class."""
    classes = [{"class": "cat\x1b[2J", "probability": 1.0}]
    predict._print({"picture": "a\x1b]0;t\x07\n.jpg", "classes": classes}, 10)
    predict._print({"picture": "b", "error": "cannot read b\x1b[2J"}, 10)
    out, err = capsys.readouterr()
    assert out == "…x07\\n.jpg  cat\\x1b[2J 100.0%\n"
    assert err == "error: cannot read b\\x1b[2J\n"
