"""Splits and classes of images by tables of labels."""

import json
import unicodedata
from collections.abc import Iterable
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.pictures.layout import Layout, lay_out
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.pictures.tables import Labels, labels_of
from tests.unit.pictures.test_layout import by_class, photographs


def laid_out(names: Iterable[str], labels: str | bytes, called: str = "labels.csv") -> Layout:
    """Lay out images by tables of one content."""
    data = labels.encode() if isinstance(labels, str) else labels
    return lay_out(names, LayoutRule(0.1), labels=labels_of(called, lambda _: data))


def classes_of(layout: Layout) -> dict[str, str]:
    """Map all images to their classes."""
    named = (by_class(layout, part) for part in layout.parts.values())
    return {name: label for one in named for label, names in one.items() for name in names}


IMAGENET = [
    *(f"train/{name}" for name in photographs(3, "n01440764", "n01443537")),
    *(f"val/ILSVRC2012_val_0000000{n}.JPEG" for n in range(1, 5)),
]


@pytest.mark.parametrize(
    ("called", "first", "line"),
    [
        ("LOC_val_solution.csv", "ImageId,PredictionString\n", "{0},{1} 85 1 49 27 {1} 1 1 2 2 \n"),
        ("val_map.txt", "", "{0}.JPEG {1}\n"),
        ("val.csv", "", "val/{0}.JPEG,{1}\r\n"),
    ],
)
def test_flat_validation_folder_with_a_mapping_file(called: str, first: str, line: str) -> None:
    classes = ("n01440764", "n01443537", "n01440764", "n01440764")
    rows = [line.format(f"ILSVRC2012_val_0000000{n}", name) for n, name in enumerate(classes, 1)]
    layout = laid_out(IMAGENET, first + "".join(rows), called)
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
    rows = "\n".join(f'{{"file": "{n}.png", "label": {n % 2}, "x": "\u2028"}}' for n in range(60))
    layout = laid_out([f"set/{n}.png" for n in range(60)], rows, "set/metadata.jsonl")
    assert layout.classes == ("0", "1")
    assert len(layout.train) + len(layout.val) == 60
    assert len(layout.val)


SIX = {f"photos/{n}.jpg": label for n, label in enumerate(("cat", "dog") * 3)}
STEMS = {name.removesuffix(".jpg"): label for name, label in SIX.items()}
BARE = {name.rpartition("/")[2]: label for name, label in SIX.items()}
FLAGS = {"cat": ("1.0", "0.0", "0.0"), "dog": ("0.0", "1.0", "0.0")}


def table(head: Iterable[str], rows: Iterable[Iterable[str]], separator: str = ",") -> str:
    return "".join(f"{separator.join(cells)}\n" for cells in ((head, *rows) if head else rows))


