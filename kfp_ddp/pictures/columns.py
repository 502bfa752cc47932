"""Split and class of each image, by the columns of tables of labels."""

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line, same_text
from kfp_ddp.pictures.reading import is_image
from kfp_ddp.pictures.sides import (
    TEST,
    TRAIN,
    VAL,
    Assignment,
    Side,
    assign_by_folders,
    role_in,
    some,
    tables_in,
)
from kfp_ddp.pictures.tables import Labels

_PATH = (
    *("path", "filename", "file", "image", "imageid", "filepath", "imagepath", "imagename"),
    *("imagefile", "fname", "img", "photo", "picture"),
)
_BOXES = "predictionstring"
"""A column of ImageNet's LOC_val_solution.csv: the label, and boxes after it."""
_LABEL = ("label", "labels", "class", "classes", "classid", "category", "target", _BOXES)
_SPLIT = ("split", "subset", "partition", "fold", "folds", "set")
"""Names of columns in small letters and digits; of paths, the first one of the list counts."""
_KNOWN = frozenset({*_PATH, *_LABEL, "id", "name"})
"""Names that show that line 1 is a header."""
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_SAMPLED = 200
"""Cells that show whether a column has names of images."""


class _Images:
    """Images of a dataset, by the names that tables give them."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.folders = [""]
        """Folders to which the paths of a table are relative, with a slash at the end."""
        self._ends: dict[tuple[int, bool], dict[str, list[str]]] = {}

    def like(self, path: str) -> list[str]:
        """Return the images that a path can mean, also without folders and suffix."""
        for folder in self.folders:
            if folder + path in self.names:
                return [folder + path]
        short = _fold(path)
        suffix = is_image(short)
        names = self._by_end(short.count("/"), suffix).get(short, [])
        if len(names) < 2:
            return names
        starts = [_fold(folder) + short for folder in self.folders]
        nearest = [name for name in names if _without_suffix(name, suffix) in starts]
        return nearest or names

    def _by_end(self, depth: int, suffix: bool) -> dict[str, list[str]]:
        """Return all images by the end of their names, with so many folders."""
        if (depth, suffix) not in self._ends:
            ends: dict[str, list[str]] = defaultdict(list)
            for name in self.names:
                parts = _without_suffix(name, suffix).rsplit("/", depth + 1)
                ends["/".join(parts[-depth - 1 :])].append(name)
            self._ends[depth, suffix] = ends
        return self._ends[depth, suffix]


def _without_suffix(name: str, suffix: bool) -> str:
    """Return a name for comparisons, with its suffix only if `suffix`."""
    return _fold(name if suffix else name.rpartition(".")[0])


def _fold(name: str) -> str:
    name = name if name.isascii() else same_text(name)
    return name.replace("\\", "/").removeprefix("./").casefold()


def _plain(head: str) -> str:
    return re.sub(r"[\W_]", "", head).casefold()


def _are_flags(values: Iterable[str]) -> bool:
    return all(value.lower() in _FLAGS for value in values)


def _roles_of_flags(values: Iterable[str], role: str) -> dict[str, str]:
    """Return the split that each value of a column such as is_train means; `role` for yes."""
    others = VAL if role == TRAIN else TRAIN
    roles = {}
    for value in values:
        roles[value] = role if _FLAGS[value.lower()] else others
    return roles


class _Table:
    """A table whose columns have a meaning; raises InputError where their names do not tell it.

    The setting names the columns, or their names are known. A table without known names has one
    column of images, and one other column.
    """

    def __init__(self, table: Labels, images: _Images) -> None:
        self._table = table
        self._images = images
        self._what = f"labels {table.name}"
        first = [column[0] for column in table.columns]
        places = range(len(first))
        numbers = [str(place + 1) for place in places]
        self._start = int(self._has_header(first, numbers))
        heads = first if self._start else self._heads_above(numbers)
        self._heads = [head or number for head, number in zip(heads, numbers, strict=True)]
        # Of two columns with one name, the first.
        by_name = zip(reversed(self._heads), reversed(places), strict=True)
        self._positions = dict(zip(numbers, places, strict=True)) | dict(by_name)
        self._cells = [column[self._start :] for column in table.columns]
        self._path = self._path_column()
        self._values = self._values_beside_path()
        # Cells after the last name of a header come from a separator in a cell.
        beyond_header = not first[-1] and places[-1] in self._values
        if self._start and beyond_header:
            raise InputError(f"{self._what} has more cells in lines than in its header: quote them")
        self._roles: dict[str, str] = {}
        """Meaning of the cells in the column of splits; {} without such a column."""
        self._split = self._split_column()
        self._labels = self._label_columns()

    def _values_beside_path(self) -> dict[int, set[str]]:
        """Return the cells of each column that has any, but the one of images."""
        values = {}
        for column, cells in enumerate(self._cells):
            if column != self._path and any(cells):
                values[column] = set(cells) - {""}
        return values

    @property
    def form(self) -> str:
        """Return the columns as text."""
        labels = some([f"`{self._heads[column]}`" for column in self._labels])
        split = f", `{self._heads[self._split]}` (split)" if self._roles else ""
        return f"columns `{self._heads[self._path]}` (image), {labels} (class){split}"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield image, class, and split or '' of each row; raise InputError for an invalid row."""
        missing: list[str] = []
        rows = zip(self._cells[self._path], self._classes(), self._cells[self._split], strict=True)
        for row, (path, label, part) in enumerate(rows):
            if not path and not label:
                continue
            if not path or not label:
                raise InputError(
                    f"line {self._line(row)} of {self._what} has no path or no label: write both, "
                    "as path,label or under such a header"
                )
            name = self._image(path)
            if name:
                yield name, label, self._roles.get(part, "")
            else:
                missing.append(path)
        if missing:
            raise InputError(
                f"{self._what} names {len(missing):,} files that the dataset does not "
                f"have as images, {missing[0]} first: add them, or remove their rows; exclude "
                "cannot leave out an image that has a row; if they are no names of images, "
                f"choose columns, as in labels={self._table.name}#PATH,LABEL"
            )

    @property
    def doubt(self) -> str:
        """Return why the column of classes may have none; '' without such a reason."""
        cells = self._cells[self._labels[0]]
        if len(set(cells)) < max(2, len(cells)):
            return ""
        return (
            f"column `{self._heads[self._labels[0]]}` of {self._what} has another value in each "
            f"row, so it is no class: choose columns, as in labels={self._table.name}#PATH,LABEL, "
            "or set no labels where folders are the classes"
        )

    def _image(self, path: str) -> str:
        """Return the image that a path means; '' for none, InputError for more than one."""
        names = self._images.like(path)
        if len(names) > 1:
            raise InputError(
                f"{path} in {self._what} can be {names[0]} or {names[1]}: write the path of "
                "the image in the dataset"
            )
        return names[0] if names else ""

    def _line(self, row: int) -> int:
        return self._table.first + self._start + row

    def _has_header(self, first: Sequence[str], numbers: Sequence[str]) -> bool:
        """Return whether the first cells are names of columns; InputError if nothing tells."""
        chosen = set(self._table.chosen).intersection(first).difference(numbers)
        if self._table.headed or chosen:
            return True
        if any(map(is_image, first)):
            return False
        if not _KNOWN.isdisjoint(map(_plain, first)):
            return True
        if any(map(self._images.like, first)):
            return False
        line = one_line(", ".join(first), 100)
        name = one_line(first[0], 40)
        raise InputError(
            f"line 1 of {self._what} ({line}) has neither the name of an image, such "
            f"as {min(self._images.names, default='1.jpg')}, nor a known name of a column: if it "
            f"is a header, choose columns, as in labels={self._table.name}#{name},LABEL; the "
            "known ones are path and label"
        )

    def _heads_above(self, numbers: Sequence[str]) -> Sequence[str]:
        """Return the names of columns in the comment above the first row, else numbers."""
        words = re.split(r"\s*[,;\t|]\s*|\s+", self._table.above)
        known = _KNOWN.union(map(_plain, self._table.chosen))
        if len(words) != len(numbers) or known.isdisjoint(map(_plain, words)):
            return numbers
        return words

    def _index(self, name: str) -> int:
        """Return the column of a name or number."""
        if name not in self._positions:
            heads = ", ".join(self._heads)
            raise InputError(f"{self._what} has no column {name!r}: it has {heads}")
        return self._positions[name]

    def _only(self, what: str, columns: Sequence[int], setting: str) -> int:
        """Return the one column; raise InputError if there are more."""
        if len(columns) > 1:
            one = self._heads[columns[0]]
            other = self._heads[columns[1]]
            raise InputError(
                f"{self._what} may have its {what} in `{one}` or in `{other}`: choose, as in "
                f"labels={self._table.name}#{setting.format(one)}"
            )
        return columns[0]

    def _path_column(self) -> int:
        if self._table.chosen:
            return self._index(self._table.chosen[0])
        heads = list(map(_plain, self._heads))
        for name in _PATH:
            if name in heads:
                return heads.index(name)
        likely = self._columns_of(is_image) or self._columns_of(self._images.like)
        if likely:
            return self._only("images", likely, "{},LABEL")
        raise InputError(
            f"no column of {self._what} has names of images, such as "
            f"{min(self._images.names, default='1.jpg')}; its columns: {', '.join(self._heads)}"
        )

    def _columns_of(self, holds: Callable[[str], object]) -> list[int]:
        """Return the columns in which this is true of most cells."""
        step = 1 + len(self._cells[0]) // _SAMPLED
        columns = []
        for column, cells in enumerate(self._cells):
            sample = cells[::step]
            count = sum(map(bool, map(holds, sample)))
            if 2 * count > len(sample):
                columns.append(column)
        return columns

    def _split_column(self) -> int:
        """Return the column of splits, and note what its values mean; -1 without."""
        chosen = self._table.chosen
        columns = list(map(self._index, chosen[2:])) if chosen else list(self._values)
        splits = []
        for column in columns:
            roles = self._roles_in(column)
            if roles:
                self._roles = roles
                splits.append(column)
        return self._only("splits", splits or [-1], "PATH,LABEL,{}")

    def _roles_in(self, column: int) -> dict[str, str]:
        """Return the splits that the values of a column mean; {} if it is not one of splits."""
        values = self._values.get(column, set())
        if all(map(role_in, values)):
            return {value: role_in(value) for value in values}
        head = _plain(self._heads[column])
        role = role_in(head.removeprefix("is").removesuffix("set"))
        if role and _are_flags(values):
            return _roles_of_flags(values, role)
        named_as_split = role != "" or head in _SPLIT
        if self._table.chosen or named_as_split:
            raise InputError(
                f"{self._what} has the splits {some(sorted(values))} in `{self._heads[column]}`: "
                "write train, val or test, or choose other columns, as in "
                f"labels={self._table.name}#PATH,LABEL"
            )
        return {}

    def _label_columns(self) -> list[int]:
        """Return the column of classes, or a column for each class."""
        if self._table.chosen:
            return self._written_labels(self._table.chosen[1])
        others = [column for column in self._values if column != self._split]
        if not others:
            raise InputError(
                f"{self._what} has no column of classes next to `{self._heads[self._path]}`: add "
                "one, such as label"
            )
        known = [column for column in others if _plain(self._heads[column]) in _LABEL]
        if not known and self._have_flags(others):
            return others
        likely = known or self._varied(others) or others
        return [self._only("classes", likely, f"{self._heads[self._path]},{{}}")]

    def _have_flags(self, columns: Sequence[int]) -> bool:
        """Return whether each of several columns with a name says of each row yes or no."""
        if not self._start or len(columns) < 2:
            return False
        return all(_are_flags(self._values[column]) for column in columns)

    def _varied(self, columns: Sequence[int]) -> list[int]:
        """Return the columns that are neither a constant nor a number of each row."""
        rows = len(self._cells[self._path])
        return [column for column in columns if 1 < len(self._values[column]) < rows]

    def _written_labels(self, name: str) -> list[int]:
        """Return the column of this name, or those with + between their names."""
        names = [name] if name in self._positions else name.split("+")
        return list(map(self._index, names))

    def _classes(self) -> list[str]:
        """Return the class of each row, or ''."""
        if len(self._labels) > 1:
            return self._class_of_flags()
        cells = self._cells[self._labels[0]]
        if _plain(self._heads[self._labels[0]]) == _BOXES:
            return [cell.partition(" ")[0] for cell in cells]
        return cells

    def _class_of_flags(self) -> list[str]:
        """Return the class of each row by the one column that is 1 there."""
        labels = [""] * len(self._cells[self._path])
        for column in self._labels:
            head = self._heads[column]
            for row, cell in enumerate(self._cells[column]):
                if not _FLAGS.get(cell.lower()):
                    continue
                if labels[row]:
                    raise InputError(
                        f"line {self._line(row)} of {self._what} has two classes, {labels[row]} "
                        f"and {head}: keep one of them"
                    )
                labels[row] = head
        return labels


