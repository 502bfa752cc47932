"""A table of path, label and perhaps split, as CSV, JSON lines, or two columns of text."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfp_ddp.core.errors import InputError

LARGEST = 256 << 20
"""Bytes of a table that is read: one of a million images has some 80 MB."""
_PATH = ("path", "file_name", "filename", "file", "image", "image_id", "imageid", "name")
_BOXES = "predictionstring"
"""A column of ImageNet's LOC_val_solution.csv: the label, and boxes after it."""
_LABEL = ("label", "class", "category", _BOXES)
_SPLIT = ("split", "set", "subset")


class Row(NamedTuple):
    """One image: its path as the table has it, its class, and its split, '' where it says none."""

    path: str
    label: str
    split: str


@dataclass(frozen=True)
class Labels:
    """A table that was read; `name` is that of its file below the dataset."""

    name: str
    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, name: str, data: bytes) -> "Labels":
        """The table in `data`; the suffix of `name` says how it is written.

        Raises:
            InputError: it is no such table, or a row lacks a path or a label.
        """
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"labels {name} is no UTF-8 text: save it as such") from None
        kind = name.lower().rpartition(".")[2]
        try:
            found = _objects(text) if kind in ("jsonl", "json") else _columns(text, kind)
            rows = tuple(_checked(name, found))
        except InputError:
            raise
        except (csv.Error, ValueError, RecursionError) as error:
            raise InputError(f"labels {name} cannot be read ({error}): correct it") from None
        if not rows:
            raise InputError(f"labels {name} is empty: give a row of path and label an image")
        return cls(name, rows)


def _columns(text: str, kind: str) -> Iterator[tuple[int, Row]]:
    """Rows of a CSV with or without a header, or of text in two columns, with their lines."""
    if kind == "txt":
        lines: Iterator[list[str]] = (line.split(None, 1) for line in text.splitlines())
    else:
        file = io.StringIO(text, newline="")
        lines = csv.reader(file, delimiter="\t" if kind == "tsv" else ",", skipinitialspace=True)
    path, label, split, boxes = 0, 1, 2, False
    for number, cells in enumerate(lines, 1):
        heads = [cell.strip().lower() for cell in cells]
        if number == 1 and _first(heads, _PATH) >= 0 and _first(heads, _LABEL) >= 0:
            path, label, split = (_first(heads, known) for known in (_PATH, _LABEL, _SPLIT))
            boxes = heads[label] == _BOXES
        elif cells:
            said = _cell(cells, label)
            said = said.partition(" ")[0] if boxes else said
            yield number, Row(_cell(cells, path), said, _cell(cells, split))


def _first(heads: Sequence[str], known: Sequence[str]) -> int:
    """Where the first column stands that is called as one of `known`; -1 for nowhere."""
    return next((heads.index(name) for name in known if name in heads), -1)


def _cell(cells: Sequence[str], at: int) -> str:
    return cells[at].strip() if 0 <= at < len(cells) else ""


def _objects(text: str) -> Iterator[tuple[int, Row]]:
    """Rows of JSON lines, with their lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(f"line {number} is no JSON object")
        fields = {str(key).lower(): value for key, value in found.items()}
        yield number, Row(*(_value(fields, known) for known in (_PATH, _LABEL, _SPLIT)))


def _value(fields: dict[str, object], known: Sequence[str]) -> str:
    value = next((fields[name] for name in known if name in fields), "")
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _checked(name: str, rows: Iterator[tuple[int, Row]]) -> Iterator[Row]:
    for number, row in rows:
        if not row.path or not row.label:
            raise InputError(
                f"line {number} of labels {name} has no path or no label: give both, as "
                "path,label or under such a header"
            )
        yield row._replace(path=row.path.removeprefix("./"))
