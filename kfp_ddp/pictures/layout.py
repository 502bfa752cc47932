"""Images, classes and splits of a dataset, from the names of its files in a bucket or folder."""

import hashlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import same_text
from kfp_ddp.pictures.columns import assign_by_labels
from kfp_ddp.pictures.reading import LayoutRule, system_folder
from kfp_ddp.pictures.sides import (
    SIDES,
    TEST,
    TRAIN,
    VAL,
    Assignment,
    Side,
    assign_by_folders,
    fork_of,
    group_by_folder,
    likely_tables,
    no_images,
    not_read,
    some,
    unify,
    use_a_table,
)
from kfp_ddp.pictures.tables import Labels

_SHOWN = 5
_FEWEST = 2
"""Images of a class that validate at least."""
_TENTH = 10
"""Images of a class up to which a tenth of it validates."""


@dataclass(frozen=True)
class Part:
    """Images of a split, ordered by class and name: names in the dataset, and class numbers."""

    folder: str = ""
    """Common folder of the images in the dataset; '' for the dataset itself."""
    names: tuple[str, ...] = ()
    targets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self.names, self.targets, strict=True)

    def counts(self, classes: int) -> list[int]:
        """Count the images of each class."""
        by_class = Counter(self.targets)
        return [by_class[target] for target in range(classes)]


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
    """Source of splits and classes, as text."""
    notes: tuple[str, ...]
    """Warnings about unusual content."""

    @property
    def parts(self) -> dict[str, Part]:
        """Splits by name."""
        return {TRAIN: self.train, VAL: self.val, TEST: self.test}


def recorded_rule(config: Mapping[str, object]) -> LayoutRule:
    """Return the rule in the settings that a training recorded; early versions lack parts."""
    share = config.get("val_fraction")
    defaults = LayoutRule._field_defaults
    texts = {name: str(config.get(name, defaults[name])) for name in ("labels", "layout", "fold")}
    return LayoutRule(share if isinstance(share, int | float) else 0, **texts)


def lay_out(
    names: Iterable[str],
    rule: LayoutRule,
    *,
    labels: Sequence[Labels] = (),
    classes: Sequence[str] | None = None,
) -> Layout:
    """Assign the images of a dataset to classes and splits; raise InputError if it cannot train.

    `labels` are the tables that the rule names. With the `classes` of a model, the training images
    are not checked.
    """
    names = list(names)
    try:
        assignment = _assign(names, labels, rule.layout)
        unify(assignment.sides.values(), classes or ())
        if classes is None:
            _check_classes(assignment.sides[TRAIN], names)
    except InputError as error:
        raise InputError("; ".join([str(error), *_systems(names)])) from None
    sides = {role: assignment.sides.get(role, Side()) for role in SIDES}
    divided = rule.val_fraction > 0 or classes is None
    by_name = VAL not in assignment.sides and (divided or bool(rule.fold))
    if rule.fold and not by_name:
        raise InputError(f"fold={rule.fold} divides images without a split, and there is a val/")
    known = tuple(sorted(sides[TRAIN].classes) if classes is None else classes)
    if rule.fold:
        assignment.form += f", validation by name (fold {rule.fold})"
        sides[VAL] = _take_fold(sides[TRAIN], rule.fold)
    elif by_name:
        share = rule.val_fraction
        assignment.form += f", validation by name (val_fraction={share:g})"
        sides[VAL] = _split_by_name(sides[TRAIN], share, classes is None, assignment.doubt)
    _check_others(sides, known, assignment, () if labels else names)
    tables = {table.name for table in labels}
    others = not_read(name for name in names if name not in tables)
    notes = (*assignment.notes, *_systems(names), *filter(None, [others]))
    train, val, test = (number(side, known) for side in sides.values())
    return Layout(known, train, val, test, by_name, assignment.form, notes)


def _assign(names: list[str], labels: Sequence[Labels], layout: str) -> Assignment:
    if labels:
        return assign_by_labels(names, labels, layout)
    return assign_by_folders(names, layout)


def _check_others(
    sides: dict[str, Side], known: Sequence[str], assignment: Assignment, names: Sequence[str]
) -> None:
    """Raise InputError for unknown classes in validation, and note those that only test/ has."""
    folder = sides[VAL].folder
    where = f"{folder}/" if folder else "the validation images"
    check_known(sides[VAL], known, where, names, assignment.doubt)
    test = sides[TEST]
    for name in sorted(test.classes.keys() - set(map(same_text, known))):
        what = f"images of {name!r}, a class of {test.folder}/ alone: {{:,}}"
        assignment.leave_out(test.classes[name], what)


