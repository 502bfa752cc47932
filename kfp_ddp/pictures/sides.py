"""Split and class of each image, as folders name them."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import look, same_text
from kfp_ddp.pictures.reading import SUFFIXES, is_ignored, is_image, system_folder

ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
_TABLES = (".csv", ".jsonl", ".ndjson", ".tsv")
_OF_PROGRAMS = (".xlsx", ".xls", ".ods", ".mat", ".parquet")
"""Tables that their programs export as CSV."""
_PERHAPS = re.compile(
    r"(?:anno|class|data|image|label|list|map|meta|split|target|test|train|truth|val)[^/]*"
    r"\.(?:txt|json|xlsx?|ods|mat|parquet)$",
    re.IGNORECASE,
)
"""Names of other files that may have labels, as readme.txt has not."""
TRAIN = "train"
VAL = "val"
TEST = "test"
SIDES = (TRAIN, VAL, TEST)
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
    doubt: str = ""
    """Why the classes may be none, for the error of a dataset that cannot train."""

    def leave_out(self, names: Sequence[str], what: str) -> None:
        """Note that these are left out, if any; `what` has a placeholder for their number."""
        if names:
            self.notes.append(f"{what.format(len(names))} left out, {names[0]} first")


def role_in(name: str) -> str:
    """Return the split that words of a name mean: train, val or test; '' without just one."""
    words = _LETTERS.findall(_BORDER.sub(" ", same_text(name)))
    roles = {_WORDS.get(word.lower(), "") for word in words} - {""}
    if len(roles) != 1:
        return ""
    return roles.pop()


def _is_other(name: str) -> bool:
    """Return whether a file is of a user, and no image."""
    return not is_image(name) and not is_ignored(name)


def not_read(names: Iterable[str]) -> str:
    """Describe the files that are no images, by the end of their names; '' without."""
    kinds = Counter(map(_kind, filter(_is_other, names)))
    if not kinds:
        return ""
    most = kinds.most_common(_SHOWN)
    shown = [f"{count:,} {kind}" for kind, count in most]
    rest = kinds.total() - sum(count for _, count in most)
    if rest:
        shown.append(f"{rest:,} others")
    files = "file" if kinds.total() == 1 else "files"
    text = f"{kinds.total():,} {files} not read: {', '.join(shown)}"
    if any(kind.startswith(("without", *SUFFIXES)) for kind in kinds):
        text += "; rename images so that they end in .jpg"
    if any(kind.endswith(ARCHIVES) for kind in kinds):
        text += "; unpack archives"
    return text


def _kind(name: str) -> str:
    """Return the end of a file's name, such as .csv, .jpg.1 or .jpg_large."""
    _, *ends = name.rpartition("/")[2].lower().split(".")
    if not ends:
        return "without a suffix"
    if len(ends) > 1 and f".{ends[-2]}" in SUFFIXES:
        return f".{ends[-2]}.{ends[-1]}"
    return f".{ends[-1]}"


def no_images(names: Iterable[str], start: str = "") -> str:
    """Return "no images", the suffixes of images, and the names with this start instead."""
    others = not_read(name for name in names if name.startswith(start))
    read = ", ".join(SUFFIXES)
    if not others:
        return f"no images ({read})"
    return f"no images ({read}; {others}; convert pictures of other kinds to .jpg or .png)"


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
    side = Side(folder)
    start = len(folder) + 1 if folder else 0
    for name in names:
        top, slash, _ = name[start:].partition("/")
        if not slash:
            members = side.loose
        elif system_folder(top):
            continue
        else:
            members = side.classes.setdefault(top, [])
        if is_image(name):
            members.append(name)
    return side


def unify(sides: Iterable[Side], known: Iterable[str] = ()) -> None:
    """Make classes one whose names are the same text; InputError for names that only look alike."""
    looks = {look(name): same_text(name) for name in known}
    for side in sides:
        classes: dict[str, list[str]] = {}
        for spelling, members in sorted(side.classes.items()):
            name = same_text(spelling)
            other = looks.setdefault(look(name), name)
            if other != name:
                raise InputError(
                    f"the classes {other!a} and {name!a} look alike but differ: rename one"
                )
            classes[name] = classes.get(name, []) + members
        side.classes = classes


def _top(names: Iterable[str], folder: str) -> Side:
    """Collect the class folders below a top-level folder, or in its only folder of that name."""
    side = side_of(names, folder)
    while not side.loose and len(side.classes) == 1:
        (inner,) = side.classes
        if not _repeats(inner, side.folder.rpartition("/")[2]):
            break
        side = side_of(names, f"{side.folder}/{inner}")
    return side


def _repeats(inner: str, outer: str) -> bool:
    """Return whether a folder and the one in it have one meaning, such as seg_train/seg_train."""
    if inner.lower() == outer.lower():
        return True
    role = role_in(outer)
    return role != "" and role_in(inner) == role


