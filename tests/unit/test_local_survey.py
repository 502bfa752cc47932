"""The table of a folder of photographs before a local run, and what is left out of it."""

import os
from pathlib import Path

import pytest
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.local.survey import located, look


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes, and all that lies about in such folders."""
    for label in ("a", "b", "c\x1b"):
        (tmp_path / label).mkdir()
        for number in range(9 if label > "b" else 20):
            Image.new("RGB", (60, 40), "red").save(tmp_path / label / f"{number}.jpg")
    cut, fake = tmp_path / "a" / "3.jpg", tmp_path / "a" / "4.jpg"
    cut.write_bytes(cut.read_bytes()[:500])
    fake.write_text("no image")
    os.mkfifo(tmp_path / "b" / "pipe.png")
    for name in (
        "__MACOSX/._3.jpg",
        ".DS_Store",
        "a/Thumbs.db",
        "b/x.svg",
        "b/y.svg",
        "labels.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def test_classes_broken_images_and_other_files_are_counted(photos: Path) -> None:
    found = look(str(photos), {})
    names = [Path(path).name for path in found.broken]
    assert sorted(names) == ["3.jpg", "4.jpg", "pipe.png"]
    assert found.photographs.train + found.photographs.val == 18 + 20 + 9
    assert (found.photographs.classes, found.photographs.short_side) == (3, 40)
    rows = dict(line.split()[:2] for line in found.table)
    assert list(rows) == ["class", "a", "b", r"c\x1b", "all"]
    assert int(rows["all"]) == found.photographs.train
    notes = "\n".join(found.photographs.notes)
    assert "3 files not read: 2 .svg, 1 .csv" in notes
    assert "labels=labels.csv" in notes
    assert r"c\x1b" in notes, "few images"
    assert "\n".join(found.lines).count(str(photos / "a")) == 2
    with pytest.raises(InputError, match=r"3 images .*3\.jpg .*--set on_bad_image=skip"):
        look(str(photos), {"training": {"on_bad_image": "fail"}})


def test_table_of_many_classes_fits_a_screen(tmp_path: Path) -> None:
    for label in range(40):
        (tmp_path / f"{label:02}{'x' * 60}").mkdir()
        for number in range(4):
            Image.new("RGB", (9, 9)).save(tmp_path / f"{label:02}{'x' * 60}" / f"{number}.png")
    table = look(str(tmp_path), {}).table
    assert len(table) == 23
    assert max(map(len, table)) <= 80
    assert "20 more" in table[-2]


def test_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "photos.zip").touch()
    with pytest.raises(InputError, match="unpack"):
        located(str(tmp_path / "photos.zip"))
