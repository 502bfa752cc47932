"""Split and class of each image, as folders name them."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import look, same_text

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif"),
)
"""Names of images that `decoder` reads; the only list."""
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
_SYSTEM = re.compile(
    r"\.|[#@$~](?=[^\W\d])|__(?!.*_$)|(?i:lost\+found|System Volume Information|RECYCLER"
    r"|FOUND\.\d{3}|Network Trash Folder|Temporary Items|_temporary|_delta_log|__pycache__)$"
)
"""Folders that systems make, most by a sign in front that people rarely give to a class."""
TRAIN, VAL, TEST = SIDES = ("train", "val", "test")
_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), VAL),
    **dict.fromkeys(("test", "testing", "holdout", "pred", "prediction", "predictions"), TEST),
}
_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LETTERS = re.compile(r"[^\W\d_]+")
_FOLD = re.compile(r"(?<![^\W\d_])folds?[\W_]*\d", re.IGNORECASE)
_DATE = re.compile(r"(19|20)\d\d([-_. ]?\d\d?){0,2}")
_SHOWN = 5


@dataclass
class Side:
    """A split before classes get numbers: names by class, and images outside of class folders."""

    folder: str = ""
    classes: dict[str, list[str]] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))

    @property
    def images(self) -> list[str]:
        """Names of the images in and outside of class folders."""
        return [*self.loose, *chain.from_iterable(self.classes.values())]


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


def role_in(name: str) -> str:
    """Return the split that words of a name mean: train, val or test; '' without just one."""
    words = _LETTERS.findall(_BORDER.sub(" ", same_text(name)))
    roles = {_WORDS[word] for word in map(str.lower, words) if word in _WORDS}
    return roles.pop() if len(roles) == 1 else ""


@lru_cache(1 << 16)
def system_folder(path: str) -> str:
    """Return the first folder in a path that a system made; '' without."""
    return next(filter(_SYSTEM.match, path.split("/")), "")


def is_image(name: str) -> bool:
    """Return whether the name of a file is that of an image, and in no folder of a system."""
    folder, _, last = name.rpartition("/")
    return last.lower().endswith(SUFFIXES) and last[0] != "." and not system_folder(folder)


def is_ignored(name: str) -> bool:
    """Return whether a file, of any kind, belongs to a system or to a version and not to a user."""
    folder, _, last = name.rpartition("/")
    known = last in ("", "Thumbs.db", "desktop.ini") or last.startswith(("_", ".", "~$"))
    return known or last.endswith("_$folder$") or bool(system_folder(folder))


def not_read(names: Iterable[str]) -> str:
    """Describe the files that are no images, by the end of their names; '' without."""
    kinds = Counter(_kind(name) for name in names if not is_image(name) and not is_ignored(name))
    if not kinds:
        return ""
    most = kinds.most_common(_SHOWN)
    rest = kinds.total() - sum(count for _, count in most)
    shown = [f"{count:,} {kind}" for kind, count in most] + [f"{rest:,} others"] * (rest > 0)
    misnamed = any(kind.startswith(("without", *SUFFIXES)) for kind in kinds)
    hint = "; rename images so that they end in .jpg" * misnamed
    hint += "; unpack archives" * any(kind.endswith(ARCHIVES) for kind in kinds)
    return f"{kinds.total():,} file{'s' * (kinds.total() > 1)} not read: {', '.join(shown)}{hint}"


def _kind(name: str) -> str:
    """Return the end of a file's name, such as .csv, .jpg.1 or .jpg_large."""
    _, *ends = name.rpartition("/")[2].lower().split(".")
    two = len(ends) > 1 and f".{ends[-2]}" in SUFFIXES
    return ".".join(["", *ends[-2 if two else -1 :]]) if ends else "without a suffix"


def no_images(names: Iterable[str], folder: str = "") -> str:
    """Return "no images", the suffixes of images, and what is in a folder instead."""
    others = not_read(name for name in names if name.startswith(folder and f"{folder}/"))
    hint = f"; {others}; convert pictures of other kinds to .jpg or .png" if others else ""
    return f"no images ({', '.join(SUFFIXES)}{hint})"