def _systems(names: Sequence[str]) -> Iterator[str]:
    """Yield a note with the number of files in folders that systems make, if there are any."""
    systems = Counter(system_folder(name.rpartition("/")[0]) for name in names)
    del systems[""]
    if systems:
        most = ", ".join(f"{folder} {count:,}" for folder, count in systems.most_common(_SHOWN))
        yield f"files in folders that a system made: {systems.total():,} left out, {most}"


def _position(name: str) -> float:
    """Map a name to 0..1, uniformly."""
    digest = hashlib.sha256(f"split:{name}".encode("utf-8", "surrogateescape"))
    return int(digest.hexdigest()[:8], 16) / 2**32


def _check_classes(train: Side, names: Sequence[str]) -> None:
    folder = f"{train.folder}/" if train.folder else ""
    if not train and train.loose:
        raise InputError(
            f"{len(train.loose):,} images are in no class folder: put them in {folder}<class>/, "
            f"or {use_a_table(names)}"
        )
    if not train:
        tops = " and ".join(f"{top}/" for top in sorted(group_by_folder(names)) if top)
        raise InputError(
            f"{tops or 'a table of labels'} found, but no train/ with images: put the training "
            "images in train/<class>/"
        )
    for name, members in sorted(train.classes.items()):
        if not members:
            raise InputError(
                f"class folder {folder}{name} has {no_images(names, f'{folder}{name}/')}: fill it, "
                "remove it, or exclude it from the sync"
            )
    if len(train.classes) == 1:
        _refuse_one_class(train, folder, names)


def _refuse_one_class(train: Side, folder: str, names: Sequence[str]) -> None:
    """Raise InputError with the folders inside of the one class, or tables, as the remedy."""
    ((only, members),) = train.classes.items()
    start = f"{folder}{only}/"
    below = [name for name in members if name.startswith(start)]
    source, inner = fork_of(below, start.removesuffix("/"))
    hint = ""
    if len(inner) > 1:
        hint = f"; if {some(sorted(inner))} are classes or splits, use {source}/ as the source"
    elif likely_tables(names):
        hint = f"; {use_a_table(names)}"
    raise InputError(f"there is one class only ({only}): a classifier needs two or more{hint}")


def _split_by_name(train: Side, val_fraction: float, must: bool, doubt: str) -> Side:
    """Move images to validation by their names alone, so that other images do not matter."""
    if not val_fraction:
        raise InputError(
            "there is no val/ with images: put some in val/<class>/, or set val_fraction above 0"
        )
    val = Side(train.folder)
    for name, members in train.classes.items():
        ordered = sorted((_position(member), member) for member in members)
        count = _enough(bisect_left(ordered, (val_fraction, "")), len(ordered), val_fraction)
        val.classes[name] = [member for _, member in ordered[:count]]
        train.classes[name] = [member for _, member in ordered[count:]]
    if must and not val:
        why = doubt or "each class has only one: add images, or put some in val/<class>/"
        raise InputError(f"none of the {len(train):,} images can validate, as {why}")
    return val


def _take_fold(train: Side, fold: str) -> Side:
    """Move the images of a fold to validation: over all folds, each image validates once."""
    number, folds = map(int, fold.split("/"))
    val = Side(train.folder)
    for name, members in train.classes.items():
        ordered = sorted(members, key=_position)
        first, end = (len(ordered) * part // folds for part in (number - 1, number))
        val.classes[name] = ordered[first:end]
        train.classes[name] = ordered[:first] + ordered[end:]
    return val


def _enough(chosen: int, images: int, val_fraction: float) -> int:
    """Return how many of a class validate: 2, or a tenth up to `_TENTH`, but at most half."""
    tenth = min(-(-images // 10), math.ceil(images * val_fraction), _TENTH)
    least = min(max(_FEWEST, tenth), images // 2)
    most = max(0, images - 1)
    return min(max(chosen, least), most)


def check_known(
    side: Side, known: Sequence[str], where: str, names: Sequence[str] = (), doubt: str = ""
) -> None:
    """Raise InputError for images of a class that is not known; `names` may have its table."""
    for name in sorted(side.classes.keys() - set(map(same_text, known))):
        advice = ["remove it, or add it to both", doubt]
        if likely_tables(names):
            advice.append(use_a_table(names, side.folder))
        raise InputError(
            f"class {name!r} is in {where} but not in the training split: "
            f"{'; '.join(filter(None, advice))}"
        )


def number(side: Side, classes: Sequence[str]) -> Part:
    """Return the images of the classes, ordered by class and name, with class numbers."""
    names: list[str] = []
    targets: list[int] = []
    for target, label in enumerate(classes):
        members = sorted(side.classes.get(same_text(label), ()))
        names += members
        targets += [target] * len(members)
    return Part(side.folder, tuple(names), tuple(targets))
