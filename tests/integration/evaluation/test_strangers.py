"""Pictures of classes that were never trained on: how many of them are unsure."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.commands import output
from tests.integration.conftest import train
from tests.integration.serve.test_serve import bundle_of

KNOWN = 7
"""The digits from here on are strangers."""


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Half of the known digits to train on, half to evaluate, and the others."""
    images, labels = load_digits(return_X_y=True)
    for at, (image, label) in enumerate(zip(images, labels, strict=True)):
        side = ("train", "val")[at % 2] if label < KNOWN else "strangers"
        folder = tmp_path / "digits" / side / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (image.reshape(8, 8) * 15).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{at:04}.png")
    return tmp_path / "digits"


def unsure(bundle: Path, pictures: Path) -> float:
    """Return the share of unsure pictures."""
    answers = json.loads(output("predict", bundle, pictures, "--json"))["pictures"]
    return sum(answer["sure"] is False for answer in answers) / len(answers)


@pytest.mark.slow
def test_some_strangers_are_found_and_others_look_like_a_class(
    digits: Path, tmp_path: Path
) -> None:
    """Write the shares into docs/laptop.md when they change."""
    checkpoint = train(digits, tmp_path / "run", steps=60)
    bundle = bundle_of(checkpoint, digits / "val", tmp_path / "bundle")
    known = unsure(bundle, digits / "val")
    strangers = unsure(bundle, digits / "strangers")
    print(f"unsure: {known:.1%} of known digits, {strangers:.1%} of strangers")
    assert known < 0.35
    assert 2 * known < strangers < 1
