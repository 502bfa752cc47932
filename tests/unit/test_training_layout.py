"""Images, classes and splits of a dataset follow from names alone."""

import hashlib
import random
from collections.abc import Iterable

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.layout import Layout, Part, lay_out
from kfp_ddp.training.sides import Labels


def laid_out(names: Iterable[str], labels: str = "", called: str = "labels.csv") -> Layout:
    read = Labels.parse(called, labels.encode()) if labels else None
    return lay_out(names, val_fraction=0.1, labels=read)


def by_class(layout: Layout, part: Part) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, target in part:
        names.setdefault(layout.classes[target], []).append(name)
    return names


def photographs(count: int, *classes: str) -> list[str]:
    return [f"{name}/{number:05}.jpg" for name in classes for number in range(count)]


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Val"])
def test_folders_name_splits(val: str) -> None:
    names = [f"train/{name}" for name in photographs(3, "dog", "cat")]
    names += [f"{val}/cat/a.png", "test/dog/b.webp", "README.md", "masks/cat/1.png"]
    layout = laid_out(names)
    assert layout.classes == ("cat", "dog")
    assert by_class(layout, layout.train)["dog"] == [f"train/dog/0000{n}.jpg" for n in range(3)]
    assert list(layout.val) == [(f"{val}/cat/a.png", 0)]
    assert list(layout.test) == [("test/dog/b.webp", 1)]
    assert [part.folder for part in (layout.train, layout.val, layout.test)] == [
        "train",
        val,
        "test",
    ]
    assert "masks" in " ".join(layout.notes)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_split_of_a_growing_class(share: float) -> None:
    """Each class has enough to validate, and images move only while the hash chooses too few."""
    dice, names, before = random.Random(share), [*photographs(150, "dog")], set[str]()
    for count in range(1, 300):
        names.insert(dice.randrange(len(names)), f"cat/{dice.random()}.jpg")
        layout = lay_out(names, val_fraction=share)
        val = set(by_class(layout, layout.val).get("cat", ()))
        cats = sorted((name for name in names if name[0] == "c"), key=position)
        chosen = [name for name in cats if position(name) < share]
        assert val == set(cats[: len(val)])  # the lowest
        assert len(val) >= min(2, count // 2)
        assert len(val) >= min(len(chosen), count - 1)
        assert len(val) >= min(10, count * min(share, 0.1)) or len(val) == count // 2
        if len(chosen) >= 10:
            assert val == set(chosen)
            assert before <= val or len(before) <= 10
        before = val


def position(name: str) -> float:
    return int(hashlib.sha256(f"split:{name}".encode()).hexdigest()[:8], 16) / 2**32


def test_hidden_files_and_other_files_are_ignored() -> None:
    names = [*photographs(40, "cat", "dog"), "cat/.x.jpg", ".git/a.jpg", "__MACOSX/cat/._1.jpg"]
    layout = laid_out([*names, "cat/notes.txt", "cat/", "dog/deep/er/x.JPEG"])
    assert layout.classes == ("cat", "dog")
    assert len(layout.train) + len(layout.val) == 81


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no images"),
        (["notes.txt"], "no images"),
        (["a.jpg", "b.jpg"], r"2 images are in no class folder.*<class>/.*labels"),
        (photographs(9, "cat"), r"one class only \(cat\)"),
        ([f"all/{name}" for name in photographs(9, "cat", "dog")], r"\(all\).*cat, dog.*all/"),
        ([*photographs(40, "cat", "dog"), "eel/"], r"class folder eel has no images"),
        ([*photographs(40, "cat", "dog"), "eel/x.svg"], r"class folder eel has no images"),
        ([f"train/{name}" for name in [*photographs(9, "cat", "dog"), "eel/"]], "train/eel has no"),
        (["val/cat/1.jpg", "val/dog/1.jpg"], "val/ found, but no train/"),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/eel/1.jpg"], "'eel' is in val/ but not"),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/"], "val/ has no images"),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/1.jpg"], "val/ has no class folders.*labels"),
        (
            ["train/cat/1.jpg", "train/dog/1.jpg", "val/1.jpg", "LOC_val_solution.csv"],
            "such as LOC_val_solution.csv",
        ),
        (["train/cat/1.jpg", "val/cat/1.jpg", "valid/cat/1.jpg"], "val/ and valid/"),
        ([*photographs(9, "cat", "dog"), "test/cat/1.jpg"], "test/ is next to"),
        (["cat/00000.jpg", "dog/b.jpg"], "none of the 2 images.*only one"),
    ],
)
def test_dataset_that_cannot_train_is_one_line(names: list[str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        laid_out(names)


@pytest.mark.parametrize(
    "classes", [("train", "plane", "test"), tuple(f"Klasse {n:02} – ä, ö" for n in range(100))]
)
def test_classes_keep_their_names(classes: tuple[str, ...]) -> None:
    """Also those of splits."""
    layout = laid_out(photographs(60, *classes))
    assert layout.classes == tuple(sorted(classes))
    assert set(by_class(layout, layout.train)) == set(classes)


def test_test_folder_without_known_classes_is_left_out() -> None:
    names = [f"{side}/{name}" for side in ("train", "val") for name in photographs(3, "cat", "dog")]
    layout = laid_out([*names, "test/1.jpg"])
    assert not len(layout.test)
    assert any("test/" in note for note in layout.notes)
    layout = laid_out([*names, "test/cat/1.jpg", "test/eel/1.jpg"])
    assert [name for name, _ in layout.test] == ["test/cat/1.jpg"]
    assert any("eel" in note for note in layout.notes)


IMAGENET = [
    *(f"train/{name}" for name in photographs(3, "n01440764", "n01443537")),
    *(f"val/ILSVRC2012_val_0000000{n}.JPEG" for n in range(1, 5)),
]


@pytest.mark.parametrize(
    ("called", "text"),
    [
        (
            "LOC_val_solution.csv",
            "ImageId,PredictionString\n"
            "ILSVRC2012_val_00000001,n01440764 85 1 499 272 n01440764 1 1 2 2 \n"
            "ILSVRC2012_val_00000002,n01443537 1 2 3 4\n"
            "ILSVRC2012_val_00000003,n01440764 1 2 3 4\n"
            "ILSVRC2012_val_00000004,n01440764 1 2 3 4\n",
        ),
        (
            "val_map.txt",
            "".join(
                f"ILSVRC2012_val_0000000{n}.JPEG n0144{'3537' if n == 2 else '0764'}\n"
                for n in range(1, 5)
            ),
        ),
        (
            "val.csv",
            "".join(
                f"val/ILSVRC2012_val_0000000{n}.JPEG,n0144{'3537' if n == 2 else '0764'}\r\n"
                for n in range(1, 5)
            ),
        ),
    ],
)
def test_flat_validation_folder_with_a_mapping_file(called: str, text: str) -> None:
    layout = laid_out(IMAGENET, text, called)
    assert layout.classes == ("n01440764", "n01443537")
    assert len(layout.train) == 6
    named = by_class(layout, layout.val)
    assert named["n01443537"] == ["val/ILSVRC2012_val_00000002.JPEG"]
    assert len(named["n01440764"]) == 3


def test_table_has_classes_and_splits() -> None:
    images = [f"photos/{n}.jpg" for n in range(6)]
    rows = ["path,label,split", "photos/0.jpg,Hund,", 'photos/1.jpg, "Kat, Katze"']
    rows += ["photos/2.jpg,Hund,"]
    rows += ["photos/3.jpg,Hund,valid", "photos/4.jpg,Hund,test", "photos/2.jpg,Hund,train"]
    layout = laid_out([*images, "meta/labels.csv"], "\ufeff" + "\n".join(rows), "meta/labels.csv")
    assert layout.classes == ("Hund", "Kat, Katze")
    assert list(layout.val) == [("photos/3.jpg", 0)]
    assert list(layout.test) == [("photos/4.jpg", 0)]
    assert [name for name, _ in layout.train] == ["photos/0.jpg", "photos/2.jpg", "photos/1.jpg"]
    assert any(": 1 left out" in note and "photos/5.jpg" in note for note in layout.notes)


def test_table_of_json_lines() -> None:
    rows = "\n".join(f'{{"file_name": "{n}.png", "label": {n % 2}, "x": [1]}}' for n in range(60))
    layout = laid_out([f"set/{n}.png" for n in range(60)], rows, "set/metadata.jsonl")
    assert layout.classes == ("0", "1")
    assert len(layout.train) + len(layout.val) == 60
    assert len(layout.val)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a.jpg,cat\nb.jpg,dog\nc.jpg,cat\nd.jpg,dog\n", r"names 2 files .*c\.jpg first"),
        ("a.jpg,cat\na.jpg,dog\n", r"a\.jpg both cat in train and dog in train"),
        ("a.jpg,cat\nb.jpg,\n", "line 2 "),
        ("a.jpg,cat\nb.jpg\n", "line 2 "),
        ("path,label,split\na.jpg,cat,holdout\n", "holdout"),
        ("label\ncat\n", "line 1 "),
        (",,\n", "line 1 "),
    ],
)
def test_table_that_does_not_fit_the_images_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as raised:
        laid_out(["a.jpg", "b.jpg"], text)
    assert "labels.csv" in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"\x00,\x00\n", b"[1]\n{"])
