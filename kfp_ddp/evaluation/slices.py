"""Slices of a split: the accuracy by the values of tags, which a CSV gives its images."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.models.evaluation import Slice, reason, slice_of
from kfp_ddp.storage.destination import open_destination

if TYPE_CHECKING:
    from kfp_ddp.training.splits import Index

PATH = "path"
LARGEST = 256 << 20
"""Bytes of a table that is read: a million images with five tags have some 100 MB."""
MOST_TAGS, MOST_VALUES, LONGEST = 50, 200, 100
"""Tags in a table, values of each of them, and characters of a name or a value."""
_OWN = ("class", PATH)


@dataclass(frozen=True)
class Tags:
    """The values of tags by the path of an image; '' for none, which is in no slice."""

    names: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]

    def slices(self, index: "Index", predicted: Iterable[int]) -> list[Slice]:
        """One for each value of each tag, from what each image of `index` was told to be."""
        there: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for path, target, said in zip(index.paths, index.targets, predicted, strict=True):
            for tag in zip(self.names, self.values.get(path, ()), strict=False):
                there[tag][0] += 1
                there[tag][1] += target == said
        order = {name: at for at, name in enumerate(self.names)}
        found = sorted((tag for tag in there if tag[1]), key=lambda tag: (order[tag[0]], tag[1]))
        return [slice_of(*tag, there[tag][1], there[tag][0]) for tag in found]


def read(where: str, dataset: Path, index: "Index") -> Tags:
    """The tags of the images of a split.

    Args:
        where: A file below `dataset`, an absolute path, or an address.
        dataset: Folder of the version.
        index: The images. The table names them below `dataset` or below the split.

    Raises:
        InputError: it cannot be read, or no slices can be made of it.
    """
    rows = _rows(_text(where, dataset), where)
    names = _names(next(rows, (1, []))[1], where)
    told: dict[str, tuple[str, ...]] = {}
    for line, row in rows:
        if len(row) != len(names) + 1:
            raise InputError(
                f"{where}, line {line}: {len(row)} fields under {len(names) + 1} columns; write a "
                "value or nothing for each tag, and quote what has a comma"
            )
        values = tuple(_plain(value, f"{where}, line {line}") for value in row[1:])
        if told.setdefault(row[0].strip(), values) != values:
            raise InputError(f"{where}, line {line}: {row[0]!r} is tagged again, in another way")
    by_path = {}
    for path in index.paths:
        full, short = (Path(path).relative_to(base).as_posix() for base in (dataset, index.root))
        if (values := told.get(full) or told.get(short, ())) and any(values):
            by_path[path] = values
    if not by_path:
        example = Path(index.paths[0]).relative_to(index.root).as_posix()
        raise InputError(
            f"{where} tags no image of this split: name images in its column {PATH} as in {example}"
        )
    for number, name in enumerate(names):
        if len({values[number] for values in by_path.values()} - {""}) > MOST_VALUES:
            raise InputError(
                f"{where}: the tag {name!r} has more than {MOST_VALUES} values in this split; "
                "group them, or leave the column out"
            )
    return Tags(names, by_path)


def _text(where: str, dataset: Path) -> str:
    base, slash, name = where.rpartition("/")
    if not is_remote(where) and not where.startswith("/"):
        base, slash, name = str(dataset), "", where
    try:
        content = open_destination(base or slash).read(name, LARGEST)
    except (OSError, ValueError) as error:
        raise InputError(f"tags is {where}, which cannot be read: {reason(error)}") from None
    if content is None:
        raise InputError(f"tags is {where}, but there is no such file: correct it, or leave it out")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"tags is {where}, which is no text in UTF-8: save it as CSV") from None


def _rows(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, with their line."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{where}, line {reader.line_num}: {error}; save it as CSV") from None


def _names(header: list[str], where: str) -> tuple[str, ...]:
    """The tags that the first line names."""
    first, *others = [_plain(name, f"{where}, line 1") for name in header] or [""]
    names = tuple(others)
    if first != PATH or not names:
        raise InputError(
            f"{where} begins with {','.join(header)[:LONGEST]!r}: its first line is to name the "
            f"columns, {PATH} first and then one for each tag"
        )
    wrong = [name for name in names if not name or name in _OWN or names.count(name) > 1]
    if wrong or len(names) > MOST_TAGS:
        said = f"more than {MOST_TAGS} tags" if not wrong else f"a tag {wrong[0]!r}"
        raise InputError(
            f"{where} has {said}: name each once, other than {' and '.join(_OWN)}, and at most "
            f"{MOST_TAGS}"
        )
    return names


def _plain(text: str, where: str) -> str:
    """A name or a value on one line."""
    plain = " ".join(text.split())
    if len(plain) > LONGEST or not plain.isprintable():
        raise InputError(
            f"{where}: {plain[:LONGEST]!r} is no tag; give at most {LONGEST} printable characters"
        )
    return plain
