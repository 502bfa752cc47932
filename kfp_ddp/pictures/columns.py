"""Split and class of each image, by the columns of tables of labels."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import same_text
from kfp_ddp.pictures.sides import (
    SIDES,
    TEST,
    TRAIN,
    VAL,
    Assignment,
    Side,
    assign_by_folders,
    is_image,
    role_in,
    tables_in,
)
from kfp_ddp.pictures.tables import Labels

_PATH = ("path", "filename", "file", "image", "imageid", "filepath", "imagepath", "name")
_BOXES = "predictionstring"
"""A column of ImageNet's LOC_val_solution.csv: the label, and boxes after it."""
_LABEL = ("label", "labels", "class", "classes", "classid", "category", "target", _BOXES)
"""Names of columns in small letters and digits. They decide between columns that hold the same."""
_SPLIT = re.compile("split|subset|partition|fold|^set$")
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_CELLS, _FEW = 200, 20
"""Cells that show whether a column has paths. Distinct values of a column that may be classes: up
to this number, or to half of the rows."""


class _Images:
    """Images of a dataset, by the names that tables give them."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.folders = [""]
        """Folders to which the paths of a table are relative, with a slash at the end."""
        self._ends: dict[tuple[int, bool], dict[str, list[str]]] = {}

    def exact(self, path: str) -> list[str]:
        """Return the image of this path in the first of the folders that has it."""
        return [one + path for one in self.folders if one + path in self.names][:1]

    def like(self, path: str) -> list[str]:
        """Return the images that a path can mean, also without folders and suffix."""
        if exact := self.exact(path):
            return exact
        short = _fold(path)
        depth, suffix = short.count("/"), is_image(short)
        if (depth, suffix) not in self._ends:
            ends: dict[str, list[str]] = defaultdict(list)
            self._ends[depth, suffix] = ends
            for name in self.names:
                ends[_end(name, depth, suffix)].append(name)
        names = self._ends[depth, suffix].get(short, [])
        if len(names) < 2:
            return names
        starts = [_fold(one) + short for one in self.folders]
        return [name for name in names if _end(name, 99, suffix) in starts] or names


def _end(name: str, folders: int, suffix: bool) -> str:
    """Return the last part of a name with some of its folders, and with its suffix or without."""
    parts = _fold(name if suffix else name.rpartition(".")[0]).split("/")
    return "/".join(parts[-folders - 1 :])


def _fold(name: str) -> str:
    name = name if name.isascii() else same_text(name)
    return name.replace("\\", "/").removeprefix("./").casefold()


def _plain(head: str) -> str:
    return re.sub(r"[\W_]", "", head).casefold()


def _are_flags(values: Iterable[str]) -> bool:
    return all(value.lower() in _FLAGS for value in values)


class _Table:
    """A table whose columns have a meaning; raises InputError where they can have another."""

    def __init__(self, table: Labels, images: _Images) -> None:
        self._table, self._images, self._find = table, images, images.like
        self._what = f"labels {table.name}"
        first = self._first = [column[0] for column in table.columns]
        numbers = [str(at + 1) for at in range(len(first))]
        self._heads = first if table.headed or {*table.chosen[:1]} & {*first} else numbers
        self._path = self._index(table.chosen[0]) if table.chosen else self._path_column()
        if self._heads is first or self._is_header():
            self._heads = [head or number for head, number in zip(first, numbers, strict=True)]
        self._start = 0 if self._heads is numbers else 1
        others = (at for at in range(len(first)) if at != self._path)
        self._values = {at: some for at in others if (some := set(self._cells(at)) - {""})}
        if self._start and not first[-1] and self._values.get(len(first) - 1):
            raise InputError(f"{self._what} has more cells in lines than in its header: quote them")
        self._split, self._roles = self._split_column()
        self._labels = self._label_columns()

    @property
    def form(self) -> str:
        """Return the columns as text."""
        label, *more = (f"`{self._heads[at]}`" for at in self._labels)
        label = f"{len(more) + 1} from {label} to {more[-1]}" if more else label
        split = f", `{self._heads[self._split]}` (split)" if self._roles else ""
        return f"columns `{self._heads[self._path]}` (image), {label} (class){split}"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield image, class, and split or '' of each row; raise InputError for an invalid row."""
        labels = self._cells(self._labels[0]) if len(self._labels) == 1 else self._class_of_flags()
        boxes = _plain(self._heads[self._labels[0]]) == _BOXES
        missing: list[str] = []
        for at, (path, cell) in enumerate(zip(self._cells(self._path), labels, strict=True)):
            label = cell.partition(" ")[0] if boxes else cell
            if not path and not label:
                continue
            if not path or not label:
                raise InputError(
                    f"line {self._line(at)} of {self._what} has no path or no label: write both, "
                    "as path,label or under such a header"
                )
            names = self._images.like(path)
            if len(names) > 1:
                raise InputError(
                    f"{path} in {self._what} can be {names[0]} or {names[1]}: write the path of "
                    "the image in the dataset"
                )
            if names:
                part = self._table.columns[self._split][self._start + at]
                yield names[0], label, self._roles.get(part, "")
            else:
                missing.append(path)
        if missing:
            raise InputError(
                f"{self._what} names {len(missing):,} files that the dataset does not "
                f"have as images, {missing[0]} first: add them, or remove their rows; exclude "
                "cannot leave out an image that has a row"
            )

    def _cells(self, at: int) -> list[str]:
        return self._table.columns[at][self._start :]

    def _line(self, at: int) -> int:
        return self._table.first + self._start + at

    def _index(self, name: str) -> int:
        if name not in self._heads:
            heads = ", ".join(self._heads)
            raise InputError(f"{self._what} has no column {name!r}: it has {heads}")
        return self._heads.index(name)

    def _only(self, what: str, columns: Sequence[int], setting: str) -> int:
        """Return the one column; raise InputError if there are more."""
        if len(columns) > 1:
            one, other = (self._heads[at] for at in columns[:2])
            raise InputError(
                f"{self._what} may have its {what} in `{one}` or in `{other}`: choose, as in "
                f"labels={self._table.name}#{setting.format(one)}"
            )
        return columns[0]

    def _path_column(self) -> int:
        step = -(-len(self._table.columns[0]) // _CELLS)
        samples = [column[::step] for column in self._table.columns]
        least = max(1, len(samples[0]) - 1) / 2
        heads = list(map(_plain, self._first))
        named = [heads.index(name) for name in _PATH if name in heads]
        for self._find in (self._images.exact, self._images.like):  # noqa: B020
            images = [
                [n for cell in some if cell for n in self._find(cell)[:1]] for some in samples
            ]
            likely = [at for at, names in enumerate(images) if len(names) >= least]
            likely = [at for at in likely if 2 * len({*images[at]}) > len(images[at])] or likely
            likely = [at for at in named if at in likely][:1] or likely
            if len({tuple(images[at]) for at in likely}) == 1:
                return likely[0]
            if likely and not any(self._find(self._first[at]) for at in likely):
                self._heads = self._first
            if likely:
                return self._only("images", likely, "{},LABEL")
        looks = [at for at, some in enumerate(samples) if sum(map(is_image, some)) >= least]
        if not named and not looks:
            raise InputError(
                f"no column of {self._what} has names of images, such as "
                f"{min(self._images.names, default='1.jpg')}; line 1 is {', '.join(self._first)}"
            )
        return (named + looks)[0]

    def _is_header(self) -> bool:
        path = self._first[self._path]
        columns = zip(self._first, self._table.columns, strict=True)
        again = (cell and cell in column[1:] for cell, column in columns)
        return _plain(path) in _PATH or not (is_image(path) or self._find(path) or any(again))

    def _split_column(self) -> tuple[int, dict[str, str]]:
        """Return the column of splits and what each value means; no values without."""
        splits: dict[int, dict[str, str]] = {}
        chosen = self._table.chosen
        for at in map(self._index, chosen[2:]) if chosen else self._values:
            head, values = _plain(self._heads[at]), self._values.get(at, set())
            role = role_in(head.removeprefix("is").removesuffix("set"))
            if not chosen and (head in _LABEL or not self._is_few(at)):
                continue
            if all(map(role_in, values)):
                splits[at] = {value: role_in(value) for value in values}
            elif role and _are_flags(values):
                sides = (VAL if role == TRAIN else TRAIN, role)
                splits[at] = {value: sides[_FLAGS[value.lower()]] for value in values}
            elif chosen or role_in(self._heads[at]) or _SPLIT.search(head):
                odd = min(value for value in values if not role_in(value))
                raise InputError(
                    f"{self._what} has the split {odd!r} in `{self._heads[at]}`: write train, val "
                    f"or test, or choose other columns, as in labels={self._table.name}#PATH,LABEL"
                )
        at = self._only("splits", list(splits), "PATH,LABEL,{}") if splits else 0
        return at, splits.get(at, {})

    def _is_few(self, at: int) -> bool:
        return len(self._values[at]) <= max(_FEW, len(self._table.columns[at]) // 2)

    def _label_columns(self) -> list[int]:
        """Return the column of classes, or a column for each class."""
        if self._table.chosen:
            name = self._table.chosen[1]
            return list(map(self._index, [name] if name in self._heads else name.split("+")))
        others = [at for at in self._values if not (self._roles and at == self._split)]
        known = [at for at in others if _plain(self._heads[at]) in _LABEL]
        most = len(self._cells(self._path)) - 1
        few = [at for at in others if self._is_few(at) and 1 < len(self._values[at]) <= most]
        flags = [at for at in others if _are_flags(self._values[at])]
        if self._start and not known and len(flags) > 1 and {*few} <= {*flags}:
            return flags
        if likely := known or (self._start and few) or others:
            return [self._only("classes", likely, f"{self._heads[self._path]},{{}}")]
        raise InputError(
            f"{self._what} has no column of classes next to `{self._heads[self._path]}`: add one, "
            "such as label"
        )

    def _class_of_flags(self) -> list[str]:
        """Return the class of each row by the one column that is 1 there."""
        labels = [""] * len(self._cells(self._path))
        for at in self._labels:
            for row, cell in enumerate(self._cells(at)):
                if not _FLAGS.get(cell.lower()):
                    continue
                if labels[row]:
                    raise InputError(
                        f"line {self._line(row)} of {self._what} has two classes, {labels[row]} "
                        f"and {self._heads[at]}: keep one of them"
                    )
                labels[row] = self._heads[at]
        return labels


@lru_cache(maxsize=4096)
def _role_of(folder: str, label: str) -> str:
    """Return the split that a part of a folder names, unless it is the class."""
    parts = (part for part in folder.split("/") if _fold(part) != _fold(label))
    return next(filter(None, map(role_in, parts)), "")


def assign_by_labels(names: Sequence[str], tables: Sequence[Labels], layout: str) -> Assignment:
    """Assign by tables, and splits that they do not list by folders; raise InputError."""
    images = _Images(set(filter(is_image, names)))
    tops = {name.partition("/")[0] for name in images.names if "/" in name}
    sides = {side: Side() for side in SIDES}
    assigned: dict[str, tuple[str, str]] = {}
    forms: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for table in tables:
        folder, _, file = table.name.rpartition("/")
        own = role_in(file) or role_in(folder)
        alike = [top for top in tops if own and role_in(top) == own]
        images.folders = [f"{one}/" for one in (folder, *alike[: len(alike) == 1]) if one] + [""]
        read = _Table(table, images)
        forms.setdefault(read.form, []).append(table.name)
        for name, label, part in read.rows():
            role = part or (own if len(tables) > 1 else "")
            if not role:
                place = name.rpartition("/")[0]
                role = _role_of(place, label) or TRAIN
                places.setdefault(role, place)
            before = assigned.setdefault(name, (label, role))
            if before != (label, role):
                raise InputError(
                    f"labels {table.name} has {name} both {' in '.join(before)} and {label} "
                    f"in {role}: keep one row for each image"
                )
    for name, (label, role) in assigned.items():
        sides[role].classes.setdefault(label, []).append(name)
    form = "; ".join(f"labels {' and '.join(files)}: {form}" for form, files in forms.items())
    form += "".join(f", {role} from {places[role]}/" for role in (VAL, TEST) if role in places)
    result = Assignment({role: side for role, side in sides.items() if side}, form)
    unnamed = sorted(images.names - assigned.keys())
    if unnamed and not sides[TRAIN]:
        full = {"", *(name.partition("/")[0] for name in unnamed)}
        rest = [
            n for n in names if n not in assigned and n.rpartition("/")[0].partition("/")[0] in full
        ]
        other = assign_by_folders(rest, layout)
        other.sides |= result.sides
        return replace(other, form=f"{form} and {other.form}")
    files = [table.name for table in tables]
    more = [name for name in tables_in(names) if name not in files]
    hint = f" ({more[0]} is not used; labels takes several names)" if more else ""
    result.leave_out(unnamed, f"images that {' and '.join(files)} does not name{hint}: {{:,}}")
    result.sides.setdefault(TRAIN, Side())
    return result
