"""Split and class of each image, as folders or a table of labels name them."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kfp_ddp.core.errors import InputError

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif"),
)
"""Names of images that `decoder` reads; the only list."""
_HIDDEN = re.compile(r"(^|/)(\.|(__MACOSX|@eaDir)(/|$))")
"""Hidden files and folders, and those of macOS and of Synology, with thumbnails, at any depth."""
TRAIN, VAL, TEST = SIDES = ("train", "val", "test")
_ROLES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""Names of top-level folders that are a split, case-insensitive."""


@dataclass
class Side:
    """A split before classes get numbers: names by class, and images outside of class folders."""

    folder: str = ""
    classes: dict[str, list[str]] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))


@dataclass
class Assignment:
    """Splits by name, a description of their source, and notes about unusual content."""

    sides: dict[str, Side]
    form: str
    notes: list[str] = field(default_factory=list)

    def leave_out(self, names: Sequence[str], what: str) -> None:
        """Note that these are left out, if any; `what` has a placeholder for their number."""
        if names:
            self.notes.append(f"{what.format(len(names))} left out, {names[0]} first")


def is_image(name: str) -> bool:
    """Return whether the name of a file is that of an image, and in no hidden folder."""
    return name.lower().endswith(SUFFIXES) and not _HIDDEN.search(name)


def is_hidden(folder: str) -> bool:
    """Return whether a folder of this name is ignored."""
    return _HIDDEN.match(folder) is not None


def is_ignored(name: str) -> bool:
    """Return whether a file, of any kind, belongs to a system or to a version and not to a user."""
    last = name.rpartition("/")[2]
    known = last.startswith("_") or last in ("", "Thumbs.db", "desktop.ini")
    return known or _HIDDEN.search(name) is not None


def group_by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their top-level folder, '' for names outside of folders."""
    tops: dict[str, list[str]] = {"": []}
    for name in names:
        top, slash, _ = name.partition("/")
        if not slash:
            tops[""].append(name)
        elif not is_hidden(top):
            tops.setdefault(top, []).append(name)
    return tops


def side_of(names: Iterable[str], folder: str) -> Side:
    """Collect the class folders below a folder; '' is the dataset itself."""
    side, start = Side(folder), len(folder) + 1 if folder else 0
    for name in names:
        top, slash, rest = name[start:].partition("/")
        if not slash:
            if top and is_image(top):
                side.loose.append(name)
        elif not is_hidden(top):
            members = side.classes.setdefault(top, [])
            if rest and is_image(name):
                members.append(name)
    return side


def _roles(tops: dict[str, list[str]]) -> dict[str, str]:
    """Return the folder of each split; {} if the top-level folders are classes."""
    roles: dict[str, str] = {}
    for folder in sorted(tops):
        role = _ROLES.get(folder.lower())
        if role in roles:
            raise InputError(
                f"{roles[role]}/ and {folder}/ are both for {role}: put the images in one of them"
            )
        if role:
            roles[role] = folder
    classes = set(_others(tops, roles))
    if not classes:
        return roles
    # Next to class folders, a folder named like a split is a class too, unless it has classes.
    within = {role: side_of(tops[folder], folder) for role, folder in roles.items()}
    if TRAIN in roles and any(within[TRAIN].classes.values()):
        return roles
    for side in within.values():
        if classes & side.classes.keys():
            raise InputError(
                f"{side.folder}/ is next to class folders such as {min(classes)}/ and contains "
                "folders of these names: put the classes in train/<class>/, or remove it"
            )
    return {}


def _others(tops: dict[str, list[str]], roles: dict[str, str]) -> list[str]:
    sides = {"", *roles.values()}
    return [top for top in sorted(tops) if top not in sides and any(map(is_image, tops[top]))]


def assign_by_folders(tops: dict[str, list[str]]) -> Assignment:
    """Assign splits and classes by folders; raise InputError if there are no images to train on."""
    roles = _roles(tops)
    if not any(is_image(name) for names in tops.values() for name in names):
        raise InputError(
            f"there are no images ({', '.join(SUFFIXES)}): put them in <class>/, or in "
            "train/<class>/ and val/<class>/"
        )
    if not roles:
        train = side_of((name for names in tops.values() for name in names), "")
        result = Assignment({TRAIN: train}, "class folders")
        result.leave_out(train.loose, "images in no class folder: {:,}")
        return result
    sides = {role: side_of(tops[folder], folder) for role, folder in roles.items()}
    result = Assignment(sides, " and ".join(f"{roles[side]}/" for side in SIDES if side in roles))
    result.leave_out(_others(tops, roles), "folders next to the splits: {:,}")
    for role in (TRAIN, VAL):
        if role in sides:
            _check_folders(sides[role], tops)
    for side in sides.values():
        result.leave_out(side.loose, f"images of {side.folder}/ in no class folder: {{:,}}")
    sides.setdefault(TRAIN, Side())
    return result


def _check_folders(side: Side, tops: dict[str, list[str]]) -> None:
    if side.loose and not any(side.classes.values()):
        raise InputError(
            f"{side.folder}/ has no class folders: put its {len(side.loose):,} images in "
            f"{side.folder}/<class>/, or {use_a_table(tops)}"
        )
    if not side and _ROLES[side.folder.lower()] == VAL:
        raise InputError(
            f"{side.folder}/ has no images ({', '.join(SUFFIXES)}): fill it, or remove it to "
            "choose validation images by name"
        )


def use_a_table(tops: dict[str, list[str]]) -> str:
    """Advise a table of labels in place of class folders, with an example of such a file."""
    like = f", such as {tables[0]}" if (tables := tables_in(tops)) else ""
    return f"set labels to the name of a CSV of path,label in the dataset{like}"


def tables_in(tops: dict[str, list[str]]) -> list[str]:
    """Return the names of files that may be tables of labels."""
    kinds = (".csv", ".jsonl", ".tsv")
    return sorted(name for name in tops[""] if name.lower().endswith(kinds) and name[0] not in "._")


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
    roles = {role: top for top in sorted(tops) if (role := _ROLES.get(top.lower()))}
    sides = {side: Side() for side in SIDES}
    assigned: dict[str, tuple[str, str]] = {}
    for name, row in _resolved(labels, images, roles):
        role = _ROLES.get((row.split or name.partition("/")[0]).lower(), "" if row.split else TRAIN)
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
