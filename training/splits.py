"""The images of a dataset's sides: in a folder, or in the archives of a packed version."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import read_below
from kfp_ddp.training import shards
from kfp_ddp.training.labels import LARGEST, Labels
from kfp_ddp.training.layout import Layout, Part, lay_out
from kfp_ddp.training.shards import Slices, Where
from kfp_ddp.training.sides import SIDES, SUFFIXES, TEST, TRAIN, VAL, is_hidden, is_image


@dataclass(frozen=True)
class Index:
    """The images of one split: class names, and for each image its path and class number."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    targets: tuple[int, ...]
    slices: Slices | None = None
    """Of a packed version: in which bytes of which archive each image is. A path is then only a
    name, `<folder of the version>/<member>`."""

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, position: int) -> Where:
        """Where the bytes of an image are."""
        path = self.paths[position]
        return self.slices.where(position, path) if self.slices else Where(path)

    def only(self, positions: Sequence[int]) -> "Index":
        """The images at these positions alone, of the same classes."""
        return dataclasses.replace(
            self,
            paths=tuple(self.paths[at] for at in positions),
            targets=tuple(self.targets[at] for at in positions),
            slices=self.slices.only(positions) if self.slices else None,
        )


class Splits(NamedTuple):
    """The sides of a dataset; `test` is None where it has none."""

    train: Index
    val: Index
    test: Index | None
    by_name: bool
    """Whether the validation images were chosen by their names."""


def splits_of(
    data: Path,
    val_fraction: float = 0.1,
    labels: str = "",
    classes: Sequence[str] | None = None,
) -> Splits:
    """The sides of the dataset in a folder; the rest is as in `lay_out`.

    Raises:
        InputError: it cannot be trained on, in one line that names the dataset.
        StorageError: the folder cannot be read.
    """
    packed = shards.members(data)
    names = list(_names(data)) if packed is None else packed.names
    try:
        table = Labels.parse(labels, _read(data, labels, packed)) if labels else None
        found = lay_out(names, val_fraction=val_fraction, labels=table, classes=classes)
    except InputError as error:
        raise InputError(f"dataset {data}: {error}") from None
    positions = _positions(data, packed) if packed else {}
    train, val, test = (
        _index(data, found, part, packed, positions) for part in found.parts.values()
    )
    return Splits(train, val, test if len(test) else None, found.by_name)


def sides_of(
    data: Path, split: str, classes: Sequence[str], config: Mapping[str, object]
) -> tuple[Index, Index | None]:
    """The images of a split for a model that tells these classes apart; with val, those of test.

    Args:
        data: Folder of the dataset.
        split: train, val or test, as the model's training found them; otherwise a folder there.
        classes: Those of the model.
        config: The configuration of its training.

    Raises:
        InputError: there are none, or some of a class that the model does not know.
    """
    if split not in SIDES:
        return scan(data / split, classes), None
    share, labels = config.get("val_fraction"), str(config.get("labels", ""))
    share = share if isinstance(share, int | float) else 0  # of a run before there was a share
    found = splits_of(data, share, labels, classes)
    index = {TRAIN: found.train, VAL: found.val, TEST: found.test}[split]
    if not index:
        raise InputError(
            f"the dataset {data} has no folder {split}/ with images: put them in {split}/<class>/"
        )
    return index, found.test if split == VAL else None


def holds(data: Path, most: int) -> int:
    """How many images a folder holds on all sides, counted no further than `most`."""
    return sum(1 for _ in itertools.islice(filter(is_image, _names(data)), most))


def _positions(data: Path, packed: shards.Members) -> dict[str, int]:
    """Where each name stands; raises InputError for one that stands there twice."""
    found: dict[str, int] = {}
    for at, name in enumerate(packed.names):
        before = found.setdefault(name, at)
        if before != at:
            places = packed.slices.shards[before], packed.slices.shards[at]
            first, second = (Path(packed.slices.files[place]).name for place in places)
            raise InputError(
                f"dataset {data}: {name} is twice in its archives: in {first} and in {second}; "
                "give each image a name of its own"
            )
    return found


def _index(
    data: Path,
    found: Layout,
    part: Part,
    packed: shards.Members | None,
    positions: Mapping[str, int],
) -> Index:
    paths = tuple(f"{data}/{name}" for name in part.names)
    slices = packed.slices.only([positions[name] for name in part.names]) if packed else None
    return Index(data / part.folder, found.classes, paths, part.targets, slices)


def _read(data: Path, name: str, packed: shards.Members | None) -> bytes:
    """The content of a table of labels.

    Raises:
        InputError: it is not there, too large, or cannot be read.
    """
    try:
        if packed is None:
            return read_below(data, name, LARGEST)
        at = packed.names.index(name)
        return shards.content(packed.slices.where(at, f"{data}/{name}"), LARGEST)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or "not in the dataset"
        raise InputError(f"labels {name} cannot be read ({why}): name a file in it") from None


def _names(data: Path) -> Iterator[str]:
    """All files below a folder, relative to it; folders at the two top levels end with a slash.

    Links to folders are followed there too, and nowhere below.

    Raises:
        InputError: there is no such folder.
        StorageError: one cannot be read.
    """
    waiting = [("", 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(data / folder) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=depth < 2)) for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            if folder:
                continue
            raise InputError(
                f"there is no dataset {data}: put images there as <class>/*.jpg, or as "
                "train/<class>/*.jpg and val/<class>/*.jpg"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot read {data / folder}: {error.strerror}") from None
        for name, is_folder in found:
            if not is_folder:
                yield folder + name
            elif depth or not is_hidden(name):
                waiting.append((f"{folder}{name}/", depth + 1))
                if depth < 2:
                    yield f"{folder}{name}/"


def scan(split: Path, classes: Sequence[str] | None = None) -> Index:
    """List `<split>/<class>/**/*.{jpg,jpeg,png,webp}`, sorted, hidden files left out.

    The folders name the classes, unless `classes` has those of the training split.

    Raises:
        InputError: no such folder, no images, one class only, a class without images, or a
            class that `classes` does not have.
    """
    if not split.is_dir():
        raise InputError(
            f"there is no folder {split}: put images into the dataset's {split.name}/<class>/"
        )
    folders = sorted(
        entry.name for entry in os.scandir(split) if entry.is_dir() and entry.name[0] != "."
    )
    if not folders:
        raise InputError(f"{split} has no class folders: put images in {split}/<class>/")
    if classes is None and len(folders) == 1:
        raise InputError(
            f"{split} has one class only ({folders[0]}): a classifier needs two or more folders"
        )
    names = tuple(folders if classes is None else classes)
    unknown = sorted(set(folders) - set(names))
    if unknown:
        raise InputError(
            f"class {unknown[0]!r} is in {split} but not in the training split: "
            "remove it, or add it to both"
        )
    paths: list[str] = []
    targets: list[int] = []
    for folder in folders:
        found = sorted(_images(split / folder))
        if not found and classes is None:
            raise InputError(
                f"class folder {split / folder} has no images ({', '.join(SUFFIXES)}): "
                "fill it or remove it"
            )
        paths += found
        targets += [names.index(folder)] * len(found)
    if not paths:
        raise InputError(f"{split} holds no images ({', '.join(SUFFIXES)}): check the path")
    return Index(split, names, tuple(paths), tuple(targets))


def _images(folder: Path) -> Iterator[str]:
    for directory, _, files in os.walk(folder):
        for name in files:
            if is_image(name):
                yield os.path.join(directory, name)