@lru_cache(maxsize=4096)
def _role_of(folder: str, label: str) -> str:
    """Return the split that a part of a folder names, unless it is the class."""
    parts = (part for part in folder.split("/") if _fold(part) != _fold(label))
    return next(filter(None, map(role_in, parts)), "")


@dataclass
class _Listed:
    """What tables say about the images of a dataset."""

    images: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Class and split by name."""
    forms: dict[str, list[str]] = field(default_factory=dict)
    """Tables by the form of their columns."""
    places: dict[str, str] = field(default_factory=dict)
    """A folder that has named the split of its images, by split."""
    doubt: str = ""
    """Why a column of classes may have none."""

    def add(self, table: Labels, images: _Images, role_of_table: str) -> None:
        """Add the rows of a table; raise InputError if another row says otherwise."""
        columns = _Table(table, images)
        self.doubt = self.doubt or columns.doubt
        self.forms.setdefault(columns.form, []).append(table.name)
        for name, label, part in columns.rows():
            role = part or role_of_table or self._role_by_folder(name, label)
            before = self.images.setdefault(name, (label, role))
            if before != (label, role):
                raise InputError(
                    f"labels {table.name} has {name} both {' in '.join(before)} and {label} "
                    f"in {role}: keep one row for each image"
                )

    def _role_by_folder(self, name: str, label: str) -> str:
        place = name.rpartition("/")[0]
        role = _role_of(place, label) or TRAIN
        self.places.setdefault(role, place)
        return role

    def sides(self) -> dict[str, Side]:
        """Return the splits that have images."""
        sides: dict[str, Side] = {}
        for name, (label, role) in self.images.items():
            side = sides.setdefault(role, Side())
            side.classes.setdefault(label, []).append(name)
        return sides

    @property
    def form(self) -> str:
        """The tables, their columns and the folders of splits, as text."""
        tables = [f"labels {' and '.join(files)}: {form}" for form, files in self.forms.items()]
        form = "; ".join(tables)
        for role in (VAL, TEST):
            if role in self.places:
                form += f", {role} from {self.places[role]}/"
        return form


def assign_by_labels(names: Sequence[str], tables: Sequence[Labels], layout: str) -> Assignment:
    """Assign by tables, and splits that they do not list by folders; raise InputError."""
    images = _Images(set(filter(is_image, names)))
    tops = {name.partition("/")[0] for name in images.names if "/" in name}
    listed = _Listed()
    for table in tables:
        folder, _, file = table.name.rpartition("/")
        role = role_in(file) or role_in(folder)
        images.folders = [table.name.removesuffix(file), *_folder_of(role, tops), ""]
        listed.add(table, images, role if len(tables) > 1 else "")
    sides = listed.sides()
    unnamed = sorted(images.names - listed.images.keys())
    # Tables of val and test alone leave the images for training to the folders.
    if unnamed and TRAIN not in sides:
        other = assign_by_folders(_beside(names, listed.images.keys(), unnamed), layout)
        other.sides |= sides
        form = f"{listed.form} and {other.form}"
        return replace(other, form=form, doubt=listed.doubt)
    result = Assignment(sides, listed.form, doubt=listed.doubt)
    files = [table.name for table in tables]
    unused = [name for name in tables_in(names) if name not in files]
    hint = f" ({unused[0]} is not used; labels takes several names)" if unused else ""
    result.leave_out(unnamed, f"images that {' and '.join(files)} does not name{hint}: {{:,}}")
    result.sides.setdefault(TRAIN, Side())
    return result


def _folder_of(role: str, tops: Iterable[str]) -> list[str]:
    """Return the one top-level folder of a split, with a slash; nothing if there are more."""
    if not role:
        return []
    folders = [f"{top}/" for top in tops if role_in(top) == role]
    return folders if len(folders) == 1 else []


def _beside(names: Iterable[str], listed: Container[str], unnamed: Iterable[str]) -> list[str]:
    """Return the files in the top-level folders of unnamed images, without the listed images."""
    tops = {"", *(name.partition("/")[0] for name in unnamed)}

    def is_beside(name: str) -> bool:
        return name not in listed and name.rpartition("/")[0].partition("/")[0] in tops

    return list(filter(is_beside, names))
