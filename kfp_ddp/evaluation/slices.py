"""Slices of a split: accuracy by the values of tags, which a CSV assigns to images."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_relative
from kfp_ddp.models.evaluation import Slice, reason, slice_of
from kfp_ddp.pictures import shards
from kfp_ddp.pictures.tables import LARGEST, Labels, roots_of
from kfp_ddp.storage.kinds import open_store

if TYPE_CHECKING:
    from kfp_ddp.pictures.splits import Index

PATH = "path"
MOST_TAGS = 50
"""Maximum tags in a table."""
MOST_VALUES = 200
"""Maximum values of a tag."""
LONGEST = 100
"""Maximum characters of a name or a value."""
_OWN = ("class", PATH)


@dataclass(frozen=True)
class Tags:
    """Values of tags by path of the image; '' means no value, so no slice."""

    where: str
    names: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]

    def slices(self, index: "Index", predicted: Iterable[int]) -> list[Slice]:
        """Return a slice for each value of each tag, by the predicted class of each image."""
        counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for path, target, guess in zip(index.paths, index.targets, predicted, strict=True):
            for tag in zip(self.names, self.values.get(path, ()), strict=False):
                counts[tag][0] += 1
                counts[tag][1] += target == guess
        with_value = [tag for tag in counts if tag[1]]
        with_value.sort(key=lambda tag: (self.names.index(tag[0]), tag[1]))
        slices = []
        for tag in with_value:
            samples, correct = counts[tag]
            slices.append(slice_of(*tag, correct, samples))
        return slices


def read(where: str, dataset: Path, index: "Index") -> Tags:
    """Read the tags of a split's images: a file of `dataset`, a path or a URI; or InputError."""
    roots = roots_of(*shards.addresses(dataset))
    table = Labels.parse(where, _content(where, dataset), roots=roots)
    names = _names([column[0] for column in table.columns], where)
    rows = _rows(table, where)
    by_path = {}
    for path in index.paths:
        below_dataset = Path(path).relative_to(dataset).as_posix()
        below_split = Path(path).relative_to(index.root).as_posix()
        values = rows.get(below_dataset) or rows.get(below_split, ())
        if any(values):
            by_path[path] = values
    if not by_path:
        example = Path(index.paths[0]).relative_to(index.root).as_posix()
        raise InputError(
            f"{where} has no image of this split: its column {PATH} needs paths such as {example}"
        )
    for number, name in enumerate(names):
        known = {values[number] for values in by_path.values()}
        if len(known - {""}) > MOST_VALUES:
            raise InputError(
                f"{where}: the tag {name!r} has more than {MOST_VALUES} values in this split; "
                "group them, or leave the column out"
            )
    return Tags(where, names, by_path)


def _rows(table: Labels, where: str) -> dict[str, tuple[str, ...]]:
    """Return the values in the lines after the first one, by path."""
    rows: dict[str, tuple[str, ...]] = {}
    for line, (path, *cells) in enumerate(zip(*table.columns, strict=True), table.first):
        if line == table.first or not path:
            continue
        values = tuple(_plain(value, f"{where}, line {line}") for value in cells)
        if rows.setdefault(path, values) != values:
            raise InputError(f"{where}, line {line}: {path!r} has other tags in another row")
    return rows


def _content(where: str, dataset: Path) -> bytes:
    base, slash, name = where.rpartition("/")
    packed = None
    if is_relative(where):
        base, slash, name = str(dataset), "", where
        packed = shards.members(dataset)
    try:
        if packed is not None and name in packed.names:
            content: bytes | None = packed.read(name, LARGEST)
        else:
            content = open_store(base or slash).read(name, LARGEST)
    except (OSError, ValueError) as error:
        raise InputError(f"tags is {where}, which cannot be read: {reason(error)}") from None
    if content is None:
        raise InputError(
            f"tags is {where}, but this file is not found: correct it, or leave it empty"
        )
    return content


def _names(header: list[str], where: str) -> tuple[str, ...]:
    """Return the tags in the first line."""
    first, *others = [_plain(name, f"{where}, line 1") for name in header] or [""]
    names = tuple(others)
    if first != PATH or not names:
        raise InputError(
            f"{where} begins with {','.join(header)[:LONGEST]!r}: its first line must have the "
            f"columns, {PATH} first and then one for each tag"
        )
    wrong = [name for name in names if name in ("", *_OWN) or names.count(name) > 1]
    if wrong or len(names) > MOST_TAGS:
        fault = f"more than {MOST_TAGS} tags" if not wrong else f"a tag {wrong[0]!r}"
        raise InputError(
            f"{where} has {fault}: name each once, other than {' and '.join(_OWN)}, and at most "
            f"{MOST_TAGS}"
        )
    return names


def _plain(text: str, where: str) -> str:
    """Return a name or a value in one line."""
    plain = " ".join(text.split())
    if len(plain) > LONGEST or not plain.isprintable():
        raise InputError(
            f"{where}: {plain[:LONGEST]!r} is not a valid tag; use at most {LONGEST} printable "
            "characters"
        )
    return plain
