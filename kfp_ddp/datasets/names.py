"""Which object names become files: names from a bucket are hostile until proven."""

import contextlib
import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import folder_below
from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Listing, folders_of

MARKERS = (manifest.SUCCESS, manifest.NAME)
"""What Spark, Beam and our own versions leave beside the data; every version gets its own."""
RESERVED = frozenset({".kfsync", *MARKERS})
SEGMENT_BYTES = 255
PATH_BYTES = 4000
_PROBE = ".kfsync-probe-%s\u00e9a"
_LOOKALIKES = (".kfsync-probe-%se\u0301a", ".kfsync-probe-%s\u00e9A")
_SAFE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")
_SEGMENT = "[A-Za-z0-9_][A-Za-z0-9_. -]{0,200}"
_PLAIN = re.compile(f"{_SEGMENT}(?:/{_SEGMENT}){{0,15}}")


@dataclass
class Names:
    """The listing under the names of its files, and the objects that were left out."""

    listing: Listing
    skipped: list[tuple[str, str]] = field(default_factory=list)
    encoded: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """What the source no longer has and the version before does, where nothing is deleted."""
    folds: bool = False
    """Whether the target's file system holds look-alikes as one; see `folds_names`."""


def apply(listing: Listing, policy: str, folds: bool = False) -> Names:
    """Judge every name before a byte is written.

    `folds` means that the target's file system treats names that differ by case or by Unicode
    normalisation as one.

    Raises:
        InputError: under the policy "error", when any name cannot be a file.
    """
    listing = listing.sorted()  # so that what is encoded does not depend on the source's order
    bad = dict(_unusable(listing))
    _conflicts(listing, bad, folds)
    if not bad:
        return Names(listing, folds=folds)
    if policy == "error":
        shown = "; ".join(f"{listing.names[i]!r} ({bad[i]})" for i in sorted(bad)[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise InputError(
            f"{len(bad)} object names cannot be files: {shown}{more}; rename them in the bucket, "
            f"or set hostile_names to skip or encode"
        )
    if policy == "skip":
        selected = listing.take([i for i in range(len(listing)) if i not in bad])
        return Names(selected, [(listing.names[i], bad[i]) for i in sorted(bad)], folds=folds)
    return _encode(listing, bad, folds)


def without_markers(listing: Listing) -> tuple[Listing, list[tuple[str, str]]]:
    """The listing without the markers at its top, and those, each with the reason."""
    markers = [name for name in MARKERS if name in listing.names]
    if not markers:
        return listing, []
    selected = listing.take([i for i, name in enumerate(listing.names) if name not in markers])
    return selected, [
        (name, "marks its writer's work as done, and is not data") for name in markers
    ]


def judge(name: str, size: int = 0) -> str:
    """Why this name cannot be a file, or '' when it can. A trailing slash names a folder."""
    if _PLAIN.fullmatch(name) and not name.startswith("_"):
        return ""
    if not name:
        return "empty name"
    if name.startswith("/"):
        return "starts with /"
    if name.endswith("/"):
        if size:
            return "folder marker with content"
        name = name[:-1]
    if not _SAFE.fullmatch(name):
        return "control character, change of the writing direction or invalid text"
    segments = name.split("/")
    if segments[0] in RESERVED:
        return f"{segments[0]} is reserved"
    if any(segment in ("", ".", "..") for segment in segments):
        return "segment that is empty, . or .."
    if any(len(segment.encode()) > SEGMENT_BYTES for segment in segments):
        return f"segment longer than {SEGMENT_BYTES} bytes"
    if len(name.encode()) > PATH_BYTES:
        return f"path longer than {PATH_BYTES} bytes"
    return ""


def folds_names(folder: Path, probe: bool = True) -> bool:
    """Whether the file system of `folder` holds `a` and `A`, or é in two forms, as one.

    Looks at the probe that an earlier run left in the work area, or makes one for a moment in
    the nearest folder that exists if `probe` allows it; False where that cannot be written, as
    nothing will be then.
    """
    try:
        with folder_below(folder, ".kfsync") as work:
            if _there(_PROBE % "", work):
                return _folds(work, "")
    except OSError:
        pass
    if not probe:
        return False
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with folder_below(folder) as nearest:
            number = os.urandom(8).hex()  # a name that no other program uses
            _touch(_PROBE % number, nearest)
            try:
                return _folds(nearest, number)
            finally:
                os.unlink(_PROBE % number, dir_fd=nearest)
    except OSError:
        return False


def leave_probe(root: Path) -> None:
    """Leave a probe in the work area for runs that may write nothing; raises OSError."""
    with folder_below(root, ".kfsync") as work, contextlib.suppress(FileExistsError):
        _touch(_PROBE % "", work)


def _touch(name: str, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(name, flags, 0o644, dir_fd=folder))


def _there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _folds(folder: int, number: str) -> bool:
    return any(_there(name % number, folder) for name in _LOOKALIKES)


def fitting(names: Iterable[str], listing: Listing, folds: bool = False) -> set[str]:
    """Return the names that can be files beside those of a listing, without conflicts.

    `folds` is as for `apply`.
    """
    taken = _Taken(folds)
    taken.add(*listing.names)
    accepted = set()
    for name in sorted(names):
        if taken.leaves(name):
            taken.add(name)
            accepted.add(name)
    return accepted


def _unusable(listing: Listing) -> Iterator[tuple[int, str]]:
    for index, name in enumerate(listing.names):
        if reason := judge(name, listing.sizes[index]):
            yield index, reason


def _conflicts(listing: Listing, bad: dict[int, str], folds: bool) -> None:
    """Add names that would share a path: a file and a folder, and under folding, look-alikes."""
    ours = {fold(name) for name in RESERVED} if folds else set()
    for index, name in enumerate(listing.names):
        if index not in bad and ours and fold(name.partition("/")[0]) in ours:
            bad[index] = "reserved on this file system"
    folders = folders_of(name for index, name in enumerate(listing.names) if index not in bad)
    seen: set[str] = set()
    for index, name in enumerate(listing.names):
        if index in bad:
            continue
        if name in folders:
            bad[index] = "also a folder of other objects"
        elif (key := fold(name) if folds else name) in seen:
            bad[index] = "same file as another name on this file system" if folds else "duplicate"
        else:
            seen.add(key)
    if folds:
        _folded_folders(listing, folders, bad)


def _folded_folders(listing: Listing, folders: set[str], bad: dict[int, str]) -> None:
    first: dict[str, str] = {}
    for folder in sorted(folders):
        first.setdefault(fold(folder), folder)
    clash = {folder for folder in folders if first[fold(folder)] != folder}
    for index, name in enumerate(listing.names):
        if index in bad:
            continue
        if not clash.isdisjoint(folders_of([name])) or fold(name) in first:
            bad[index] = "same folder as another name on this file system"


def fold(name: str) -> str:
    """The form under which folding file systems compare names."""
    return unicodedata.normalize("NFC", name).casefold()


class _Taken:
    """Existing files and folders, and which names fit beside them."""

    def __init__(self, folds: bool) -> None:
        self._form: Callable[[str], str] = fold if folds else str
        self._ours = {self._form(name) for name in RESERVED}
        self._files: set[str] = set()
        self._folders: dict[str, str] = {}  # by the form in which they are compared

    def add(self, *names: str) -> None:
        """Files, and markers of folders: all at once, which looks at each folder once."""
        self._folders.update(self._within(*names))
        self._files.update(self._form(name) for name in names if not name.endswith("/"))

    def leaves(self, name: str) -> bool:
        """Whether the name can be a file, at a path of its own."""
        key = self._form(name)
        return (
            not judge(name)
            and key.partition("/")[0] not in self._ours
            and key not in self._files
            and key not in self._folders
            and self._files.isdisjoint(folders_of([key]))
            and all(self._folders.get(k, p) == p for k, p in self._within(name))
        )

    def _within(self, *names: str) -> list[tuple[str, str]]:
        return [(self._form(parent), parent) for parent in folders_of(names)]


def _encode(listing: Listing, bad: dict[int, str], folds: bool) -> Names:
    """Give each bad object a safe name of its own; manifest and report hold both names."""
    names, origins = list(listing.names), dict(listing.origins)
    taken = _Taken(folds)
    taken.add(*(name for index, name in enumerate(names) if index not in bad))
    encoded = {}
    for index in sorted(bad):
        name = names[index]
        target = next(filter(taken.leaves, _candidates(name)))
        taken.add(target)
        names[index], origins[target], encoded[name] = target, name, target
    result = Listing(names, listing.sizes, listing.crcs, listing.generations, listing.tags, origins)
    return Names(result.sorted(), [], encoded, folds=folds)


def _candidates(name: str) -> Iterator[str]:
    """Yield replacements for an invalid name, the most readable first, endlessly."""
    target, digest = _percent(name), hashlib.sha256(_raw(name)).hexdigest()
    yield target
    yield f"{target[:200]}%{digest[:16]}"
    while True:
        yield f"%{digest}"
        digest = hashlib.sha256(digest.encode()).hexdigest()


def _percent(name: str) -> str:
    """Percent-encode what cannot stand: control characters, dot segments, empty segments."""
    segments = []
    for segment in name.split("/"):
        if segment in ("", ".", ".."):
            segments.append("%2E" * len(segment) or "%")
        else:
            segments.append(
                "".join(c if _SAFE.fullmatch(c) else quote(_raw(c), safe="") for c in segment)
            )
    if segments[0] in RESERVED:
        segments[0] = f"%{segments[0]}"
    return "/".join(segments)


def _raw(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a pair, which no bytes stand for
        return text.encode("utf-8", "surrogatepass")
