"""A table of path, label and optionally split: CSV, JSON Lines, or text of two columns."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfp_ddp.core.errors import InputError

LARGEST = 256 << 20
"""Largest table in bytes: one of a million images has about 80 MB."""
_PATH = ("path", "file_name", "filename", "file", "image", "image_id", "imageid", "name")
_BOXES = "predictionstring"
"""A column of ImageNet's LOC_val_solution.csv: the label, and boxes after it."""
_LABEL = ("label", "class", "category", _BOXES)
_SPLIT = ("split", "set", "subset")


class Row(NamedTuple):
    """One image: its path in the table, its class, and its split or ''."""

    path: str
    label: str
    split: str


@dataclass(frozen=True)
class Labels:
    """A parsed table; `name` is that of its file in the dataset."""

    name: str
    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, name: str, data: bytes) -> "Labels":
        """Parse a table in the format of the suffix of `name`; raise InputError if invalid."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"labels {name} is not UTF-8 text: save it as UTF-8") from None
        kind = name.lower().rpartition(".")[2]
        try:
            numbered = _objects(text) if kind in ("jsonl", "json") else _columns(text, kind)
            rows = tuple(_checked(name, numbered))
        except InputError:
            raise
        except (csv.Error, ValueError, RecursionError) as error:
            raise InputError(f"labels {name} cannot be read ({error}): correct it") from None
        if not rows:
            raise InputError(f"labels {name} is empty: add a row of path and label for each image")
        return cls(name, rows)


def _columns(text: str, kind: str) -> Iterator[tuple[int, Row]]:
    """Yield line number and row of a CSV with or without header, or of text in two columns."""
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
            value = _cell(cells, label)
            value = value.partition(" ")[0] if boxes else value
            yield number, Row(_cell(cells, path), value, _cell(cells, split))


def _first(heads: Sequence[str], known: Sequence[str]) -> int:
    """Return the index of the first column with a known name; -1 if there is none."""
    return next((heads.index(name) for name in known if name in heads), -1)


def _cell(cells: Sequence[str], at: int) -> str:
    return cells[at].strip() if 0 <= at < len(cells) else ""


def _objects(text: str) -> Iterator[tuple[int, Row]]:
    """Yield line number and row of JSON Lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is not a JSON object")
        fields = {str(key).lower(): value for key, value in record.items()}
        yield number, Row(*(_value(fields, known) for known in (_PATH, _LABEL, _SPLIT)))


def _value(fields: dict[str, object], known: Sequence[str]) -> str:
    value = next((fields[name] for name in known if name in fields), "")
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _checked(name: str, rows: Iterator[tuple[int, Row]]) -> Iterator[Row]:
    for number, row in rows:
        if not row.path or not row.label:
            raise InputError(
                f"line {number} of labels {name} has no path or no label: write both, as "
                "path,label or under such a header"
            )
        yield row._replace(path=row.path.removeprefix("./"))
