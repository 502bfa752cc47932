"""Tables of labels as files: their cells in columns. What a column means is in `columns`."""

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import path_of
from kfp_ddp.core.spreadsheet import unguarded
from kfp_ddp.core.text import from_json
from kfp_ddp.pictures.reading import SUFFIXES, is_image
from kfp_ddp.pictures.sides import some

LARGEST = 256 << 20
"""Largest table in bytes: one of a million images has about 80 MB."""
_SEPARATORS = ",;\t|"
_SAMPLE = 1 << 16
_SHORT = 16
"""Length of cells that are stored once: classes, splits, 0 and 1."""
_IMAGE = "|".join(map(re.escape, SUFFIXES))
_TOP = re.compile(rf"\A(?:sep=(.)\r?\n)?(?:[^\S\n]*(?:#(?!\S.*(?:{_IMAGE})).*)?\n)*", re.IGNORECASE)
"""What is above the first row: a line of Excel with the separator, empty lines, comments.

A name is #1.jpg.
"""
_COMMENT = re.compile(r"^#(?:[#\t ].*|\r?)$", re.MULTILINE)
"""A comment below it, where #tag may be a class."""
_COCO = {"images", "annotations", "categories"}
"""Keys of COCO's form of JSON."""


_NOWHERE = ("\0",)
"""No table has this character."""


@dataclass(frozen=True)
class Labels:
    """The cells of a table; `name` is that of its file in the dataset."""

    name: str
    columns: tuple[list[str], ...]
    """Cells by column, all of one length. The first ones may be the header."""
    headed: bool
    """Whether they are, as in JSON."""
    chosen: tuple[str, ...] = ()
    """Columns of path, class and optionally split, if the setting names them."""
    first: int = 1
    """Line number of the first cells; 0 for the keys of JSON."""
    above: str = ""
    """The comment above them, which may name the columns."""

    @classmethod
    def parse(
        cls, name: str, data: bytes, chosen: tuple[str, ...] = (), roots: Iterable[str] = _NOWHERE
    ) -> "Labels":
        """Parse CSV, text in columns or JSON; raise InputError if invalid.

        `roots` are addresses of the dataset, as of `roots_of`: a path below one of them is a name.
        """
        text = _text_of(name, data)
        is_json = name.lower().endswith((".jsonl", ".ndjson", ".json"))
        keys: dict[str, int] = {}
        first = 0
        top = ""
        try:
            if is_json:
                rows = _values(_objects(text), keys)
            else:
                _, separator, below = _TOP.split(text, maxsplit=1)
                top = text.removesuffix(below)
                first = 1 + top.count("\n")
                rows = _lines(_COMMENT.sub("", below), separator)
            columns = _by_column(rows, roots)
        except (csv.Error, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"{name} cannot be read ({error}): correct it") from None
        if not any(map(any, columns)):
            raise InputError(f"{name} is empty: add a row of path and label for each image")
        for key, column in keys.items():
            columns[column].insert(0, key)
        above = top.rstrip().rpartition("\n")[2].strip("# ")
        return cls(name, columns, is_json, chosen, first, above)


def _text_of(name: str, data: bytes) -> str:
    """Decode a table; raise InputError if it is no text."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{name} is not text in UTF-8 or UTF-16: export it as CSV UTF-8")
    return text


def roots_of(*addresses: str) -> tuple[str, ...]:
    """Return the addresses of a dataset as absolute paths below it begin, links resolved too."""
    paths = tuple(path_of(address).rstrip("/") for address in addresses)
    return (*paths, *map(os.path.realpath, paths))


def labels_of(
    setting: str, read: Callable[[str], bytes], roots: Iterable[str] = _NOWHERE
) -> tuple[Labels, ...]:
    """Read the tables of a setting, `NAME[,NAME…][#PATH,LABEL[,SPLIT]]`; raise InputError."""
    names, _, columns = setting.partition("#")
    chosen: tuple[str, ...] = ()
    if "," in columns:
        chosen = tuple(map(str.strip, columns.split(",")))
    else:
        names = setting  # a # in the name of a file
    if len(chosen) > 3:
        raise InputError(f"labels={setting} names {len(chosen)} columns: name path, label, split")
    inside = partial(_inside(roots).sub, "")
    files = filter(None, map(inside, map(str.strip, names.split(","))))
    return tuple(Labels.parse(name, read(name), chosen, roots) for name in files)


def _inside(roots: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of what to remove from an absolute path below a dataset."""
    return re.compile(rf"\A(?:{'|'.join(map(re.escape, roots))})/+")


