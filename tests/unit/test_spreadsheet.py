"""Tables are read as they were written, and a spreadsheet computes no cell."""

import csv
import io

import pytest

from kfp_ddp.core.spreadsheet import Reader, write_rows
from kfp_ddp.evaluation.label_check import Doubt, to_csv

TEXTS = ("=1+1", "+1", "-1", "@x", "\tx", "\n=1", "\uff1d1", "'=1", "''@x")


@pytest.mark.parametrize("text", [*TEXTS, "a=b", "", "'a", "ä,b"])
def test_text_is_read_as_written(text: str) -> None:
    file = io.StringIO(newline="")
    write_rows(file, [("a", "b"), (text, -1.5)])
    assert list(Reader(io.StringIO(file.getvalue(), newline=""))) == [{"a": text, "b": "-1.5"}]
    cells = list(csv.reader(io.StringIO(file.getvalue(), newline="")))[1]
    assert cells == [f"'{text}" if text in TEXTS else text, "-1.5"]


def test_names_of_classes_are_guarded_in_the_table_of_labels() -> None:
    row = to_csv([Doubt("=a/1.jpg", "=a", "b", 0.5, "label", "", ())]).splitlines()[1]
    assert row == "'=a/1.jpg,'=a,b,0.5000,label,"
