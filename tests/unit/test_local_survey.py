"""What is said of a folder of photographs before anything is copied."""

from pathlib import Path

import pytest

from kfp_ddp.local.survey import look


def write(folder: Path, counts: dict[str, int]) -> str:
    """Make a folder with so many files of each name, which look like images by that alone."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").touch()
    return str(folder)


@pytest.mark.parametrize(
    ("counts", "notes"),
    [
        ({"train/a": 10, "train/b": 10, "val/a": 2, "val/b": 1}, ()),
        (
            {"train/a": 10, "train/b": 20, "val/a": 1},
            ("1 class without images to validate, so nothing is told apart: b (20 to train on)",),
        ),
        (
            {"train/a": 10, "train/b": 20, "train/c\x1b": 9, "val/a": 1, "val/b": 1},
            (
                r"1 class without images to validate: c\x1b (9 to train on)",
                r"1 class with less than 10 images to train on: c\x1b (9)",
            ),
        ),
    ],
)
def test_classes_that_cannot_be_judged_or_learnt_are_named(
    counts: dict[str, int], notes: tuple[str, ...], tmp_path: Path
) -> None:
    assert look(write(tmp_path, counts), {}).notes == notes