def _by_column(rows: Iterator[list[str]], roots: Iterable[str]) -> tuple[list[str], ...]:
    inside = _inside(roots)
    columns: list[list[str]] = []
    shared: dict[str, str] = {}
    for count, row in enumerate(rows):
        # A row may be wider than those before it, or shorter.
        columns += ([""] * count for _ in range(len(row) - len(columns)))
        row += [""] * (len(columns) - len(row))
        for column, cell in zip(columns, row, strict=True):
            text = inside.sub("", unguarded(cell.strip()))
            if len(text) < _SHORT:
                text = shared.setdefault(text, text)
            column.append(text)
    return tuple(columns)


def _lines(text: str, separator: str | None) -> Iterator[list[str]]:
    """Yield the cells of each line; without a separator its words if all lines have as many.

    Else a class may have blanks: the cells are the first word, and the rest.
    """
    sample = text
    if len(text) > _SAMPLE:
        sample = text[:_SAMPLE].rpartition("\n")[0]
    quote = "'" if sample.lstrip().startswith("'") else '"'

    def cells(part: str, separator: str, strict: bool = False) -> Iterator[list[str]]:
        return csv.reader(
            io.StringIO(part, newline=""),
            delimiter=separator,
            quotechar=quote,
            skipinitialspace=True,
            strict=strict,
        )

    def fit(separator: str) -> tuple[int, int]:
        """Return how many lines have as many cells as the first, and this number."""
        widths = list(filter(None, map(len, cells(sample, separator))))
        first = widths[0] if widths else 0
        if first < 2:
            return 0, first
        return widths.count(first), first

    separator = separator or max(_SEPARATORS, key=fit)
    if fit(separator)[0]:
        return cells(text, separator, strict=True)
    lines = text.splitlines()
    counts = set(map(len, map(str.split, lines))) - {0}
    splits = -1 if len(counts) == 1 else 1
    return (line.split(None, splits) for line in lines)


def _objects(text: str) -> Iterable[Any]:
    """Return the rows of JSON: of an array, of COCO's form, of images by name, or of lines."""
    try:
        document = from_json(text.strip() or "[]")
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        # JSON may hold U+2028.
        return (from_json(line) if line.strip() else {} for line in text.split("\n"))
    if isinstance(document, list):
        return document
    if document.keys() >= _COCO:
        document = _of_coco(document)
    if any(map(is_image, document)):
        return [{"path": path, "label": label} for path, label in document.items()]
    if set(map(type, document.values())) <= {dict, list}:
        raise ValueError(
            f"it is one object with {some(list(document))}, and a table is an array of objects, "
            f"or one a line, with path and label, or COCO's form with {', '.join(sorted(_COCO))}"
        )
    return [document]


def _of_coco(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the one category of each image of COCO's form; raise ValueError."""
    try:
        labels = {one["id"]: str(one.get("name", one["id"])) for one in document["categories"]}
        files = {one["id"]: one["file_name"] for one in document["images"]}
        rows: dict[str, str] = {}
        for one in document["annotations"]:
            path = files[one["image_id"]]
            label = labels[one["category_id"]]
            if rows.setdefault(path, label) != label:
                raise ValueError(
                    f"{path} has the categories {rows[path]} and {label}, and an image has one "
                    "class here: keep one annotation of each"
                )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it has COCO's form, but lacks {error}") from None
    return rows


def _values(records: Iterable[Any], keys: dict[str, int]) -> Iterator[list[str]]:
    """Yield the values of each object, and number their keys in `keys`."""
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"row {number} is not a JSON object")
        for key in record:
            keys.setdefault(key, len(keys))
        values = (record.get(key) for key in keys)
        yield [str(value) if isinstance(value, str | int | float) else "" for value in values]