def fork_of(images: Iterable[str], folder: str) -> tuple[str, set[str]]:
    """Return the first folder, from this one down, with other than one folder, and its folders."""
    paths = {name[len(folder) + 1 :].rpartition("/")[0] for name in images}
    while True:
        first = {path.partition("/")[0] for path in paths}
        if len(first) != 1 or "" in first:
            return folder, first - {""}
        folder = f"{folder}/{first.pop()}"
        paths = {path.partition("/")[2] for path in paths}


def _check_forks(forks: dict[str, set[str]], classes: Collection[str], advice: str) -> bool:
    """Raise InputError if folders have the same folders inside; return whether these are dates."""
    counts = Counter(chain.from_iterable(forks.values()))
    most = max(2, len(forks) / 2)
    same = {name for name, count in counts.items() if count >= most}
    alike = [folder for folder in forks if len(same & forks[folder]) > 1]
    if len(alike) < 2:
        return False
    if all(map(_DATE.fullmatch, same)):
        return True
    if set(classes).isdisjoint(alike):
        return False
    outer = some(alike)
    inner = some(sorted(same))
    raise InputError(
        f"{outer} have the same folders {inner}: {advice.format(outer=outer, inner=inner)}"
    )


def _deep(forks: dict[str, set[str]]) -> list[str]:
    """Return a note about folders in class folders, if there are any."""
    deep = []
    for folder, names in forks.items():
        if names:
            deep.append(f"{folder}/{min(names)}")
    if not deep:
        return []
    return [f"folders in class folders are no classes: {some(deep)}"]


