"""Split and class of each image, as a table of labels names them."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.data.sides import (
    SIDES,
    TEST,
    TRAIN,
    VAL,
    Assignment,
    Side,
    is_image,
    role_in,
    side_of,
)

LARGEST = 256 << 20
"""Largest table in bytes: one of a million images has about 80 MB."""
_PATH = ("path", "file_name", "filename", "file", "image", "image_id", "imageid", "name")
_BOXES = "predictionstring"
"""A column of ImageNet's LOC_val_solution.csv: the label, and boxes after it."""
_LABEL = ("label", "class", "category", _BOXES)
_SPLIT = ("split", "set", "subset")


class LabelRow(NamedTuple):
    """One image: its path in the table, its class, and its split or ''."""

    path: str
    label: str
    split: str


@dataclass(frozen=True)
class Labels:
    """A parsed table; `name` is that of its file in the dataset."""

    name: str
    rows: tuple[LabelRow, ...]

    @classmethod
    def parse(cls, name: str, data: bytes) -> "Labels":
        """Parse a table in the format of the suffix of `name`; raise InputError if invalid."""
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"labels {name} is not UTF-8 text: save it as UTF-8") from None
        kind = name.lower().rpartition(".")[2]
        try:
            lines = _objects(text) if kind in ("jsonl", "json") else _columns(text, kind)
            numbered = list(lines)
        except (csv.Error, ValueError, RecursionError) as error:
            raise InputError(f"labels {name} cannot be read ({error}): correct it") from None
        if not numbered:
            raise InputError(f"labels {name} is empty: add a row of path and label for each image")
        for number, row in numbered:
            if not row.path or not row.label:
                raise InputError(
                    f"line {number} of labels {name} has no path or no label: write both, as "
                    "path,label or under such a header"
                )
        rows = (row._replace(path=row.path.removeprefix("./")) for _, row in numbered)
        return cls(name, tuple(rows))


def _columns(text: str, kind: str) -> Iterator[tuple[int, LabelRow]]:
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
            at = (path, label, split)
            name, value, part = (cells[i].strip() if 0 <= i < len(cells) else "" for i in at)
            yield number, LabelRow(name, value.partition(" ")[0] if boxes else value, part)


def _first(heads: Sequence[str], known: Sequence[str]) -> int:
    """Return the index of the first column with a known name; -1 if there is none."""
    return next((heads.index(name) for name in known if name in heads), -1)


def _objects(text: str) -> Iterator[tuple[int, LabelRow]]:
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold U+2028
        if not line.strip():
            continue
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is not a JSON object")
        fields = {str(key).lower(): value for key, value in record.items()}
        yield number, LabelRow(*(_value(fields, known) for known in (_PATH, _LABEL, _SPLIT)))


def _value(fields: dict[str, object], known: Sequence[str]) -> str:
    value = next((fields[name] for name in known if name in fields), "")
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def assign_by_labels(tops: dict[str, list[str]], labels: Labels) -> Assignment:
    """Assign by a table, and splits that it does not list by folders; raise InputError."""
    images = {name for names in tops.values() for name in names if is_image(name)}
    roles = {role: top for top in sorted(tops) if (role := role_in(top))}
    sides = {side: Side() for side in SIDES}
    assigned: dict[str, tuple[str, str]] = {}
    for name, row in _resolved(labels, images, roles):
        role = role_in(row.split or name.partition("/")[0]) or ("" if row.split else TRAIN)
        if not role:
            raise InputError(
                f"labels {labels.name} has the split {row.split!r}: it is train, val or test"
            )
        before = assigned.get(name)
        if before is None:
            sides[role].classes.setdefault(row.label, []).append(name)
            assigned[name] = row.label, role
        elif before != (row.label, role):
            raise InputError(
                f"labels {labels.name} has {name} both {' in '.join(before)} and {row.label} "
                f"in {role}: keep one row for each image"
            )
    filled = {role: side for role, side in sides.items() if side}
    result = Assignment(filled, f"labels {labels.name}")
    for role, folder in ({} if sides[TRAIN] else roles).items():
        if role not in result.sides:
            result.sides[role] = side = side_of(tops[folder], folder)
            result.form += f" and {folder}/"
            assigned |= {name: ("", role) for names in side.classes.values() for name in names}
    result.sides.setdefault(TRAIN, Side())
    unnamed = sorted(images - assigned.keys())
    result.leave_out(unnamed, f"images that {labels.name} does not name: {{:,}}")
    return result


def _resolved(
    labels: Labels, images: set[str], roles: dict[str, str]
) -> Iterator[tuple[str, LabelRow]]:
    """Yield the name of each row's image, and the row.

    A path is relative to the dataset, the table's folder or a split's, with or without suffix.
    """
    own = labels.name.rpartition("/")[0]
    folders = (own, *(roles[side] for side in (VAL, TEST, TRAIN) if side in roles))
    prefixes = ["", *(f"{folder}/" for folder in folders if folder)]
    bare: dict[str, str] = {}
    missing: list[str] = []
    for row in labels.rows:
        name = next((p + row.path for p in prefixes if p + row.path in images), None)
        if name is None and "." not in row.path.rpartition("/")[2]:
            bare = bare or {name.rpartition(".")[0]: name for name in images}
            name = next((bare[p + row.path] for p in prefixes if p + row.path in bare), None)
        if name is None:
            missing.append(row.path)
        else:
            yield name, row
    if missing:
        raise InputError(
            f"labels {labels.name} names {len(missing):,} files that the dataset does not "
            f"have as images, {missing[0]} first: add them, or remove their rows; exclude "
            "cannot leave out an image that has a row"
        )
