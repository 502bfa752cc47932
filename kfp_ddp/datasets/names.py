"""Check and encode object names, which may be hostile, before they become files."""

import contextlib
import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import folder_below
from kfp_ddp.pictures.reading import is_needless
from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Filter, Listing, folders_of

MARKERS = (manifest.SUCCESS, manifest.NAME)
"""Files of Spark, Beam and our own versions beside the data; every version has its own."""
RESERVED = frozenset({".kfsync", *MARKERS})
SEGMENT_BYTES = 255
PATH_BYTES = 4000
_SHOWN = 5
_PROBE = ".kfsync-probe-%s\u00e9a"
_LOOKALIKES = (".kfsync-probe-%se\u0301a", ".kfsync-probe-%s\u00e9A")
_SAFE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")
_SEGMENT = "[A-Za-z0-9_][A-Za-z0-9_. -]{0,200}"
_PLAIN = re.compile(f"{_SEGMENT}(?:/{_SEGMENT}){{0,15}}")


@dataclass
class Names:
    """The listing with valid file names, and the objects that were skipped."""

    listing: Listing
    skipped: list[tuple[str, str]] = field(default_factory=list)
    encoded: dict[str, str] = field(default_factory=dict)


def apply(listing: Listing, policy: str, folds: bool = False, exclude: Sequence[str] = ()) -> Names:
    """Check every name, and skip or encode invalid ones by the policy: "error", "skip" or "encode".

    `folds` is of `folds_names`; `exclude` has globs of encoded names: later steps know no others.
    """
    listing = listing.sorted()  # encoded names must not depend on the source's order
    bad = _bad_names(listing, folds)
    if not bad:
        return Names(listing)
    if policy == "error":
        needed = {at: why for at, why in bad.items() if not _is_left_out(listing.names[at])}
        if needed:
            raise InputError(_refusal(listing, needed))
    if policy != "encode":
        return _skip(listing, bad)
    encoded = _encode(listing, bad, folds)
    encoded.listing = Filter((), exclude).select(encoded.listing)
    return encoded


def _bad_names(listing: Listing, folds: bool) -> dict[int, str]:
    """Return why names cannot be files, or not beside the others, by the index of the object."""
    bad: dict[int, str] = {}
    sized = zip(listing.names, listing.sizes, strict=True)
    for index, (name, size) in enumerate(sized):
        why = _unusable(name, size, folds)
        if why:
            bad[index] = why
    # The folders of a bad name take no path from a good one.
    valid = (name for index, name in enumerate(listing.names) if index not in bad)
    taken = _Taken(folds, valid)
    for index, name in enumerate(listing.names):
        if index in bad:
            continue
        why = taken.conflict(name)
        if why:
            bad[index] = why
        else:
            taken.add_file(name)
    return bad


def _is_left_out(name: str) -> bool:
    """Return whether a name with characters of no file's name is of a file that no step reads."""
    return is_needless(name) and _SAFE.sub("", name) != ""


def _refusal(listing: Listing, bad: dict[int, str]) -> str:
    """Return the message about bad names, with the first of them."""
    first = sorted(bad)[:_SHOWN]
    shown = [f"{listing.names[index]!r} ({bad[index]})" for index in first]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (
        f"{len(bad)} object names cannot be files: {'; '.join(shown)}{more}; rename them in the "
        "bucket, or set hostile_names to skip or encode"
    )


def _skip(listing: Listing, bad: dict[int, str]) -> Names:
    """Leave out the bad names, and note each with its reason."""
    good = [index for index in range(len(listing)) if index not in bad]
    skipped = [(listing.names[index], bad[index]) for index in sorted(bad)]
    return Names(listing.take(good), skipped)


def without_markers(listing: Listing) -> tuple[Listing, list[tuple[str, str]]]:
    """Return the listing without the markers at its top, and the markers with the reason."""
    markers = [name for name in MARKERS if name in listing.names]
    if not markers:
        return listing, []
    data = [index for index, name in enumerate(listing.names) if name not in markers]
    reason = "marks its writer's work as done, and is not data"
    skipped = [(name, reason) for name in markers]
    return listing.take(data), skipped


def reason_invalid(name: str, size: int = 0) -> str:
    """Return why this name cannot be a file of a dataset; '' if it can."""
    if _PLAIN.fullmatch(name) and not name.startswith("_"):
        return ""
    first = name.partition("/")[0]
    if first in RESERVED:
        return f"{first} is reserved"
    return reason_unsafe(name, size)


def reason_unsafe(name: str, size: int = 0) -> str:
    """Return why this name cannot be a file; '' if it can. A trailing slash names a folder."""
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
    if any(segment in ("", ".", "..") for segment in segments):
        return "segment that is empty, . or .."
    if any(len(segment.encode()) > SEGMENT_BYTES for segment in segments):
        return f"segment longer than {SEGMENT_BYTES} bytes"
    if len(name.encode()) > PATH_BYTES:
        return f"path longer than {PATH_BYTES} bytes"
    return ""


