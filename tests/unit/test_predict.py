import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kfp_ddp.cli import serve as predict
from kfp_ddp.core.errors import InputError
from kfp_ddp.predict import square
from kfp_ddp.training import images, transforms
from kfp_ddp.training.config import Reading


def noise(width: int, height: int, channels: int) -> Image.Image:
    draw = np.random.default_rng(width * height)
    pixels = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("wide.jpg", noise(640, 171, 3)),
        ("small.png", noise(20, 31, 3)),
        ("line.png", noise(300, 1, 3)),
        ("alpha.png", noise(80, 60, 4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pictures_are_read_as_in_evaluation(name: str, image: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / name)
    for size, background in ((16, ""), (96, "#ffffff"), (128, "#102030")):
        short, pixels = (
            transforms.short_side(size),
            images.read(str(tmp_path / name), Reading(background=background)),
        )
        evaluated = transforms.evaluate(pixels, size).numpy().astype(int)
        own = square(tmp_path / name, short, size, background)
        assert np.abs(own - evaluated).max() <= 2


@pytest.mark.parametrize("shape", [(1, 100_000), (300, 90_000)])
def test_only_the_centre_of_a_line_is_computed(shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "line.png"
    Image.new("RGB", shape, (10, 200, 30)).save(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pixels = square(path, 256, 224, "")
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (pixels == np.array([10, 200, 30], np.uint8)[:, None, None]).all()
    assert grown_kb < 400 << 10  # the largest picture takes 108 MB when decoded


def test_an_unreadable_file_is_reported_in_one_line(tmp_path: Path) -> None:
    text, cut = (tmp_path / name for name in ("notes.jpg", "cut.jpg"))
    text.write_text("hello")
    noise(60, 60, 3).save(cut)
    cut.write_bytes(cut.read_bytes()[:500])
    reasons = {
        text: "it is not a picture",
        cut: "runcated",
        tmp_path / "none.jpg": "No such file or directory",
    }
    for path, why in reasons.items():
        with pytest.raises(InputError) as refused:
            square(path, 16, 16, "")
        line = str(refused.value)
        assert str(path) in line
        assert why in line


def test_control_characters_in_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    classes = [{"class": "cat\x1b[2J", "probability": 1.0}]
    predict._print_classes({"picture": "a\x1b]0;t\x07\n.jpg", "classes": classes}, 10)
    predict._print_classes({"picture": "b", "error": "cannot read b\x1b[2J"}, 10)
    out, err = capsys.readouterr()
    assert out == "…x07\\n.jpg  cat\\x1b[2J 100.0%\n"
    assert err == "error: cannot read b\\x1b[2J\n"
