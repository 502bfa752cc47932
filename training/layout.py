"""Which images a dataset has, of which class and on which side, from the names of its files alone.

The same judges the listing of a bucket before a byte moves and a folder on disk.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.labels import Labels
from kfp_ddp.training.sides import (
    SIDES,
    SUFFIXES,
    TEST,
    TRAIN,
    VAL,
    Found,
    Side,
    by_folders,
    by_labels,
    by_top,
    side_of,
    use_a_table,
)

_SHOWN = 5


class Rule(NamedTuple):
    """What a person chose of it; see `TrainConfig`."""

    val_fraction: float = 0.1
    labels: str = ""


@dataclass(frozen=True)
class Part:
    """The images of a side, by class and name: names below the dataset, and class numbers."""

    folder: str = ""
    """What all of them lie in, below the dataset; '' for the dataset itself."""
    names: tuple[str, ...] = ()
    targets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self.names, self.targets, strict=True)

    def counts(self, classes: int) -> list[int]:
        """How many images each of so many classes has."""
        found = Counter(self.targets)
        return [found[target] for target in range(classes)]


@dataclass(frozen=True)
class Layout:
    """The images of a dataset."""

    classes: tuple[str, ...]
    train: Part
    val: Part
    test: Part
    by_name: bool
    """Whether the validation images were chosen by their names."""
    form: str
    """Where sides and classes are from, in words."""
    notes: tuple[str, ...]
    """What is odd and nevertheless can train."""

    @property
    def parts(self) -> dict[str, Part]:
        """The sides by name."""
        return {TRAIN: self.train, VAL: self.val, TEST: self.test}


def lay_out(
    names: Iterable[str],
    *,
    val_fraction: float,
    labels: Labels | None = None,
    classes: Sequence[str] | None = None,
) -> Layout:
    """The images of a dataset.

    Args:
        names: Of its files, relative to it; one with a slash at its end is a folder.
        val_fraction: Share of the images for validation, where nothing says which; 0 to refuse
            that.
        labels: The table that says classes, and perhaps sides.
        classes: Those of a model, for which nothing is asked of the training images.

    Raises:
        InputError: what cannot train, in one line.
    """
    tops = by_top(names)
    found = by_labels(tops, labels) if labels else by_folders(tops)
    if classes is None:
        _check_classes(found.sides[TRAIN], tops)
    known = tuple(sorted(found.sides[TRAIN].classes) if classes is None else classes)
    by_name = VAL not in found.sides and (val_fraction > 0 or classes is None)
    if by_name:
        found.form += f", validation by name (val_fraction={val_fraction:g})"
        found.sides[VAL] = _by_name(found.sides[TRAIN], val_fraction, classes is None)
    _check_known(found, known)
    train, val, test = (_numbered(found.sides.get(side, Side()), known) for side in SIDES)
    return Layout(known, train, val, test, by_name, found.form, tuple(found.notes))


def is_for_validation(name: str, val_fraction: float) -> bool:
    """The side of an image, a function of its name alone: it stays there while others come."""
    return _position(name) < val_fraction


def _position(name: str) -> float:
    """From 0 to 1, evenly over names."""
    digest = hashlib.sha256(f"split:{name}".encode("utf-8", "surrogateescape"))
    return int(digest.hexdigest()[:8], 16) / 2**32


def _check_classes(train: Side, tops: dict[str, list[str]]) -> None:
    """Refuse what no classifier can be trained on."""
    folder = f"{train.folder}/" if train.folder else ""
    if not train:
        if train.loose:
            raise InputError(
                f"{len(train.loose):,} images lie in no class folder: put them in "
                f"{folder}<class>/, or {use_a_table(tops)}"
            )
        raise InputError(
            f"there is {_listed(tops)} but no train/ with images: put what to train on in "
            "train/<class>/"
        )
    empty = sorted(name for name, members in train.classes.items() if not members)
    if empty:
        raise InputError(
            f"class folder {folder}{empty[0]} has no images ({', '.join(SUFFIXES)}): fill it, "
            "remove it, or leave it out by the sync's exclude"
        )
    if len(train.classes) == 1:
        (only,) = train.classes
        inner = sorted(side_of(train.classes[only], f"{folder}{only}").classes)
        hint = ""
        if len(inner) > 1:
            shown = ", ".join(inner[:_SHOWN])
            hint = f"; if {shown} are the classes, give {folder}{only}/ as the source"
        raise InputError(f"there is one class only ({only}): a classifier needs two or more{hint}")


def _listed(tops: dict[str, list[str]]) -> str:
    return " and ".join(f"{top}/" for top in sorted(tops) if top) or "a table of labels"


def _by_name(train: Side, val_fraction: float, must: bool) -> Side:
    """Take the validation images out of those for training, by their names.

    Raises:
        InputError: all fall on one side, and `must` not; or none may be taken.
    """
    if not val_fraction:
        raise InputError(
            "there is no val/ with images: put some in val/<class>/, or set val_fraction above 0"
        )
    val, everything = Side(train.folder), train.classes
    train.classes = {}
    for name, members in everything.items():
        sides: tuple[list[str], list[str]] = ([], [])
        for member in members:
            sides[is_for_validation(member, val_fraction)].append(member)
        train.classes[name], val.classes[name] = sides
    if must and not (train and val):
        positions = sorted(_position(each) for members in everything.values() for each in members)
        enough = min(0.99, math.ceil(positions[len(positions) // 10] * 100 + 0.5) / 100)
        raise InputError(
            f"{'all' if val else 'none'} of the {len(positions):,} images fall on the validation "
            f"side at val_fraction={val_fraction:g}: set val_fraction={enough:g} or add images"
        )
    return val


def _check_known(found: Found, known: Sequence[str]) -> None:
    """Refuse validation images of other classes; leave out such test images."""
    for role in (VAL, TEST):
        side = found.sides.get(role, Side())
        unknown = sorted(set(side.classes) - set(known))
        if unknown and role == VAL:
            where = f"{side.folder}/" if side.folder else "the validation images"
            raise InputError(
                f"class {unknown[0]!r} is in {where} but not in the training split: "
                "remove it, or add it to both"
            )
        for name in unknown:
            images = side.classes.pop(name)
            found.left_out(images, f"images of {name!r}, a class of {side.folder}/ alone: {{:,}}")


def _numbered(side: Side, classes: Sequence[str]) -> Part:
    rows = [
        (target, name)
        for target, label in enumerate(classes)
        for name in sorted(side.classes.get(label, ()))
    ]
    return Part(side.folder, tuple(name for _, name in rows), tuple(target for target, _ in rows))