def folds_names(folder: Path, probe: bool = True) -> bool:
    """Return whether the file system of `folder` treats `a` and `A`, or two forms of é, as one.

    Looks at the probe of an earlier run, else creates one for a moment if `probe` allows it.
    """
    with contextlib.suppress(OSError), folder_below(folder, ".kfsync") as work:
        if _exists(_PROBE % "", work):
            return _folds(work, "")
    if not probe:
        return False
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    with contextlib.suppress(OSError), folder_below(folder) as nearest:
        number = os.urandom(8).hex()  # a name that no other program uses
        _touch(_PROBE % number, nearest)
        try:
            return _folds(nearest, number)
        finally:
            os.unlink(_PROBE % number, dir_fd=nearest)
    return False


def leave_probe(root: Path) -> None:
    """Leave a probe in the work area for runs that may write nothing; raise OSError."""
    with folder_below(root, ".kfsync") as work, contextlib.suppress(FileExistsError):
        _touch(_PROBE % "", work)


def _touch(name: str, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(name, flags, 0o644, dir_fd=folder))


def _exists(name: str, folder: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        return True
    return False


def _folds(folder: int, number: str) -> bool:
    return any(_exists(name % number, folder) for name in _LOOKALIKES)


def _unusable(name: str, size: int, folds: bool) -> str:
    """Return why the name is invalid on this file system; '' if it is valid."""
    why = reason_invalid(name, size)
    if why:
        return why
    first = name.partition("/")[0]
    if folds and fold(first) in _FOLDED_RESERVED:
        return "reserved on this file system"
    return ""


def fold(name: str) -> str:
    """Return the form in which folding file systems compare names."""
    return unicodedata.normalize("NFC", name).casefold()


_FOLDED_RESERVED = frozenset(map(fold, RESERVED))


class _Taken:
    """Files and folders in use, by the form in which the file system compares their names."""

    def __init__(self, folds: bool, folders: Iterable[str], files: Iterable[str] = ()) -> None:
        self._folds = folds
        self._form: Callable[[str], str] = fold if folds else str
        self._files = set(map(self._form, files))
        self._folders: dict[str, str] = {}
        self._add_folders(folders)

    def _add_folders(self, names: Iterable[str]) -> None:
        """Add the folders of these names; the first spelling of a folder counts."""
        for folder in sorted(folders_of(names)):
            self._folders.setdefault(self._form(folder), folder)

    def add_file(self, name: str) -> None:
        self._files.add(self._form(name))

    def conflict(self, name: str) -> str:
        """Return why the name shares a path with another one; '' if it does not."""
        key = self._form(name)
        folder = self._folders.get(key)
        if folder == name:
            return "also a folder of other objects"
        if key in self._files:
            if self._folds:
                return "same file as another name on this file system"
            return "duplicate"
        if not self._folds:
            return ""
        if folder or self._respells_folder(name):
            return "same folder as another name on this file system"
        return ""

    def _respells_folder(self, name: str) -> bool:
        """Return whether a folder of the name is in use by another spelling."""
        inside = folders_of([name])
        return any(self._folders.get(self._form(folder), folder) != folder for folder in inside)

    def accept(self, name: str) -> bool:
        """Add a name if it can be a file beside the others; return whether it can."""
        if _unusable(name, 0, self._folds) or self.conflict(name):
            return False
        if not self._files.isdisjoint(folders_of([self._form(name)])):
            return False
        self._add_folders([name])
        self.add_file(name)
        return True


def _encode(listing: Listing, bad: dict[int, str], folds: bool) -> Names:
    """Give each bad object a safe, unique name; manifest and report have both names."""
    names = list(listing.names)
    origins = dict(listing.origins)
    valid = [name for index, name in enumerate(names) if index not in bad]
    taken = _Taken(folds, valid, valid)
    encoded = {}
    for index in sorted(bad):
        name = names[index]
        target = next(filter(taken.accept, _candidates(name)))
        names[index] = target
        origins[target] = name
        encoded[name] = target
    result = replace(listing, names=names, origins=origins)
    return Names(result.sorted(), [], encoded)


def _candidates(name: str) -> Iterator[str]:
    """Yield replacements for an invalid name, the most readable first, endlessly."""
    target = _percent(name)
    digest = hashlib.sha256(_raw(name)).hexdigest()
    yield target
    yield f"{target[:200]}%{digest[:16]}"
    while True:
        yield f"%{digest}"
        digest = hashlib.sha256(digest.encode()).hexdigest()


def _percent(name: str) -> str:
    """Percent-encode control characters, dot segments and empty segments."""
    segments = list(map(_percent_segment, name.split("/")))
    first = segments[0]
    if first in RESERVED:
        segments[0] = f"%{first}"
    return "/".join(segments)


def _percent_segment(segment: str) -> str:
    if segment == "":
        return "%"
    if segment in (".", ".."):
        return "%2E" * len(segment)
    return "".join(map(_percent_character, segment))


def _percent_character(character: str) -> str:
    if _SAFE.fullmatch(character):
        return character
    return quote(_raw(character), safe="")


def _raw(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a pair, which no bytes stand for
        return text.encode("utf-8", "surrogatepass")
