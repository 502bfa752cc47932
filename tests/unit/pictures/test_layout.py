"""Images, classes and splits of a dataset, from names alone and on disk."""

import hashlib
import json
import os
import random
import tarfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.settings import rule_of
from kfp_ddp.datasets.versions import leases_of
from kfp_ddp.pictures.layout import Layout, Part, lay_out
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.pictures.splits import count_images, scan, sides_of, splits_of
from kfp_ddp.pictures.tables import labels_of
from kfp_ddp.training.prepare import _scan
from tests.files import write
from tests.training_ranks import run


def laid_out(names: Iterable[str], labels: str = "", called: str = "labels.csv") -> Layout:
    read = labels_of(called, lambda _: labels.encode()) if labels else ()
    return lay_out(names, LayoutRule(0.1), labels=read)


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
    assert [part.folder for part in layout.parts.values()] == ["train", val, "test"]
    assert "masks" in " ".join(layout.notes)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_split_of_a_growing_class(share: float) -> None:
    """Each class has enough to validate, and images move only while the hash chooses too few."""
    dice, names, before = random.Random(share), [*photographs(150, "dog")], set[str]()
    for count in range(1, 300):
        names.insert(dice.randrange(len(names)), f"cat/{dice.random()}.jpg")
        layout = lay_out(names, LayoutRule(share))
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


def tree(text: str, suffix: str = ".jpg") -> list[str]:
    """Return 6 files in each folder: "a,b*c,d e" has a/c, a/d, b/c, b/d and e."""
    parts = [part.partition("*") for part in text.split()]
    folders = [
        (top, sub) for tops, _, subs in parts for top in tops.split(",") for sub in subs.split(",")
    ]
    return [f"{top}/{sub}/{n}{suffix}".replace("//", "/") for top, sub in folders for n in range(6)]


@pytest.mark.parametrize(
    ("text", "classes", "counts"),
    [  # images in train and val together, and in test
        ("seg_train/seg_train,seg_test/seg_test*b,f,s seg_pred/seg_pred", "b f s", (18, 18)),
        ("training_set/training_set,test_set/test_set*cats,dogs", "cats dogs", (12, 12)),
        ("train2017,dev-2*a,b", "a b", (24, 0)),
        ("TrainData,HoldoutData*a,b", "a b", (12, 12)),
        ("fold_0,Fold1,fold-2*a,b", "a b", (36, 0)),
        ("fold_0,fold_1,test*a,b", "a b", (24, 12)),
        ("train*a,b train_unlabeled", "a b", (12, 0)),
        ("train,val,test*a,b masks*a", "a b", (24, 12)),
        ("bus,car,train*2019,2020", "bus car train", (36, 0)),
        ("cat,dog test*a,b", "cat dog test", (24, 0)),
        ("trainer,constraint,latest", "constraint latest trainer", (18, 0)),
        ("a/images,b/images", "a b", (12, 0)),
        ("a,b #recycle/a $RECYCLE.BIN/S-1-5 @Recently-Snapshot ~snapshot/a", "a b", (12, 0)),
        ("a,b Recycler/a LOST+FOUND found.000 a/recycler", "a b", (12, 0)),
        ("train*a,b,#recycle,lost+found,.cache a/@eaDir __MACOSX/a", "a b", (12, 0)),
        ("$1,$5,#1,__other__,_noise", "#1 $1 $5 __other__ _noise", (30, 0)),
    ],
)
def test_tree_has_one_reading(text: str, classes: str, counts: tuple[int, int]) -> None:
    layout = laid_out(tree(text))
    assert " ".join(layout.classes) == classes
    assert (len(layout.train) + len(layout.val), len(layout.test)) == counts
    assert len(tree(text)) == sum(counts) or any("left out" in note for note in layout.notes)


@pytest.mark.parametrize(
    ("text", "glob"),
    [
        *(("sea,forest,test", "exclude=test/**"), ("sea,forest,Validation", "Validation/**")),
        *(("sea,forest,val-images", "val-images/**"), ("sea,forest test*a,b", "test/**")),
        *(("train*sea,forest,test", "exclude=train/test/**"), ("sea,forest,latest", "")),
    ],
)
def test_a_class_with_the_name_of_a_split_is_a_note(text: str, glob: str) -> None:
    notes = [note for note in laid_out(tree(text)).notes if "exclude=" in note]
    assert bool(notes) == bool(glob)
    assert all(glob in note for note in notes)
    as_told = lay_out(tree(text.removeprefix("train*")), LayoutRule(0.1, layout="classes"))
    assert not any("exclude=" in note for note in as_told.notes)