@pytest.mark.parametrize("called", ["a.csv", "a.jsonl", "a.txt"])
def test_invalid_table_is_refused(called: str, data: bytes) -> None:
    with pytest.raises(InputError, match=rf"labels a\.{called[2:]}"):
        lay_out(["a.jpg", "b.jpg"], val_fraction=0.1, labels=Labels.parse(called, data))


def test_known_classes_need_no_training_images() -> None:
    layout = lay_out(["val/cat/1.jpg"], val_fraction=0.1, classes=("ape", "cat"))
    assert list(layout.val) == [("val/cat/1.jpg", 1)]
    with pytest.raises(InputError, match="'eel' is in val/ but not"):
        lay_out(["val/eel/1.jpg"], val_fraction=0.1, classes=("ape", "cat"))


def test_order_does_not_depend_on_the_listing() -> None:
    names = photographs(50, "b", "a", "C")
    first = laid_out(names)
    random.Random(1).shuffle(names)
    assert laid_out(names) == first
    assert list(first.train.targets) == sorted(first.train.targets)


def test_val_fraction_of_0_needs_a_val_folder() -> None:
    with pytest.raises(InputError, match="there is no val/"):
        lay_out(photographs(9, "cat", "dog"), val_fraction=0)
    assert not len(lay_out(photographs(9, "cat"), val_fraction=0, classes=("cat", "dog")).val)
