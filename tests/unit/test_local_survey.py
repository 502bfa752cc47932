"""Counts and warnings of a folder of photographs before a local run."""

import os
from pathlib import Path

from PIL import Image

from kfp_ddp.local.survey import look


def test_classes_with_few_images_are_named(tmp_path: Path) -> None:
    counts = {"train/a": 10, "train/b": 20, "train/c\x1b": 9, "val/a": 1, "val/b": 1}
    for name, count in counts.items():
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / name / f"{number}.jpg").touch()
    found = look(str(tmp_path), {})
    assert (found.train, found.val, found.classes, found.short_side) == (39, 2, 3, 0)
    assert found.notes == (
        r"1 class without images to validate: c\x1b (9 to train on)",
        r"1 class with less than 10 images to train on: c\x1b (9)",
    )


def test_pipe_among_the_images_is_not_read(tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(8):
            Image.new("RGB", (60, 40)).save(tmp_path / label / f"{number}.png")
        os.mkfifo(tmp_path / label / "pipe.png")
    assert look(str(tmp_path), {}).short_side == 40