@pytest.mark.parametrize(
    "text",
    [
        *(table(("path", "label"), SIX.items(), separator) for separator in ",;\t|"),
        *(table((), SIX.items(), separator) for separator in (*",;\t|", " ")),
        "sep=;\r\n" + table(("id", "breed"), BARE.items(), ";").replace("\n", "\r\n"),
        table(("path", "label"), SIX.items(), "\t").encode("utf-16"),
        table((), ((f"'{name}'", f"'{label}'") for name, label in SIX.items())),
        table(("path", "label"), SIX.items()) + "\n,\n",
        table(("id", "breed"), STEMS.items()),
        table(("image_id", "label"), ((n.removesuffix(".jpg"), v) for n, v in BARE.items())),
        table(("breed", "Image_Path"), ((v, n.replace("/", "\\")) for n, v in SIX.items())),
        table(("id", "breed"), ((n.upper(), v) for n, v in SIX.items())),
        table(("", "file", "kind"), ((f"{at}", *row) for at, row in enumerate(SIX.items()))),
        table(("file", "w", "x1", "ClassId"), ((n, "30", "5", v) for n, v in SIX.items()), ";"),
        table(("id", "source", "breed"), ((n, "web", v) for n, v in SIX.items())),
        table(
            ("id", "photo", "breed"), ((f"{5 - at}", *row) for at, row in enumerate(SIX.items()))
        ),
        table(("image", "cat", "dog", "eel"), ((n, *FLAGS[v]) for n, v in SIX.items())),
        table((), ((n, v, "1", "0") for n, v in SIX.items()), "  "),
        table(("file", "breed", "sex"), ((n, v, "m") for n, v in SIX.items()), " "),
        "# of 2019, by hand\n#\n\n" + table(("path", "label"), SIX.items()),
        "#Image CLASS-ID\n#ID: 1:37\r\n" + table((), SIX.items(), " ") + "# the end\n#\n",
        "# path;label;sex\n" + table((), ((n, v, n[-5]) for n, v in SIX.items()), ";"),
        "#by\n# path\tlabel\tx\n" + table((), ((n, v, n[-5]) for n, v in SIX.items()), "\t"),
        table(("path", "label"), SIX.items()).replace("photos/3", "# photos/9.jpg,dog\nphotos/3"),
    ],
)
@pytest.mark.parametrize("called", ["labels.csv", "meta/train.tsv", "map.txt"])
def test_columns_are_known_by_names_and_images(called: str, text: str | bytes) -> None:
    layout = laid_out([*SIX, called], text, called)
    assert classes_of(layout) == SIX
    assert layout.notes == ()
    assert called in layout.form


COCO: dict[str, Any] = {
    "images": [{"id": 7 + n, "file_name": name} for n, name in enumerate(BARE)],
    "annotations": [{"id": n, "image_id": 7 + n % 6, "category_id": 40 + n % 2} for n in range(12)],
    "categories": [{"id": 40, "name": "cat"}, {"id": 41, "name": "dog"}, {"id": 42}],
}
ROWS = [{"path": name, "label": label} for name, label in SIX.items()]


@pytest.mark.parametrize("document", [COCO, ROWS, SIX])
@pytest.mark.parametrize("indent", [None, 2])
def test_document_of_json_is_a_table(document: object, indent: int | None) -> None:
    text = json.dumps(document, indent=indent)
    assert classes_of(laid_out([*SIX, "all.json"], text, "all.json")) == SIX


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (
            {**COCO, "annotations": [*COCO["annotations"], {"image_id": 7, "category_id": 41}]},
            "cat and dog",
        ),
        ({**COCO, "annotations": [{"image_id": 7}]}, "COCO.*category_id"),
        ({"images": COCO["images"], "info": {}}, "images, info.*COCO"),
        ({"path": {"0": "a.jpg"}, "label": {"0": "cat"}}, "path, label.*array of objects"),
        ({"labels": [["a.jpg", 1]]}, "labels.*array of objects"),
        ([["a.jpg", "cat"]], "row 1"),
        (3, "cannot be read"),
        ([], "empty"),
    ],
)
def test_other_document_of_json_is_named(document: object, why: str) -> None:
    with pytest.raises(InputError, match=rf"all\.json .*{why}"):
        laid_out(["a.jpg", *SIX], json.dumps(document), "all.json")


def test_class_with_blanks_is_one_class() -> None:
    text = "".join(
        f"{name} {'big cat' if label == 'cat' else label}\n" for name, label in SIX.items()
    )
    assert laid_out(SIX, text, "map.txt").classes == ("big cat", "dog")


@pytest.mark.parametrize(
    ("text", "called"),
    [("{1} {0}\n", "map.txt"), ("{0},{1}\n", "map.txt"), ("{0},0,{1}\n", "map.txt#1,3")],
)
@pytest.mark.parametrize("others", [[], ["val/cat/1.jpg"]])
def test_number_of_each_row_is_no_class(text: str, called: str, others: list[str]) -> None:
    rows = "".join(text.format(name, n) for n, name in enumerate(SIX))
    with pytest.raises(InputError, match=r"map\.txt has another value in each row"):
        laid_out([*SIX, *others], rows, called)


