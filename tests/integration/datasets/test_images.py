"""The images of a dataset, judged on its listing before the first of them is read."""

from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.text import cell
from kfp_ddp.datasets.images import look_at
from kfp_ddp.pictures.layout import lay_out
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.storage.listing import Listing
from tests.gcs_server import Bucket
from tests.sync_runs import step

LAYOUT: dict[str, Any] = {"val_fraction": 0.1}


def report_of(tmp_path: Path, layout: dict[str, Any], **options: Any) -> str:
    """Run the step on the bucket as KFP does; return its report."""
    return step(tmp_path, "gs://bucket/ds", layout=layout, options=options)[1]


def fill(bucket: Bucket, count: int, *classes: str) -> None:
    for label in classes:
        for number in range(count):
            bucket.put(f"ds/{label}/{number}.jpg", f"{label} {number}".encode())


def test_what_cannot_train_ends_before_a_byte_is_read(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 20, "cat")
    with pytest.raises(SystemExit, match=r"^error: gs://bucket/ds: there is one class only \(cat"):
        report_of(tmp_path, LAYOUT)
    assert bucket.gets == []
    assert not (tmp_path / "data").exists()
    planned = report_of(tmp_path, LAYOUT, dry_run=True)
    assert "would be refused: gs://bucket/ds: there is one class only" in planned
    assert "| Files | 20 |" in report_of(tmp_path, {})


def test_the_report_counts_classes_and_the_log_has_a_line(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(bucket, 100, "cat", "dog|x")
    bucket.put("ds/dog|x/twice.jpg", b"cat 0")
    report = report_of(tmp_path, LAYOUT)
    names = [name.removeprefix("ds/") for name in bucket.objects]
    found = lay_out(names, LayoutRule(0.1))
    (train, _), (val, _) = found.train.counts(2), found.val.counts(2)
    assert "## Images: 201 in 2 classes" in report
    assert f"| cat | {train} | {val} | 0 |" in report
    assert f"| {cell('dog|x')} |" in report
    assert "1 image is the same as one of another class" in report
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("images: ")]
    assert f"2 classes, {len(found.train)} to train on, {len(found.val)} to validate" in line
    assert "1 image is the same" in line
    again = report_of(tmp_path, LAYOUT)
    assert "unchanged, nothing copied" in again
    assert "## Images: 201 in 2 classes" in again
    assert "changed their split" not in report + again


def test_images_that_change_their_split_are_reported(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 40, "cat")
    sides = []
    for number, pack in ((8, "none"), (60, "tar"), (60, "tar")):
        fill(bucket, number, "dog")
        report = report_of(tmp_path, LAYOUT, pack=pack)
        names = [name.removeprefix("ds/") for name in bucket.objects]
        sides.append(lay_out(names, LayoutRule(0.1)))
        if number == 60 and len(sides) == 2:
            late = set(sides[0].train.names) & set(sides[1].val.names)
            moved = late | set(sides[0].val.names) & set(sides[1].train.names)
            assert f"{len(moved)} images of small classes changed their split" in report
            assert f"trained on {len(late)} that" in report
        else:
            assert "changed their split" not in report


def test_a_table_is_read_first_and_missing_files_are_told(bucket: Bucket, tmp_path: Path) -> None:
    rows = "".join(f"{n}.jpg,{'cat' if n % 2 else 'dog'}\n" for n in range(61))
    for number in range(60):
        bucket.put(f"ds/{number}.jpg", f"{number}".encode())
    bucket.put("ds/labels.csv", rows.encode())
    layout = {**LAYOUT, "labels": "labels.csv"}
    with pytest.raises(SystemExit, match=r"labels labels.csv names 1 files .*60\.jpg first"):
        report_of(tmp_path, layout)
    assert set(bucket.gets) == {"ds/labels.csv"}
    bucket.put("ds/60.jpg", b"60")
    bucket.fault("ds/labels.csv", "503", "corrupt")
    assert "## Images: 61 in 2 classes" in report_of(tmp_path, layout)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"labels": "none.csv"}, "labels=none.csv is not in it; it has big.csv, labels.csv"),
        ({"labels": "big.csv"}, r"labels=big.csv is too large \(9 B\)"),
        ({"val_fraction": 2}, "val_fraction=2 cannot be used"),
        ({"epochs": 2}, "layout sets epochs, which is a setting of the training"),
    ],
)
def test_a_table_or_a_setting_that_cannot_be_used_is_refused(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
    says: str,
) -> None:
    fill(bucket, 1, "cat", "dog")
    bucket.put("ds/labels.csv", b"x")
    monkeypatch.setattr("kfp_ddp.datasets.images.LARGEST", 7)
    bucket.put("ds/big.csv", b"too large")
    with pytest.raises(SystemExit, match=says):
        report_of(tmp_path, layout)
    assert bucket.gets == []


def listing(*objects: tuple[str, int], tags: bool = False) -> Listing:
    """A listing of (name, number of its content)."""
    found = Listing()
    for name, content in objects:
        found.add(name, 100 + content, content, tag=f"e{content}" if tags else "")
    return found.sorted()


TRAIN = [(f"train/{label}/{n}.jpg", ord(label) * 100 + n) for label in "ab" for n in range(20)]


@pytest.mark.parametrize("tags", [False, True])
def test_the_same_content_in_two_splits_is_leakage(tags: bool) -> None:
    objects = [("val/a/x.jpg", 97 * 100 + 3), ("val/b/y.jpg", 1), ("test/b/z.jpg", 98 * 100 + 4)]
    objects += [("train/a/again.jpg", 97 * 100 + 5)]
    images = look_at(listing(*TRAIN, *objects, tags=tags), LayoutRule(), ())
    assert [warning for warning in images.warnings if "the same" in warning] == [
        "2 images of val or test are the same as images of another split (test/b/z.jpg and "
        "train/b/4.jpg): the measured accuracy is too high"
    ]


def test_classes_with_few_images_or_without_a_split_get_a_warning() -> None:
    objects = [("train/c/1.jpg", 1), ("val/a/1.jpg", 2), ("val/c/1.jpg", 3)]
    assert look_at(listing(*TRAIN, *objects), LayoutRule(), ()).warnings == (
        "1 class without images to validate: b (20 to train on)",
        "1 class with fewer than 10 images to train on: c (1)",
    )


def test_empty_files_are_no_duplicates() -> None:
    empty = Listing()
    for name, _ in TRAIN:
        empty.add(name, 0, 0)
        empty.add(name.replace("train", "val"), 0, 0)
    assert look_at(empty.sorted(), LayoutRule(), ()).warnings == ()
