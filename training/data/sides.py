"""Split and class of each image, as folders name them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kfp_ddp.core.errors import InputError

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif"),
)
"""Names of images that `decoder` reads; the only list."""
_HIDDEN = re.compile(r"(^|/)(\.|(__MACOSX|@eaDir)(/|$))")
"""Hidden files and folders, and those of macOS and of Synology, with thumbnails, at any depth."""
TRAIN, VAL, TEST = SIDES = ("train", "val", "test")
ROLES = {
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
        role = ROLES.get(folder.lower())
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
    if not side and ROLES[side.folder.lower()] == VAL:
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
