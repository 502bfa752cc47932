"""Tables of tags, valid and hostile, and their slices."""

import re
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation import slices
from kfp_ddp.models.evaluation import wilson
from kfp_ddp.training.splits import Index

NAMES = ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2, wet.png")


def index(dataset: Path) -> Index:
    paths = tuple(str(dataset / "val" / name) for name in NAMES)
    return Index(dataset / "val", ("cat", "dog"), paths, (0, 0, 1, 1))


def read(dataset: Path, content: str | bytes) -> slices.Tags:
    raw = content.encode() if isinstance(content, str) else content
    (dataset / "tags.csv").write_bytes(raw)
    return slices.read("tags.csv", dataset, index(dataset))


def slices_of(dataset: Path, content: str | bytes) -> list[tuple[str, str, int, int]]:
    result = read(dataset, content).slices(index(dataset), [0, 1, 1, 1])
    assert all((one.low, one.high) == wilson(one.correct, one.samples) for one in result)
    assert all(one.accuracy == one.correct / one.samples for one in result)
    return [(one.name, one.value, one.samples, one.correct) for one in result]


def test_each_value_of_each_tag_is_a_slice(tmp_path: Path) -> None:
    table = (
        "path,site,light\n"
        "val/cat/1.png,b,night\n"
        "val/cat/2.png, a  c ,night\n"
        "val/dog/1.png,,day\n"
        '"val/dog/2, wet.png",a c,day\n'
        "train/cat/7.png,c,dusk\n"
    )
    expected = [
        ("site", "a c", 2, 1),
        ("site", "b", 1, 1),
        ("light", "day", 2, 2),
        ("light", "night", 2, 1),
    ]
    assert slices_of(tmp_path, table) == expected
    # As a spreadsheet saves it, with images named below the split.
    saved = "\ufeff" + table.replace("val/", "").replace("\n", "\r\n\r\n")
    assert slices_of(tmp_path, saved) == expected


def test_the_largest_tags_are_accepted(tmp_path: Path) -> None:
    names = [f"{number:0100}" for number in range(50)]
    tags = read(tmp_path, f"path,{','.join(names)}\ncat/1.png,{'x' * 100}{',' * 49}\n")
    assert tags.names == tuple(names)
    assert tags.values == {str(tmp_path / "val/cat/1.png"): ("x" * 100, *[""] * 49)}


def test_a_table_outside_of_the_dataset(tmp_path: Path) -> None:
    table = tmp_path / "elsewhere.csv"
    table.write_text("path,light\ncat/1.png,day\n")
    for where in (str(table), f"file://{table}"):
        assert slices.read(where, tmp_path / "data", index(tmp_path / "data")).names == ("light",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "tags.csv begins with '': its first line must have the columns, path first"),
        ("file,light\ncat/1.png,day\n", "begins with 'file,light'"),
        ("path,light,light\ncat/1.png,a,b\n", "has a tag 'light': name each once"),
        ("path,\ncat/1.png,a\n", "has a tag ''"),
        ("path," + ",".join(map(str, range(51))) + "\n", "has more than 50 tags"),
        ("path,light\ncat/1.png,day,1\n", "line 2: 3 fields under 2 columns"),
        ("path,light\ncat/1.png,day\ncat/1.png,night\n", "line 3: 'cat/1.png' has other tags"),
        (
            "path,light\nbird/1.png,day\n",
            "has no image of this split: its column path needs paths such as cat/1.png",
        ),
        ("path,light\ncat/1.png,\n", "has no image of this split"),
        ("path,li\x1bght\ncat/1.png,day\n", "tags.csv, line 1: 'li"),
        (b"path,light\ncat/1.png,\xff\n", "which is not UTF-8"),
        ('path,light\ncat/1.png,"day\n', "line 2: unexpected end of data"),
        (f"path,light\ncat/1.png,{'x' * 101}\n", "use at most 100 printable characters"),
        ("path,light\ncat/1.png,a\x00b\n", "line 2:"),
        ("path,light\ncat/1.png,a\x1b[31m\n", "use at most 100 printable characters"),
    ],
)
def test_an_invalid_table_is_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        read(tmp_path, content)
    assert "tags.csv" in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_tag_with_more_than_200_values_is_an_error(tmp_path: Path) -> None:
    names = [f"cat/{at}.png" for at in range(201)]
    paths = tuple(str(tmp_path / "val" / name) for name in names)
    many = Index(tmp_path / "val", ("cat",), paths, (0,) * 201)
    rows = [f"{name},{at}\n" for at, name in enumerate(names)]
    (tmp_path / "tags.csv").write_text("path,id\n" + "".join(rows[:200]))
    assert len(slices.read("tags.csv", tmp_path, many).values) == 200
    (tmp_path / "tags.csv").write_text("path,id\n" + "".join(rows))
    with pytest.raises(InputError, match="the tag 'id' has more than 200 values in this split"):
        slices.read("tags.csv", tmp_path, many)


@pytest.mark.parametrize("where", ["none.csv", "folder", "../tags.csv", "", "ftp://host/tags.csv"])
def test_an_unreadable_table_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "data" / "folder").mkdir(parents=True)
    (tmp_path / "tags.csv").write_text("path,light\ncat/1.png,day\n")
    with pytest.raises(InputError) as raised:
        slices.read(where, tmp_path / "data", index(tmp_path / "data"))
    assert where in str(raised.value)


def test_a_large_table_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LARGEST", 20)
    with pytest.raises(InputError, match=r"tags\.csv"):
        read(tmp_path, "path,light\ncat/1.png,day\n")