@pytest.mark.parametrize(
    ("text", "as_classes", "as_splits"),
    [
        ("camera1,camera2*a,b", "camera1 camera2", "a b"),
        ("left/images,right/images*a,b", "left right", None),
        ("bus,car*train,test", "bus car", "test train"),
        ("train_val,test*a,b", "test train_val", "a b"),
        ("bus,car,boat,train*front,side", "boat bus car train", "front side"),
        ("bus,car train*steam,diesel", "bus car train", "diesel steam"),
        ("train*a,b masks", "masks train", "a b"),
        ("train*part1,part2 train/part1,train/part2*a,b val*a,b", "train val", None),
        ("fold_0,fold_1*train,val", "fold_0 fold_1", "train val"),
        ("train_station,test_tube", "test_tube train_station", None),
    ],
)
def test_tree_of_two_readings_is_refused(text: str, as_classes: str, as_splits: str | None) -> None:
    with pytest.raises(InputError, match="layout="):
        laid_out(tree(text))
    for layout, classes in (("classes", as_classes), ("splits", as_splits)):
        if classes is not None:
            images = lay_out(tree(text), LayoutRule(0.1, layout=layout))
            assert " ".join(images.classes) == classes


def test_tables_within_reach_are_no_class_folders() -> None:
    with pytest.raises(InputError, match=r"labels .*train\.csv.*layout=classes"):
        laid_out([*tree("train_images,test_images,sample"), "train.csv"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("cat", "cat "), ("cat", "cat\u200b"), ("cat", "\u0441at"), ("cat", "Cat")),
        ("it's", "it\u2019s"),
    ],
)
@pytest.mark.parametrize("text", ["1,2", "train*1,2", "train*1,zoo val*2,zoo"])
def test_classes_that_look_alike_are_refused(text: str, one: str, other: str) -> None:
    names = tree(text)
    names = [f"{n.rpartition('/')[0].replace('1', one).replace('2', other)}/x.jpg" for n in names]
    with pytest.raises(InputError, match="look alike") as caught:
        laid_out(names)
    assert ascii(other) in str(caught.value)


def test_two_forms_of_one_class_are_one() -> None:
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    layout = laid_out([f"train/{name}" for name in tree(f"{composed},{apart},the")])
    assert layout.classes == (composed, "the")
    layout = lay_out(tree(f"val*{composed}"), LayoutRule(0.1), classes=(apart, "the"))
    assert (layout.classes, len(layout.val)) == ((apart, "the"), 6)
    table = (
        "".join(f"{n}.jpg,{apart if n % 2 else composed}\n" for n in range(8)) + "8.jpg,b\n9.jpg,b"
    )
    assert laid_out([f"{n}.jpg" for n in range(10)], table).classes == ("b", composed)
    assert laid_out(tree("a,A")).classes == ("A", "a")


@pytest.mark.parametrize(
    ("suffix", "why"),
    [
        (".dng", "12 .dng.*convert"),
        (".zip", "12 .zip.*unpack"),
        ("", "12 without a suffix.*rename"),
        (".jpg_large", "12 .jpg_large.*rename"),
        (".JPG.1", "12 .jpg.1.*rename"),
    ],
)
def test_files_that_are_not_read_are_named(suffix: str, why: str) -> None:
    with pytest.raises(InputError, match=f"no images .*{why}"):
        laid_out(tree("a,b", suffix))
    with pytest.raises(InputError, match=r"class folder c has no images .*6 "):
        laid_out([*tree("a,b"), *tree("c", suffix)])
    (note,) = laid_out([*tree("a,b"), *tree("a,b", suffix)]).notes
    assert note.startswith("12 files not read: ")


def test_system_folders_are_named() -> None:
    files = ["a/.x.jpg", "a/n.txt", "System Volume Information/x.dat", "a/~$x.doc", "a_$folder$"]
    (system, other) = laid_out([*tree("a,b"), "a/", *files]).notes
    assert "System Volume Information 1" in system
    assert other == "1 file not read: 1 .txt"
    with pytest.raises(InputError, match=r"no images .*#a 6"):
        laid_out(tree("#a,#b"))