def test_one_image_of_each_class_validates() -> None:
    names = [*IMAGENET[:6], "val/1.jpg", "val/2.jpg"]
    layout = laid_out(names, "1.jpg,n01440764\n2.jpg,n01443537\n", "val/labels.csv")
    assert layout.val.targets == (0, 1)


def test_description_names_the_columns() -> None:
    rows = [
        (name, label, "False" if n % 3 else "True") for n, (name, label) in enumerate(SIX.items())
    ]
    form = laid_out(SIX, table(("id", "breed", "is_valid"), rows)).form
    assert [form.find(f"`{name}`") > 0 for name in ("id", "breed", "is_valid")] == [True] * 3


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("head", "values"),
    [
        ("split", ("train", "val", "test")),
        ("part of it", ("Training", "validation", "TEST")),
        ("is_validation", ("False", "True", "False")),
        ("is_train", ("1", "0", "1")),
    ],
)
def test_column_of_splits_is_used(kind: str, head: str, values: tuple[str, ...]) -> None:
    heads = ["id", "breed", *head.split(",")]
    rows = [[n, v, *values[at // 2].split(",")] for at, (n, v) in enumerate(SIX.items())]
    text = table(heads, rows)
    if kind == "jsonl":
        text = "\n".join(json.dumps(dict(zip(heads, row, strict=True))) for row in rows)
    layout = laid_out(SIX, text, f"all.{kind}")
    assert layout.val.names == ("photos/2.jpg", "photos/3.jpg")
    assert len(layout.test) == 2 * (values[2].lower() == "test")


def test_setting_chooses_columns() -> None:
    rows = [
        (n, f"masks/{n}", "ab"[at // 3], v, "01"[at % 2]) for at, (n, v) in enumerate(SIX.items())
    ]
    names = [*SIX, *(f"masks/{name}" for name in SIX)]
    text = table(("scan", "mask", "group", "breed", "fold"), rows)
    with pytest.raises(InputError, match=r"scan, mask, group.*#scan,LABEL"):
        laid_out(names, text)
    with pytest.raises(InputError, match=r"`scan` or in `mask`.*#scan,"):
        laid_out(names, text.replace("breed", "label"))
    assert classes_of(laid_out(names, text, "labels.csv#scan,breed")) == SIX
    assert laid_out(names, text, "labels.csv#2,group").classes == ("a", "b")
    assert classes_of(laid_out(SIX, table((), rows), "labels.csv#1,4")) == SIX
    flags = table(("id", "sex", "cat", "dog"), ((n, "m", *FLAGS[v][:2]) for n, v in SIX.items()))
    assert classes_of(laid_out(SIX, flags, "labels.csv#id,cat+dog")) == SIX
    for columns in ("scan,race", "scan,breed,fold", "scan,breed,fold,group"):
        with pytest.raises(InputError, match=r"race|fold|4 columns"):
            laid_out(names, text, f"labels.csv#{columns}")


@pytest.mark.parametrize("called", ["{0}/metadata.csv", "{0}.csv"])
@pytest.mark.parametrize("top", ["{0}", "{0}_images"])
def test_each_split_has_a_table(called: str, top: str) -> None:
    tables = {
        called.format(side): table(("file_name", "label"), BARE.items())
        for side in ("train", "test")
    }
    names = [f"{top.format(side)}/{name}" for side in ("train", "test") for name in BARE]
    if top == "{0}":
        with pytest.raises(InputError, match=r"labels.*(train/metadata|train)\.csv"):
            lay_out([*names, *tables], LayoutRule(0.1))
    read = labels_of(",".join(tables), lambda name: tables[name].encode())
    layout = lay_out([*names, *tables], LayoutRule(0.1), labels=read)
    assert (len(layout.test), len(layout.train) + len(layout.val)) == (6, 6)
    assert {name.partition("/")[0] for name in layout.test.names} == {top.format("test")}
    assert layout.notes == ()
    one = laid_out([*names, *tables], tables[called.format("train")], called.format("train"))
    assert [called.format("test") in note for note in one.notes if "left out" in note] == [True]


def test_other_spelling_of_the_same_letters() -> None:
    names = [f"photos/rosé{n}.jpg" for n in range(6)]
    rows = [(unicodedata.normalize("NFD", name), "ab"[n % 2]) for n, name in enumerate(names)]
    assert classes_of(laid_out(names, table((), rows))).keys() == {*names}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a.jpg,cat\nb.jpg,dog\nx.jpg,cat\ny.jpg,dog\n", r"names 2 files .*x\.jpg first"),
        ("a.jpg,cat\na.jpg,dog\n", r"a\.jpg both cat in train and dog in train"),
        ("a.jpg,cat\nb.jpg,\n", "line 2 "),
        ("path,label,split\na.jpg,cat,other\n", "other"),
        ("label\ncat\n", "no column .*a.jpg.*: .*label"),
        (",,\n", "empty"),
        ("a.jpg,cat\nb.jpg,dog, small\nc.jpg,dog,y\n", r"`2` or in `3`"),
        ('a.jpg,cat\nb.jpg,"dog\n', "cannot be read"),
        (f"a.jpg,cat\nb.jpg,{'x' * 140_000}\n", "cannot be read"),
        (f"scan,{'x' * 1000}\na.jpg,x\n", r"line 1 .*\(scan, x{50,100}\.\.\.\).*#scan,LABEL"),
        ("id,breed,sex\na,x,m\nb,y,m\nc,y,f\n", r"`breed` or in `sex`.*#id,breed"),
        ("id,cat,dog\na,1,1\nb,0,1\n", "line 2 .*cat and dog"),
        ("id,cat,dog\na,1,0\nb,0,0\n", "line 3 "),
        ("id,breed,fold\na,x,0\nb,y,1\n", "splits 0, 1 in `fold`.*#PATH,LABEL"),
        ("id,breed,covid_test\na,x,0\nb,y,1\n", "`covid_test`"),
        ("id\na\nb\n", "no column of classes next to `id`"),
        ("x,y\n1,2\n", r"line 1 .*\(x, y\).*a.jpg.*#x,LABEL"),
        ("scan,breed\na.jpg,x\nb.jpg,y\n", r"line 1 .*\(scan, breed\).*#scan,LABEL"),
        ("n01,cat\na,cat\nb,dog\n", r"line 1 .*\(n01, cat\)"),
        ("name,label\nRex,dog\n", "no column .*a.jpg.*: name, label"),
        ("path,label\nRex,dog\n", "names 1 files .*Rex first.*#PATH,LABEL"),
    ],
)
def test_table_that_does_not_fit_the_images_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as raised:
        laid_out(["a.jpg", "b.jpg", "c.jpg"], text)
    assert "labels.csv" in str(raised.value)


def test_bare_name_in_two_folders_is_refused() -> None:
    with pytest.raises(InputError, match=r"1\.jpg in .* can be \w/1\.jpg or \w/1\.jpg"):
        laid_out(["a/1.jpg", "b/1.jpg", "b/2.jpg"], "1.jpg,cat\n2.jpg,dog\n")


@pytest.mark.parametrize(
    "data",
    ["path,label\n\xe9.jpg,x".encode("cp1252"), b"PK\3\4\xff", b"", b"\xff\xfe\x00", b"[1]\n{"],
)
@pytest.mark.parametrize("called", ["a.csv", "a.jsonl", "a.txt"])
def test_invalid_table_is_refused(called: str, data: bytes) -> None:
    with pytest.raises(InputError, match=rf"a\.{called[2:]}"):
        lay_out(["a.jpg", "b.jpg"], LayoutRule(0.1), labels=[Labels.parse(called, data)])
