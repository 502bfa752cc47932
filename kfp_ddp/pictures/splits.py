"""Images of the splits of a dataset, in a folder or in the archives of a packed version."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import read_below
from kfp_ddp.pictures import shards
from kfp_ddp.pictures.layout import Part, check_known, lay_out, number, recorded_rule
from kfp_ddp.pictures.reading import RULE, SUFFIXES, LayoutRule, is_image, system_folder
from kfp_ddp.pictures.shards import Slices, Where
from kfp_ddp.pictures.sides import SIDES, TEST, TRAIN, VAL, side_of, unify
from kfp_ddp.pictures.tables import LARGEST, Labels, labels_of, roots_of


@dataclass(frozen=True)
class Index:
    """Images of one split: class names, and for each image its path and class number."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    targets: tuple[int, ...]
    slices: Slices | None = None
    """For a packed version: archive and bytes of each image. A path is then only a name,
    `<folder of the version>/<member>`."""

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, position: int) -> Where:
        """Return where the bytes of an image are."""
        path = self.paths[position]
        return self.slices.where(position, path) if self.slices else Where(path)

    def only(self, positions: Sequence[int]) -> "Index":
        """Select the images at these positions; the classes remain the same."""
        return dataclasses.replace(
            self,
            paths=tuple(self.paths[position] for position in positions),
            targets=tuple(self.targets[position] for position in positions),
            slices=self.slices.only(positions) if self.slices else None,
        )


class Splits(NamedTuple):
    """Splits of a dataset; `test` is None if it has none."""

    train: Index
    val: Index
    test: Index | None
    by_name: bool
    """Whether the validation images were chosen by their names."""


def splits_of(
    data: Path,
    rule: LayoutRule = RULE,
    classes: Sequence[str] | None = None,
) -> Splits:
    """List the splits of a folder by `lay_out`; raise InputError or StorageError."""
    packed = shards.members(data)
    names = list(_names(data)) if packed is None else packed.names
    try:
        tables = read_tables(data, rule.labels, packed)
        images = lay_out(names, rule, labels=tables, classes=classes)
    except InputError as error:
        raise InputError(f"dataset {data}: {error}") from None
    positions = _positions(data, packed) if packed else {}

    def index(part: Part) -> Index:
        slices = None
        if packed:
            slices = packed.slices.only([positions[name] for name in part.names])
        return Index(data / part.folder, images.classes, _paths(data, part), part.targets, slices)

    test = index(images.test) if len(images.test) else None
    return Splits(index(images.train), index(images.val), test, images.by_name)


def sides_of(
    data: Path, split: str, classes: Sequence[str], config: Mapping[str, object]
) -> tuple[Index, dict[str, Index]]:
    """List a trained model's split, or a folder; with val also the other splits; InputError."""
    if split not in SIDES:
        return scan(data / split, classes), {}
    splits = splits_of(data, recorded_rule(config), classes)
    index = {TRAIN: splits.train, VAL: splits.val, TEST: splits.test}[split]
    if not index:
        raise InputError(
            f"the dataset {data} has no folder {split}/ with images: put them in {split}/<class>/"
        )
    if split != VAL:
        return index, {}
    others = {TRAIN: splits.train, TEST: splits.test}
    return index, {name: other for name, other in others.items() if other}


def count_images(data: Path, most: int) -> int:
    """Count the images of all splits in a folder, at most up to `most`."""
    return sum(1 for _ in itertools.islice(filter(is_image, _names(data)), most))


def _positions(data: Path, packed: shards.Members) -> dict[str, int]:
    """Map each name to its position; raise InputError for a duplicate."""
    positions: dict[str, int] = {}
    for position, name in enumerate(packed.names):
        before = positions.setdefault(name, position)
        if before != position:
            first = packed.archive(before)
            second = packed.archive(position)
            raise InputError(
                f"dataset {data}: {name} is twice in its archives: in {first} and in {second}; "
                "give each image a unique name"
            )
    return positions


def read_tables(data: Path, labels: str, packed: shards.Members | None) -> tuple[Labels, ...]:
    """Read the tables that the setting `labels` names; raise InputError if one cannot be read."""
    roots = roots_of(*shards.addresses(data))
    return labels_of(labels, lambda name: _read_table(data, name, packed), roots)


def _read_table(data: Path, name: str, packed: shards.Members | None) -> bytes:
    try:
        if packed is None:
            return read_below(data, name, LARGEST)
        return packed.read(name, LARGEST)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or "not in the dataset"
        raise InputError(f"labels {name} cannot be read ({why}): name an existing file") from None


def _names(data: Path) -> Iterator[str]:
    """Yield all files; with a slash folders of the two top levels, where links are followed."""
    waiting = [("", 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(data / folder) as entries:
                children = [(item.name, item.is_dir(follow_symlinks=depth < 2)) for item in entries]
        except (FileNotFoundError, NotADirectoryError):
            if folder:
                continue
            raise InputError(
                f"the dataset {data} does not exist: put images there as <class>/*.jpg, or as "
                "train/<class>/*.jpg and val/<class>/*.jpg"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot read {data / folder}: {error.strerror}") from None
        for name, is_folder in children:
            if not is_folder:
                yield folder + name
            elif not system_folder(name):
                waiting.append((f"{folder}{name}/", depth + 1))
                if depth < 2:
                    yield f"{folder}{name}/"


def scan(split: Path, classes: Sequence[str] | None = None) -> Index:
    """List the images in the folders of `classes`, or of all classes; raise InputError."""
    if not split.is_dir():
        raise InputError(
            f"the folder {split} does not exist: put images in the dataset's {split.name}/<class>/"
        )
    side = side_of(_names(split), "")
    unify([side], classes or ())
    known = tuple(sorted(side.classes) if classes is None else classes)
    check_known(side, known, str(split))
    if not side:
        raise InputError(
            f"{split} has no images ({', '.join(SUFFIXES)}): put them in {split}/<class>/"
        )
    part = number(side, known)
    return Index(split, known, _paths(split, part), part.targets)


def _paths(folder: Path, part: Part) -> tuple[str, ...]:
    paths = tuple(f"{folder}/{name}" for name in part.names)
    for path in paths:
        if not path.isascii() and path.encode(errors="replace").decode() != path:
            raise InputError(f"the name {path!a} is not UTF-8: rename it")
    return paths