@pytest.mark.parametrize("suffix", [".jpg", ".ppm", ".PGM", ".pbm", ".pnm", ".webp"])
def test_suffixes_of_images(suffix: str) -> None:
    assert len(laid_out(tree("a,b", suffix)).train)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no images"),
        (["a.jpg", "b.jpg"], r"2 images are in no class folder.*<class>/.*labels"),
        (photographs(9, "cat"), r"one class only \(cat\)"),
        ([f"all/{name}" for name in photographs(9, "cat", "dog")], r"\(all\).*cat, dog.*all/"),
        (tree("dataset/images*cat,dog"), r"\(dataset\).*cat, dog.*use dataset/images/ as"),
        ([*photographs(40, "cat", "dog"), "eel/"], r"class folder eel has no images"),
        ([f"train/{name}" for name in [*photographs(9, "cat", "dog"), "eel/"]], "train/eel has no"),
        (["val/cat/1.jpg", "val/dog/1.jpg"], "val/ found, but no train/"),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/eel/1.jpg"], "'eel' is in val/ but not"),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/"], "val/ has no images"),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/1.jpg"], "val/ has no class folders.*labels"),
        (["train/cat/1.jpg", "val/1.jpg", "LOC_val_solution.csv"], "such as LOC_val_solution.csv"),
        (["train/cat/1.jpg", "val/1.jpg", "meta.xlsx"], "export meta.xlsx as CSV"),
        (["a.jpg", "b.jpg", "readme.txt", "imagelabels.mat"], "export imagelabels.mat as CSV"),
        (["all/1.jpg", "all/2.jpg", "readme.txt", "train.json"], "such as train.json"),
        (["all/1.jpg", "all/2.jpg", "all/labels.tsv", "list.txt"], "such as all/labels.tsv"),
        (
            [
                *(f"train/{name}" for name in photographs(2, "cat", "dog")),
                *("val/images/1.jpg", "words.txt", "train_list.txt", "val/val_annotations.txt"),
            ],
            "'images' is in val/ but not.*such as val/val_annotations.txt",
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


def test_known_classes_need_no_training_images() -> None:
    layout = lay_out(["val/cat/1.jpg"], LayoutRule(0.1), classes=("ape", "cat"))
    assert list(layout.val) == [("val/cat/1.jpg", 1)]
    with pytest.raises(InputError, match="'eel' is in val/ but not"):
        lay_out(["val/eel/1.jpg"], LayoutRule(0.1), classes=("ape", "cat"))


def test_order_does_not_depend_on_the_listing() -> None:
    names = photographs(50, "b", "a", "C")
    first = laid_out(names)
    random.Random(1).shuffle(names)
    assert laid_out(names) == first
    assert list(first.train.targets) == sorted(first.train.targets)


def test_val_fraction_of_0_needs_a_val_folder() -> None:
    with pytest.raises(InputError, match="there is no val/"):
        lay_out(photographs(9, "cat", "dog"), LayoutRule(0))
    assert not len(lay_out(photographs(9, "cat"), LayoutRule(0), classes=("cat", "dog")).val)


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


def test_each_image_validates_in_one_fold(tmp_path: Path) -> None:
    names = [
        f"{label}/{n:03}.jpg" for label, count in (("cat", 23), ("dog", 4)) for n in range(count)
    ]
    data = touch(tmp_path / "data", *names)
    validated: list[str] = []
    for number in range(1, 6):
        rule = {"val_fraction": 0.1, "fold": f"{number}/5"}
        _, train, val = _scan(run(data, **rule, output_dir=str(tmp_path / "run")))
        assert len(train) + len(val) == len(names)
        assert sides_of(data, "val", ("cat", "dog"), rule) == (val, {"train": train})
        assert 4 <= val.targets.count(0) <= 5
        validated += val.paths
    assert sorted(validated) == [f"{data}/{name}" for name in names]
    assert rule_of({"fold": "2/5"}) == LayoutRule(fold="2/5")


def test_a_fold_needs_images_without_a_split() -> None:
    with pytest.raises(InputError, match="fold=1/2 divides images without a split"):
        lay_out(tree("train,val*a,b"), LayoutRule(0.1, fold="1/2"))


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2", "1/5/5", "a/b"])
def test_a_fold_is_a_part(fold: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fold"):
        run(tmp_path, fold=fold)


def test_layout_is_a_setting_of_sync_training_and_evaluation(tmp_path: Path) -> None:
    rule = rule_of({"layout": "splits", "val_fraction": 0.2})
    assert rule == LayoutRule(0.2, "", "splits")
    touch(tmp_path, *tree("camera1,camera2*a,b"))
    config, train, val = _scan(run(tmp_path, layout="splits", output_dir=str(tmp_path / "run")))
    index, _ = sides_of(tmp_path, "val", train.classes, config.model_dump())
    assert (index, index.classes) == (val, ("a", "b"))
    for trained in ({}, {"layout": "auto"}):
        with pytest.raises(InputError, match="layout="):
            sides_of(tmp_path, "val", ("a", "b"), trained)


def test_class_folders_may_be_links(tmp_path: Path) -> None:
    elsewhere = touch(tmp_path / "elsewhere", "1.jpg", "2.jpg")
    for split in ("train", "val"):
        touch(tmp_path / "data", f"{split}/dog/1.jpg")
        (tmp_path / "data" / split / "cat").symlink_to(elsewhere)
    found = splits_of(tmp_path / "data")
    assert (found.train.root, len(found.train)) == (tmp_path / "data" / "train", 3)
    assert not found.by_name


def test_training_stays_with_the_version_that_current_led_to(tmp_path: Path) -> None:
    first, link = touch(tmp_path / "versions/1", *photographs(4, "a", "b")), tmp_path / "current"
    link.symlink_to("versions/1")
    config, train, val = _scan(run(link, output_dir=str(tmp_path / "run")))
    assert {Path(config.data), train.root, val.root} == {first}
    assert leases_of(link) == leases_of(first)


@pytest.mark.parametrize(
    "address", ["gs://bucket/flowers/", "/data/flowers", "file:///data/flowers"]
)
def test_absolute_paths_of_a_table_are_names_below_the_address(
    tmp_path: Path, address: str
) -> None:
    """A version has the address of its source."""
    (tmp_path / "_MANIFEST.jsonl").write_text(json.dumps({"format": 1, "source": address}))
    for number in range(12):
        write(tmp_path / "x" / f"{number}.jpg", "")
    start = address.removeprefix("file://").rstrip("/")
    for root in (start, tmp_path):
        rows = "".join(f"{root}/x/{n}.jpg,{'ab'[n % 2]}\n" for n in range(12))
        write(tmp_path / "labels.csv", f"path,label\n{rows}")
        for setting in ("labels.csv", f"{root}/labels.csv"):
            assert splits_of(tmp_path, LayoutRule(0.2, setting)).train.classes == ("a", "b")
    write(tmp_path / "labels.csv", f"path,label\n{rows}/elsewhere/x/1.jpg,a\n")
    with pytest.raises(InputError, match=r"names 1 files .* /elsewhere/x/1\.jpg first"):
        splits_of(tmp_path, LayoutRule(0.2, "labels.csv"))


def test_archive_has_the_same_splits_as_the_folder(tmp_path: Path) -> None:
    names = [f"{n:03}.jpg" for n in range(60)]
    rows = "".join(f"{name},{'cat' if int(name[:3]) % 3 else 'dog'}\n" for name in names)
    touch(tmp_path / "files", *names)
    (tmp_path / "files" / "labels.csv").write_text(rows)
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "0.tar", "w") as archive:
        for path in sorted((tmp_path / "files").iterdir()):
            archive.add(path, path.name)
    plain = splits_of(tmp_path / "files", LayoutRule(0.3, "labels.csv"))
    packed = splits_of(tmp_path / "packed", LayoutRule(0.3, "labels.csv"))
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
            splits_of(tmp_path, LayoutRule(labels=name))
    with pytest.raises(InputError, match="has no folder val/"):
        sides_of(tmp_path, "val", ("cat", "dog"), {})
    with pytest.raises(InputError, match="has no folder test/"):
        sides_of(tmp_path, "test", ("cat", "dog"), {"val_fraction": 0.1})


def test_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    for name in (b"cat/1.png", b"cat/2.png", b"dog/1.png", b"dog/caf\xe9.png"):
        path = tmp_path / "train" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for list_images in (lambda: splits_of(tmp_path), lambda: scan(tmp_path / "train")):
        with pytest.raises(InputError, match=r"dog/caf\\udce9\.png' is not UTF-8") as caught:
            list_images()
        str(caught.value).encode()


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
