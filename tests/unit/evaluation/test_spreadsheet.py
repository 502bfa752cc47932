"""Tables are read as they were written, and a spreadsheet computes no cell."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kfp_ddp.cli.serve import write_table
from kfp_ddp.core.errors import InputError, UnavailableError
from kfp_ddp.core.spreadsheet import Reader, write_rows
from kfp_ddp.datasets.options import expanded
from kfp_ddp.evaluation import bulk_sample
from kfp_ddp.evaluation.bulk import Table, content_of
from kfp_ddp.evaluation.drift import Sample, key_of
from kfp_ddp.evaluation.label_check import Doubt, to_csv
from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.evaluation.predict import Predictions
from kfp_ddp.pictures.splits import Index, Splits
from kfp_ddp.pictures.tables import Labels
from kfp_ddp.storage.listing import Listing
from kfp_ddp.training import own_script
from kfp_ddp.training.spec import model_file
from kfp_ddp.training.spec.config import TrainConfig

TEXTS = ("=1+1", "+1", "-1", "@x", "\tx", "\n=1", "\r", "\uff1d1", "'=1", "''@x", "a\r=1", "x;=1+1")
SPECIAL = [*map(chr, range(128)), *"\x85\u2028\uff1d"]
CONTROLS = [*map(chr, (*range(32), *range(127, 160))), *"\u2028\u2029\ufeff"]
NAMES = st.text(st.sampled_from(SPECIAL) | st.characters(exclude_categories=["Cs"]))
COMPUTED = re.compile("[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?")


def predictions(name: str, folder: Path) -> str:
    tally = Tally(2)
    tally.update(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    index = Index(folder, ("a", name), (f"{folder}/1.jpg",), (0,))
    return Predictions(index, (), tally, torch.zeros(0)).to_csv()


def labels(name: str, folder: Path) -> str:
    return to_csv([Doubt(name, name, "b", 0.5, "label", name, ())])


def pictures(name: str, folder: Path) -> str:
    answer = {"picture": name, "classes": [{"class": name, "probability": 0.5}]}
    write_table(folder / "p.csv", [answer, {"picture": "b", "error": name}], 1)
    return (folder / "p.csv").read_bytes().decode()


def batch(name: str, folder: Path) -> str:
    table = Table(f"{folder}/t.csv", ["a"], name)
    row = {"name": name, "class": name, "probability_a": 1e-7, "bundle": name, "reason": name}
    table.write(folder / "t.csv", [{**row, "object": "0 1"}])
    return (folder / "t.csv").read_bytes().decode()


def sample(name: str, folder: Path) -> str:
    table, listing, rows = Table(f"{folder}/s.csv"), Listing(), Sample()
    listing.add(name, 1, 2)
    rows.merge([{key_of(name): [0.5]}])
    bulk_sample.store(table, table.name, listing, rows)
    return (folder / "s.csv.sample").read_bytes().decode()


def any_table(name: str, folder: Path) -> str:
    file = io.StringIO(newline="")
    write_rows(file, [("a", "b"), (name, -1.5), (None, name)])
    return file.getvalue()


WRITERS = (predictions, labels, pictures, batch, sample, any_table)


def cells_of(text: str, separator: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
@example(name="0\r=HYPERLINK(1).png")
@example(name="x;=1+1;")
@example(name='x";\t=1')
@example(name='x;"=1')
@pytest.mark.parametrize("write", WRITERS)
def test_each_table_is_read_as_written(
    write: Callable[[str, Path], str], tmp_path: Path, name: str
) -> None:
    text = write(name, tmp_path)
    reader = Reader(io.StringIO(text, newline=""))
    rows = list(reader)
    assert len(rows) == len(cells_of(text, ",")) - 1
    assert name in {cell for row in rows for cell in row.values()}
    assert all(len(row) == len(reader.columns) for row in rows)
    # Of the tables that people open, Excel shows all letters.
    assert text.startswith("\ufeff") == (write in (labels, pictures))
    marks = io.StringIO(text.removeprefix("\ufeff"), newline="")
    assert list(Reader(marks)) == rows
    for separator in ",;\t":
        plain = text.removeprefix("\ufeff")
        for cell in (cell for row in cells_of(plain, separator) for cell in row):
            # With another separator, a cell may begin with the end of the row before.
            shown = cell if separator == "," else cell.lstrip("\n")
            assert NUMBER.fullmatch(cell) or not COMPUTED.match(shown)


def script(name: str, folder: Path) -> str:
    """The table of an own script, which a program reads."""
    index = Index(folder, ("a", name), (name,), (1,))
    splits = Splits(index, index, None, by_name=False)
    config = TrainConfig.create(data="/d", output_dir="/o", script=model_file.pack(__file__))
    with pytest.MonkeyPatch.context() as patch:  # of the environment
        for variable in (own_script.IMAGES, own_script.CONFIG, own_script.OUTPUT):
            patch.setenv(variable, "")
        own_script._write_inputs(folder, config, splits)
    return (folder / "images.csv").read_bytes().decode()


@pytest.mark.parametrize("write", [*WRITERS, script])
def test_control_characters_are_read_as_written(
    write: Callable[[str, Path], str], tmp_path: Path
) -> None:
    for character in CONTROLS:
        for name in (f"Icon{character}", f"{character}a", f"a{character}b", character * 2):
            text = write(name, tmp_path)
            rows = list(Reader(io.StringIO(text, newline="")))
            assert name in {cell for row in rows for cell in row.values()}, (name, text)
            assert len({len(row) for row in rows}) == 1


def test_the_first_row_that_is_missing_is_named(tmp_path: Path) -> None:
    table = Table(f"{tmp_path}/t.csv", ["a"], "b")
    listing = Listing()
    for name in ("1.jpg", "Icon\r", "x.jpg"):
        listing.add(name, 1, 2)
    row = {"name": "1.jpg", "bundle": "b", "object": content_of(listing, 0)}
    table.write(tmp_path / "t.csv", [{"class": "a", "probability_a": 1.0, "reason": "", **row}])
    with pytest.raises(UnavailableError, match=r"lacks 2 rows, that of 'Icon\\r' first"):
        table.join(listing, {})


@pytest.mark.parametrize("name", ["=1.jpg", "-1.jpg", "@a.jpg", "'+1.jpg", "a;=.jpg"])
@pytest.mark.parametrize("write", [labels, pictures])
def test_a_table_of_ours_is_one_of_labels(
    write: Callable[[str, Path], str], tmp_path: Path, name: str
) -> None:
    table = Labels.parse("t.csv", write(name, tmp_path).encode())
    assert name in {column[1] for column in table.columns}


@pytest.mark.parametrize("text", [*TEXTS, "a=b", "", "'a", "ä,b"])
def test_only_what_would_be_computed_is_changed(text: str) -> None:
    file = io.StringIO(newline="")
    write_rows(file, [("a", "b"), (text, -1.5)])
    assert list(Reader(io.StringIO(file.getvalue(), newline=""))) == [{"a": text, "b": "-1.5"}]
    assert cells_of(file.getvalue(), ",")[1][1] == "-1.5"
    assert (cells_of(file.getvalue(), ",")[1][0] != text) == (text in TEXTS)


def test_what_is_no_table_is_a_value_error(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for content in ("path\n" + "x" * 200_000, "x" * 200_000, 'path\n"' + "x\n" * 200_000):
        with pytest.raises(ValueError, match="field"):
            list(Reader(io.StringIO(content, newline="")))
        file.write_text(content)
        with pytest.raises(InputError, match="cannot be read"):
            expanded([f"@{file}"])
