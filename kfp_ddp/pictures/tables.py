"""Tables of labels as files: their cells in columns. What a column means is in `columns`."""

import codecs
import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import path_of
from kfp_ddp.core.spreadsheet import unguarded
from kfp_ddp.core.text import from_json

LARGEST = 256 << 20
"""Largest table in bytes: one of a million images has about 80 MB."""
_SEPARATORS = ",;\t|"
_SAMPLE = 1 << 16
_SHORT = 16
"""Length of cells that are stored once: classes, splits, 0 and 1."""


_NOWHERE = ("\0",)
"""No table has this character."""


@dataclass(frozen=True)
class Labels:
    """The cells of a table; `name` is that of its file in the dataset."""

    name: str
    columns: tuple[list[str], ...]
    """Cells by column, all of one length. The first ones may be the header."""
    headed: bool
    """Whether they are, as in JSON lines."""
    chosen: tuple[str, ...] = ()
    """Columns of path, class and optionally split, if the setting names them."""
    first: int = 1
    """Line number of the first cells; 0 for the keys of JSON lines."""

    @classmethod
    def parse(
        cls, name: str, data: bytes, chosen: tuple[str, ...] = (), roots: Iterable[str] = _NOWHERE
    ) -> "Labels":
        """Parse CSV, text in columns or JSON lines; raise InputError if invalid.

        `roots` are addresses of the dataset, as of `roots_of`: a path below one of them is a name.
        """
        text = _text_of(name, data)
        json_lines = name.lower().endswith((".jsonl", ".ndjson", ".json"))
        separator = re.match(r"sep=(.)\r?\n", text)  # Excel writes and reads this line
        keys: dict[str, int] = {}
        first = 1
        try:
            if json_lines:
                first = 0
                rows = _objects(text, keys)
            elif separator:
                first = 2
                rows = _lines(text[separator.end() :], separator[1])
            else:
                rows = _lines(text)
            columns = _by_column(rows, roots)
        except (csv.Error, ValueError, RecursionError) as error:
            raise InputError(f"{name} cannot be read ({error}): correct it") from None
        if not any(map(any, columns)):
            raise InputError(f"{name} is empty: add a row of path and label for each image")
        for key, column in keys.items():
            columns[column].insert(0, key)
        return cls(name, columns, json_lines, chosen, first)


def _text_of(name: str, data: bytes) -> str:
    """Decode a table; raise InputError if it is no text."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{name} is not text in UTF-8 or UTF-16: save it as CSV UTF-8")
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


def _lines(text: str, separator: str = "") -> Iterator[list[str]]:
    """Yield the cells of each line; of text without a separator the first word, and the rest."""
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
    return (line.split(None, 1) for line in text.splitlines())


def _objects(text: str, keys: dict[str, int]) -> Iterator[list[str]]:
    """Yield the values of each object of JSON lines, and number their keys in `keys`."""
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold U+2028
        record = from_json(line) if line.strip() else {}
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is not a JSON object")
        for key in record:
            keys.setdefault(key, len(keys))
        values = (record.get(key) for key in keys)
        yield [str(value) if isinstance(value, str | int | float) else "" for value in values]