def group_by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their top-level folder, '' for names outside of folders."""
    tops: dict[str, list[str]] = {"": []}
    for name in names:
        folder, slash, _ = name.partition("/")
        top = folder if slash else ""
        if not system_folder(top):
            tops.setdefault(top, []).append(name)
    return tops


def side_of(names: Iterable[str], folder: str) -> Side:
    """Collect the class folders below a folder; '' is the dataset itself."""
    side, start = Side(folder), len(folder) + 1 if folder else 0
    for name in names:
        top, slash, _ = name[start:].partition("/")
        if not system_folder(top if slash else ""):
            members = side.classes.setdefault(top, []) if slash else side.loose
            if is_image(name):
                members.append(name)
    return side


def unify(sides: Iterable[Side], known: Iterable[str] = ()) -> None:
    """Make classes one whose names are the same text; InputError for names that only look alike."""
    looks = {look(name): same_text(name) for name in known}
    for side in sides:
        spellings, side.classes = side.classes, {}
        for spelling in sorted(spellings):
            name = same_text(spelling)
            if (other := looks.setdefault(look(name), name)) != name:
                raise InputError(
                    f"the classes {other!a} and {name!a} look alike but differ: rename one"
                )
            side.classes[name] = side.classes.get(name, []) + spellings[spelling]


def _top(names: Iterable[str], folder: str) -> Side:
    """Collect the class folders below a top-level folder, or in its only folder of that name."""
    side = side_of(names, folder)
    while not side.loose and len(side.classes) == 1:
        (inner,) = side.classes
        last = side.folder.rpartition("/")[2]
        if inner.lower() != last.lower() and role_in(inner) != (role_in(last) or None):
            break
        side = side_of(names, f"{side.folder}/{inner}")
    return side


def fork_of(images: Iterable[str], folder: str) -> tuple[str, set[str]]:
    """Return the first folder, from this one down, with other than one folder, and its folders."""
    paths = {name[len(folder) + 1 :].rpartition("/")[0] for name in images}
    while len(first := {path.partition("/")[0] for path in paths}) == 1 and "" not in first:
        folder = f"{folder}/{first.pop()}"
        paths = {path.partition("/")[2] for path in paths}
    return folder, first - {""}


def _check_forks(forks: dict[str, set[str]], classes: Collection[str], advice: str) -> bool:
    """Raise InputError if folders have the same folders inside; return whether these are dates."""
    counts = Counter(chain.from_iterable(forks.values()))
    same = {name for name, count in counts.items() if 1 < count >= len(forks) / 2}
    alike = [folder for folder in forks if len(same & forks[folder]) > 1]
    dates = len(alike) > 1 and all(map(_DATE.fullmatch, same))
    if len(alike) > 1 and not dates and not set(classes).isdisjoint(alike):
        outer, inner = some(alike), some(sorted(same))
        raise InputError(
            f"{outer} have the same folders {inner}: {advice.format(outer=outer, inner=inner)}"
        )
    return dates


def _deep(forks: dict[str, set[str]]) -> list[str]:
    """Return a note about folders in class folders, if there are any."""
    deep = [f"{folder}/{min(names)}" for folder, names in forks.items() if names]
    return [f"folders in class folders are no classes: {some(deep)}"] if deep else []


def some(names: Sequence[str]) -> str:
    """Return the first of some names."""
    return ", ".join([*names[:3], *["…"] * (len(names) > 3)])


def _roles(sides: dict[str, Side], forks: dict[str, set[str]], layout: str) -> dict[str, str]:
    """Return the split of top-level folders; {} if they are the classes, InputError if both."""
    inside = {top: set(side.classes) if side else set() for top, side in sides.items()}
    folds = {top: TRAIN for top in sides if inside[top] and _FOLD.search(top)}
    roles = {top: role_in(top) or folds.get(top, "") for top in sides}
    others = [top for top in forks if not roles[top]]
    if layout == "splits" and TRAIN not in roles.values():
        roles |= dict.fromkeys(others, TRAIN)
    if layout != "auto" or not others:
        return {} if layout == "classes" else roles
    advice = "set layout=classes if {outer} are the classes, or layout=splits if {inner} are"
    dates = _check_forks(forks, others, advice)
    splits = {role: top for top, role in roles.items() if role and inside[top]}
    train = inside.get(splits.get(TRAIN, ""), set())
    if not dates and any(train & inside[top] for role, top in splits.items() if role != TRAIN):
        return roles
    for role, top in splits.items():
        if (role == TRAIN or inside[top].intersection(others)) and not (dates and len(splits) == 1):
            raise InputError(
                f"{top}/ is next to {some(others)} and has the folders "
                f"{some(sorted(inside[top]))}: set layout=splits if it is a split, or "
                "layout=classes if all these are classes; exclude leaves folders out"
            )
    return {}


def assign_by_folders(names: Collection[str], layout: str = "auto") -> Assignment:
    """Assign splits and classes by folders; raise InputError if there are no images to train on."""
    tops = group_by_folder(names)
    outside = list(filter(is_image, tops.pop("")))
    sides = {top: _top(members, top) for top, members in sorted(tops.items())}
    forks = {top: fork_of(side.images, top)[1] for top, side in sides.items() if side.images}
    if not outside and not forks:
        raise InputError(
            f"there are {no_images(names)}: put them in <class>/, or in train/<class>/ and "
            "val/<class>/"
        )
    roles = _roles(sides, forks, layout)
    if not any(roles.values()):
        train = Side("", {top: side.images for top, side in sides.items()}, outside)
        return _class_folders(train, forks, names, layout)
    result = Assignment({TRAIN: Side()}, "")
    for role in SIDES:
        every = [side for top, side in sides.items() if roles[top] == role]
        full = [side for side in every if side] or [side for side in every if side.loose] or every
        if len(full) > 1 and any(role_in(side.folder.partition("/")[0]) for side in full):
            one, other = (side.folder for side in full[:2])
            raise InputError(
                f"{one}/ and {other}/ are both for {role}: put the images in one of them, or "
                "leave one out with exclude"
            )
        if full:
            result.sides[role] = Side(full[0].folder if len(full) == 1 else "")
            result.form += " and " * bool(result.form) + some([f"{one.folder}/" for one in full])
        for side in full:
            result.notes += _check_side(side, role, names, layout)
            for label, images in side.classes.items():
                result.sides[role].classes.setdefault(label, []).extend(images)
        for side in every:
            result.leave_out(side.loose, f"images of {side.folder}/ in no class folder: {{:,}}")
    aside = [top for top in forks if not roles[top]]
    result.leave_out(aside, "folders next to the splits: {:,}")
    result.leave_out(outside, "images in no split: {:,}")
    return result


def _class_folders(
    train: Side, forks: dict[str, set[str]], names: Iterable[str], layout: str
) -> Assignment:
    result = Assignment({TRAIN: train}, "class folders", _deep(forks))
    splits = list(filter(role_in, train.classes))
    if len(set(map(role_in, splits))) > 1 and layout == "auto":
        if tables_in(names):
            raise InputError(
                f"{some(splits)} have no class folders: {use_a_table(names)}, or set "
                "layout=classes if they are classes"
            )
        result.notes.append(f"{some(splits)} are classes, as they have no class folders")
    result.leave_out(train.loose, "images in no class folder: {:,}")
    return result


def _check_side(side: Side, role: str, names: Iterable[str], layout: str) -> list[str]:
    """Return notes; raise InputError without images or class folders, or with two readings."""
    if role != TEST and side.loose and not side:
        raise InputError(
            f"{side.folder}/ has no class folders: put its {len(side.loose):,} images in "
            f"{side.folder}/<class>/, {use_a_table(names)}, or set layout=classes if it is a class"
        )
    if role == VAL and not side:
        raise InputError(
            f"{side.folder}/ has {no_images(names, side.folder)}: fill it, or remove it to choose "
            "validation images by name"
        )
    if role != TRAIN or not side:
        return []
    if len(side.classes) > 1 and all(map(role_in, side.classes)) and layout == "auto":
        raise InputError(
            f"{side.folder}/ has the splits {some(sorted(side.classes))}: use it as the source, "
            "or set layout=splits if these are classes"
        )
    folders = {f"{side.folder}/{name}": images for name, images in side.classes.items()}
    forks = {folder: fork_of(images, folder)[1] for folder, images in folders.items()}
    advice = "set layout=splits if {outer} are the classes; if {inner} are, move them up"
    _check_forks(forks, folders if layout == "auto" else (), advice)
    return _deep(forks)


def use_a_table(names: Iterable[str]) -> str:
    """Advise a table of labels in place of class folders, with an example of such a file."""
    tables = tables_in(names)
    alike = [name for name in tables if name.rpartition("/")[2] == tables[0].rpartition("/")[2]]
    like = f", such as {','.join(alike)}" if tables else ""
    return f"set labels to the name of a CSV of path,label in the dataset{like}"


def tables_in(names: Iterable[str]) -> list[str]:
    """Return the names of files that may be tables of labels, those for training first."""
    kinds = (".csv", ".jsonl", ".tsv")
    tables = (name for name in names if name.lower().endswith(kinds) and not is_ignored(name))
    return sorted(tables, key=lambda name: (name.count("/"), role_in(name) != TRAIN, name))
