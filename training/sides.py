"""Where a dataset's names say sides and classes: in folders, or in a table."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.labels import Labels, Row

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
TRAIN, VAL, TEST = SIDES = ("train", "val", "test")
_ROLES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""What a folder at the top is called, in any case of letters, that holds a side."""


@dataclass
class Side:
    """A side before classes have numbers: names by class, and images that lie in no class."""

    folder: str = ""
    classes: dict[str, list[str]] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))


@dataclass
class Found:
    """The sides that were found, where they are from in words, and what is odd about that."""

    sides: dict[str, Side]
    form: str
    notes: list[str] = field(default_factory=list)

    def left_out(self, names: Sequence[str], what: str) -> None:
        """Note that these are left out, if there are any; `what` has a place for their number."""
        if names:
            self.notes.append(f"{what.format(len(names))} left out, {names[0]} first")


def is_image(name: str) -> bool:
    """Whether a file is taken for an image, by its name."""
    last = name.rpartition("/")[2]
    return last.lower().endswith(SUFFIXES) and last[0] != "."


def is_hidden(folder: str) -> bool:
    """Whether a folder of this name is passed over."""
    return folder.startswith(".") or folder == "__MACOSX"


def by_top(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by the folder at the top that they lie in; '' for those in none."""
    tops: dict[str, list[str]] = {"": []}
    for name in names:
        top, slash, _ = name.partition("/")
        if not slash:
            tops[""].append(name)
        elif not is_hidden(top):
            tops.setdefault(top, []).append(name)
    return tops


def side_of(names: Iterable[str], folder: str) -> Side:
    """The class folders below a folder, '' for the dataset."""
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
    """The folder of each side; {} where the folders at the top are classes.

    Raises:
        InputError: two folders for one side, or one beside class folders.
    """
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
    # Beside class folders, one that is called as a side is a class too, unless it has classes.
    within = {role: side_of(tops[folder], folder) for role, folder in roles.items()}
    if TRAIN in roles and any(within[TRAIN].classes.values()):
        return roles
    for side in within.values():
        if classes & side.classes.keys():
            raise InputError(
                f"{side.folder}/ lies beside class folders such as {min(classes)}/ and has their "
                "names in it: put the classes in train/<class>/, or take it out"
            )
    return {}


def _others(tops: dict[str, list[str]], roles: dict[str, str]) -> list[str]:
    """Folders at the top with images that are no side's."""
    sides = {"", *roles.values()}
    return [top for top in sorted(tops) if top not in sides and _holds_images(tops[top])]


def _holds_images(names: Iterable[str]) -> bool:
    return any(map(is_image, names))


def by_folders(tops: dict[str, list[str]]) -> Found:
    """Sides and classes as the folders say them.

    Raises:
        InputError: there is no image, no training folder, or a validation folder without classes.
    """
    roles = _roles(tops)
    if not any(map(_holds_images, tops.values())):
        raise InputError(
            f"there are no images ({', '.join(SUFFIXES)}): put them in <class>/, or in "
            "train/<class>/ and val/<class>/"
        )
    if not roles:
        whole = side_of((name for names in tops.values() for name in names), "")
        found = Found({TRAIN: whole}, "class folders")
        found.left_out(whole.loose, "images in no class folder: {:,}")
        return found
    sides = {role: side_of(tops[folder], folder) for role, folder in roles.items()}
    found = Found(sides, " and ".join(f"{roles[side]}/" for side in SIDES if side in roles))
    found.left_out(_others(tops, roles), "folders beside the splits: {:,}")
    for role in (TRAIN, VAL):
        if role in sides:
            _check_folders(sides[role], tops)
    for side in sides.values():
        found.left_out(side.loose, f"images of {side.folder}/ in no class folder: {{:,}}")
    sides.setdefault(TRAIN, Side())
    return found


def _check_folders(side: Side, tops: dict[str, list[str]]) -> None:
    if side.loose and not any(side.classes.values()):
        raise InputError(
            f"{side.folder}/ has no class folders: put its {len(side.loose):,} images in "
            f"{side.folder}/<class>/, or {use_a_table(tops)}"
        )
    if not side and _ROLES[side.folder.lower()] == VAL:
        raise InputError(
            f"{side.folder}/ holds no images ({', '.join(SUFFIXES)}): fill it, or remove it to "
            "have validation images chosen by name"
        )


def use_a_table(tops: dict[str, list[str]]) -> str:
    """How classes can be told without folders, with a file that may do it."""
    kinds = (".csv", ".jsonl", ".tsv")
    tables = sorted(name for name in tops[""] if name.lower().endswith(kinds) and name[0] != "_")
    like = f", such as {tables[0]}" if tables else ""
    return f"set labels to the name of a CSV of path,label in the dataset{like}"


def by_labels(tops: dict[str, list[str]], labels: Labels) -> Found:
    """Sides and classes as a table says them; of sides that it leaves out, as the folders do.

    Raises:
        InputError: the table names what is not there, or an image twice.
    """
    images = {name for names in tops.values() for name in names if is_image(name)}
    roles = {role: top for top in sorted(tops) if (role := _ROLES.get(top.lower()))}
    sides = {side: Side() for side in SIDES}
    told: dict[str, tuple[str, str]] = {}
    for name, row in _resolved(labels, images, roles):
        role = _ROLES.get((row.split or name.partition("/")[0]).lower(), "" if row.split else TRAIN)
        if not role:
            raise InputError(
                f"labels {labels.name} has the split {row.split!r}: it is train, val or test"
            )
        before = told.get(name)
        if before is None:
            sides[role].classes.setdefault(row.label, []).append(name)
            told[name] = row.label, role
        elif before != (row.label, role):
            raise InputError(
                f"labels {labels.name} says of {name} both {' in '.join(before)} and {row.label} "
                f"in {role}: leave one row for each image"
            )
    found = Found({role: side for role, side in sides.items() if side}, f"labels {labels.name}")
    for role, folder in ({} if sides[TRAIN] else roles).items():
        if role not in found.sides:
            found.sides[role] = side = side_of(tops[folder], folder)
            found.form += f" and {folder}/"
            told |= {name: ("", role) for each in side.classes.values() for name in each}
    found.sides.setdefault(TRAIN, Side())
    found.left_out(sorted(images - told.keys()), f"images that {labels.name} does not name: {{:,}}")
    return found


def _resolved(labels: Labels, images: set[str], roles: dict[str, str]) -> Iterator[tuple[str, Row]]:
    """The rows with the names of their images.

    A path is below the dataset, the table's own folder or that of a side, with its suffix or not.
    """
    own = labels.name.rpartition("/")[0]
    folders = (own, *(roles[side] for side in (VAL, TEST, TRAIN) if side in roles))
    prefixes = ["", *(f"{folder}/" for folder in folders if folder)]
    bare: dict[str, str] = {}
    missing: list[str] = []
    for row in labels.rows:
        found = next((p + row.path for p in prefixes if p + row.path in images), None)
        if found is None and "." not in row.path.rpartition("/")[2]:
            bare = bare or {name.rpartition(".")[0]: name for name in images}
            found = next((bare[p + row.path] for p in prefixes if p + row.path in bare), None)
        if found is None:
            missing.append(row.path)
        else:
            yield found, row
    if missing:
        raise InputError(
            f"labels {labels.name} names {len(missing):,} files that the dataset does not "
            f"have as images, {missing[0]} first: add them, or remove their rows"
        )
