"""The sides of a dataset on disk."""

import os
import tarfile
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.training.splits import count_images, sides_of, splits_of


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def test_class_folders_are_split_by_name(tmp_path: Path) -> None:
    names = [f"{label}/{n:03}.jpg" for label in ("cat", "dog") for n in range(60)]
    found = splits_of(touch(tmp_path, *names))
    assert found.by_name
    assert found.test is None
    assert found.train.root == found.val.root == tmp_path
    assert sorted([*found.train.paths, *found.val.paths]) == [f"{tmp_path}/{n}" for n in names]
    assert found.val.classes == ("cat", "dog")
    again = sides_of(tmp_path, "val", ("cat", "dog"), {"val_fraction": 0.1})
    assert again == (found.val, {"train": found.train})


def test_existing_split_has_its_folder_as_root(tmp_path: Path) -> None:
    touch(tmp_path, "train/dog/a/z.png", "train/dog/b.png", "train/cat/1.jpg", "val/cat/2.jpg")
    touch(tmp_path, "test/dog/3.webp", "test/dog/.hidden.png", "train/.cache/x.png")
    found = splits_of(tmp_path)
    assert found.train.root == tmp_path / "train"
    assert [path.removeprefix(f"{tmp_path}/train/") for path in found.train.paths] == [
        "cat/1.jpg",
        "dog/a/z.png",
        "dog/b.png",
    ]
    assert found.train.targets == (0, 1, 1)
    assert found.test is not None
    assert found.test.paths == (f"{tmp_path}/test/dog/3.webp",)
    assert not found.by_name


def test_class_folders_may_be_links(tmp_path: Path) -> None:
    elsewhere = touch(tmp_path / "elsewhere", "1.jpg", "2.jpg")
    for split in ("train", "val"):
        touch(tmp_path / "data", f"{split}/dog/1.jpg")
        (tmp_path / "data" / split / "cat").symlink_to(elsewhere)
    assert len(splits_of(tmp_path / "data").train) == 3


def test_archive_has_the_same_splits_as_the_folder(tmp_path: Path) -> None:
    names = [f"{n:03}.jpg" for n in range(60)]
    rows = "".join(f"{name},{'cat' if int(name[:3]) % 3 else 'dog'}\n" for name in names)
    touch(tmp_path / "files", *names)
    (tmp_path / "files" / "labels.csv").write_text(rows)
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "0.tar", "w") as archive:
        for path in sorted((tmp_path / "files").iterdir()):
            archive.add(path, path.name)
    plain = splits_of(tmp_path / "files", 0.3, "labels.csv")
    packed = splits_of(tmp_path / "packed", 0.3, "labels.csv")
    for one, other in ((plain.train, packed.train), (plain.val, packed.val)):
        assert [Path(path).name for path in one.paths] == [Path(p).name for p in other.paths]
        assert one.targets == other.targets
    at = packed.val.where(0)
    with open(at.file, "rb") as file:
        file.seek(at.offset)
        assert file.read(at.size).decode() == at.name


@pytest.mark.parametrize("second", ["0.tar", "1.tar"])
def test_duplicate_name_in_archives_is_refused(tmp_path: Path, second: str) -> None:
    """Else one of them would stand for both."""
    files = touch(tmp_path / "files", *(f"{kind}/{n}.jpg" for kind in "ab" for n in range(9)))
    (tmp_path / "packed").mkdir()
    for name, member in (("0.tar", "."), (second, "a/7.jpg")):
        with tarfile.open(tmp_path / "packed" / name, "a") as archive:
            archive.add(files / member, member)
    with pytest.raises(InputError, match=rf"a/7\.jpg is twice .*: in 0\.tar and in {second}"):
        splits_of(tmp_path / "packed")


def test_invalid_dataset_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the dataset .*/nothing does not exist"):
        splits_of(tmp_path / "nothing")
    with pytest.raises(InputError, match=f"dataset {tmp_path}: there are no images"):
        splits_of(tmp_path)
    touch(tmp_path, "cat/1.jpg", "dog/2.jpg")
    for name in ("labels.csv", "../labels.csv"):
        with pytest.raises(InputError, match=rf"labels {name} cannot be read"):
            splits_of(tmp_path, labels=name)
    with pytest.raises(InputError, match="has no folder val/"):
        sides_of(tmp_path, "val", ("cat", "dog"), {})
    with pytest.raises(InputError, match="has no folder test/"):
        sides_of(tmp_path, "test", ("cat", "dog"), {"val_fraction": 0.1})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all folders")
def test_unreadable_folder_is_not_an_empty_class(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "dog/2.jpg")
    (tmp_path / "dog").chmod(0)
    try:
        with pytest.raises(StorageError, match=r"cannot read .*/dog"):
            splits_of(tmp_path)
    finally:
        (tmp_path / "dog").chmod(0o755)


def test_images_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{n % 2}/{n}.jpg" for n in range(9)), "notes.txt")
    assert (count_images(tmp_path, 4), count_images(tmp_path, 100)) == (4, 9)