def some(names: Sequence[str]) -> str:
    """Return the first of some names."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += ", …"
    return text


def _roles(sides: dict[str, Side], forks: dict[str, set[str]], layout: str) -> dict[str, str]:
    """Return the split of top-level folders; {} if they are the classes, InputError if both."""
    if layout == "classes":
        return {}
    roles = {top: _role_of(top, side) for top, side in sides.items()}
    others = [top for top in forks if not roles[top]]
    if layout == "splits":
        if TRAIN not in roles.values():
            roles |= dict.fromkeys(others, TRAIN)
        return roles
    if not others or _are_splits(sides, forks, roles, others):
        return roles
    return {}


def _role_of(top: str, side: Side) -> str:
    """Return the split that a top-level folder may be by its name; folds are for training."""
    if side and _FOLD.search(top):
        return role_in(top) or TRAIN
    return role_in(top)


def _are_splits(
    sides: dict[str, Side], forks: dict[str, set[str]], roles: dict[str, str], others: list[str]
) -> bool:
    """Return whether folders named as splits are splits, and not classes as the folders beside.

    Raise InputError if both may be meant.
    """
    advice = "set layout=classes if {outer} are the classes, or layout=splits if {inner} are"
    dates = _check_forks(forks, others, advice)
    inside = {top: set(side.classes) for top, side in sides.items() if side}
    splits = {roles[top]: top for top in inside if roles[top]}
    train = inside.get(splits.get(TRAIN, ""), set())
    alike = {role for role, top in splits.items() if train & inside[top]}
    if dates and len(splits) == 1:
        return False
    # The classes of the training images in another split, too.
    if not dates and alike - {TRAIN}:
        return True
    for role, top in splits.items():
        # Nobody calls a class train, and folders of one name on two levels may be classes on both.
        if role == TRAIN or not inside[top].isdisjoint(others):
            raise InputError(
                f"{top}/ is next to {some(others)} and has the folders "
                f"{some(sorted(inside[top]))}: set layout=splits if it is a split, or "
                "layout=classes if all these are classes; exclude leaves folders out"
            )
    return False


def assign_by_folders(names: Collection[str], layout: str = "auto") -> Assignment:
    """Assign splits and classes by folders; raise InputError if there are no images to train on."""
    tops = group_by_folder(names)
    outside = list(filter(is_image, tops.pop("")))
    sides = {top: _top(members, top) for top, members in sorted(tops.items())}
    images = {top: side.images for top, side in sides.items()}
    forks = {}
    for top, members in images.items():
        if members:
            forks[top] = fork_of(members, top)[1]
    if not outside and not forks:
        raise InputError(
            f"there are {no_images(names)}: put them in <class>/, or in train/<class>/ and "
            "val/<class>/"
        )
    roles = _roles(sides, forks, layout)
    # Without a folder of a split, the top-level folders are the classes.
    if not any(roles.values()):
        return _class_folders(Side("", images, outside), forks, names, layout)
    by_role: dict[str, list[Side]] = {}
    for top, side in sides.items():
        by_role.setdefault(roles[top], []).append(side)
    result = Assignment({TRAIN: Side()}, "")
    forms = {}
    for role in SIDES:
        if role in by_role:
            forms[role] = _add_split(result, role, by_role[role], names, layout)
    result.form = " and ".join(forms.values())
    aside = [top for top in forks if not roles[top]]
    result.leave_out(aside, "folders next to the splits: {:,}")
    result.leave_out(outside, "images in no split: {:,}")
    return result


def _add_split(
    result: Assignment, role: str, sides: list[Side], names: Iterable[str], layout: str
) -> str:
    """Add the folders of one split, those of folds together, and return them as text.

    Raise InputError for two folders that are no folds.
    """
    full = _with_images(sides)
    folders = [f"{side.folder}/" for side in full]
    # Folds have numbers and no word of a split in their names.
    named = any(role_in(folder.partition("/")[0]) for folder in folders)
    if named and len(full) > 1:
        raise InputError(
            f"{folders[0]} and {folders[1]} are both for {role}: put the images in one of them, "
            "or leave one out with exclude"
        )
    split = Side(full[0].folder if len(full) == 1 else "")
    for side in full:
        result.notes += _check_side(side, role, names, layout)
        for label, images in side.classes.items():
            split.classes.setdefault(label, []).extend(images)
    result.sides[role] = split
    for side in sides:
        result.leave_out(side.loose, f"images of {side.folder}/ in no class folder: {{:,}}")
    return some(folders)


def _with_images(sides: list[Side]) -> list[Side]:
    """Return the folders with images in class folders, else those with images, else all."""
    with_classes = list(filter(len, sides))
    if with_classes:
        return with_classes
    with_loose = [side for side in sides if side.loose]
    return with_loose or sides


def _class_folders(
    train: Side, forks: dict[str, set[str]], names: Iterable[str], layout: str
) -> Assignment:
    result = Assignment({TRAIN: train}, "class folders", _deep(forks))
    if layout == "auto":
        splits = list(filter(role_in, train.classes))
        several = len(set(map(role_in, splits))) > 1
        if several and likely_tables(names):
            raise InputError(
                f"{some(splits)} have no class folders: {use_a_table(names)}, or set "
                "layout=classes if they are classes"
            )
        result.notes += _named_as_splits(splits)
    result.leave_out(train.loose, "images in no class folder: {:,}")
    return result


def _named_as_splits(folders: Iterable[str]) -> list[str]:
    """Return a note for each folder of a class that has the name of a split."""
    doubtful = filter(lambda folder: role_in(folder.rpartition("/")[2]), folders)
    return [f"{one} counts as a class: to leave it out, set exclude={one}/**" for one in doubtful]


def _check_side(side: Side, role: str, names: Iterable[str], layout: str) -> list[str]:
    """Return notes; raise InputError without images or class folders, or with two readings."""
    if not side:
        _refuse_empty(side, role, names)
        return []
    if role != TRAIN:
        return []
    nested = len(side.classes) > 1 and all(map(role_in, side.classes))
    if nested and layout == "auto":
        raise InputError(
            f"{side.folder}/ has the splits {some(sorted(side.classes))}: use it as the source, "
            "or set layout=splits if these are classes"
        )
    forks = {}
    for name, images in side.classes.items():
        folder = f"{side.folder}/{name}"
        forks[folder] = fork_of(images, folder)[1]
    classes: Collection[str] = forks if layout == "auto" else ()
    advice = "set layout=splits if {outer} are the classes; if {inner} are, move them up"
    _check_forks(forks, classes, advice)
    return [*_deep(forks), *_named_as_splits(classes)]


def _refuse_empty(side: Side, role: str, names: Iterable[str]) -> None:
    """Raise InputError for a split without classes; only that of tests may have none."""
    if side.loose and role != TEST:
        raise InputError(
            f"{side.folder}/ has no class folders: put its {len(side.loose):,} images in "
            f"{side.folder}/<class>/, {use_a_table(names)}, or set layout=classes if it is a class"
        )
    if role == VAL:
        raise InputError(
            f"{side.folder}/ has {no_images(names, f'{side.folder}/')}: fill it, or remove it to "
            "choose validation images by name"
        )


def use_a_table(names: Iterable[str], folder: str = "") -> str:
    """Advise a table of labels in place of class folders, with such files, of a folder first."""
    advice = "set labels to the name of a CSV of path,label in the dataset"
    tables = likely_tables(names)
    if not tables:
        return advice
    tables.sort(key=lambda name: not name.startswith(folder))
    first = tables[0].rpartition("/")[2]
    alike = ",".join(name for name in tables if name.rpartition("/")[2] == first)
    if first.lower().endswith(_OF_PROGRAMS):
        return f"{advice}: export {alike} as CSV"
    return f"{advice}, such as {alike}"


def _is_table(name: str) -> bool:
    return name.lower().endswith(_TABLES) and not is_ignored(name)


def tables_in(names: Iterable[str]) -> list[str]:
    """Return the names of files that are tables, perhaps of labels, those for training first."""
    tables = filter(_is_table, names)
    return sorted(tables, key=lambda name: (name.count("/"), role_in(name) != TRAIN, name))


def likely_tables(names: Iterable[str]) -> list[str]:
    """Return `tables_in`, else other files that may be tables of labels, those of text first."""
    names = list(names)
    others = [name for name in filter(_PERHAPS.search, names) if not is_ignored(name)]
    others.sort(key=lambda name: (name.lower().endswith(_OF_PROGRAMS), name.count("/"), name))
    return tables_in(names) or others
