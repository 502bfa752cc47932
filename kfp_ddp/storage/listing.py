"""The listing of a source: names, sizes and checksums in columns, their digest, and filters.

The token of an object identifies its content by what its store vouches for: `sha256-HEX` or
`md5-HEX`, else an ETag or a generation. crc32c protects from damage alone, as four bytes give any
value of it; as eight hex digits it is the token only where the store lists nothing else.
"""

import hashlib
import itertools
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c

_BATCH = 4096
_HASH = re.compile("sha256-[0-9a-f]{64}|md5-[0-9a-f]{32}")
_CRC = re.compile("[0-9a-f]{8}")
_CRC_DIGITS = 8
EMPTY = f"sha256-{hashlib.sha256().hexdigest()}"
"""Token of no bytes."""


@dataclass
class Listing:
    """Objects of one source, sorted by name; columns, so that a million fit in 300 MB.

    `names` are relative to the source's prefix and, after the name policy, to the target.
    `crcs` are crc32c values, before a download only where the store `lists_crc`. `tags` are the
    tokens; they are empty where all are crc32c. `generations` pin the content of a download, 0 for
    stores without. `origins` maps a target name back to the object's own name where the two differ.
    """

    names: list[str] = field(default_factory=list)
    sizes: "array[int]" = field(default_factory=lambda: array("Q"))
    crcs: "array[int]" = field(default_factory=lambda: array("I"))
    generations: "array[int]" = field(default_factory=lambda: array("Q"))
    tags: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    lists_crc: bool = True
    sized: bool = True
    """Whether sizes are known, and not averages."""

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, size: int, crc: int, generation: int = 0, tag: str = "") -> None:
        """Append one object; sizes in bytes."""
        self.names.append(name)
        self.sizes.append(size)
        self.crcs.append(crc)
        self.generations.append(generation)
        if tag:
            self.tags.append(tag)

    def extend(self, other: "Listing") -> None:
        """Append the objects of another listing."""
        self.names += other.names
        self.sizes += other.sizes
        self.crcs += other.crcs
        self.generations += other.generations
        self.tags += other.tags

    def origin(self, index: int) -> str:
        """Return the object's name in the source, relative to its prefix."""
        name = self.names[index]
        return self.origins.get(name, name) if self.origins else name

    def token(self, index: int) -> str:
        """Return what identifies the content in the digest."""
        return self.tags[index] if self.tags else f"{self.crcs[index]:08x}"

    @property
    def weak(self) -> int:
        """Number of the objects that only a crc32c identifies."""
        return sum(map(is_crc, self.tags)) if self.tags else len(self)

    def take(self, indices: Sequence[int]) -> "Listing":
        """Return a listing of these objects, in this order."""
        return replace(
            self,
            names=[self.names[i] for i in indices],
            sizes=array("Q", [self.sizes[i] for i in indices]),
            crcs=array("I", [self.crcs[i] for i in indices]),
            generations=array("Q", [self.generations[i] for i in indices]),
            tags=[self.tags[i] for i in indices] if self.tags else [],
        )

    def sorted(self) -> "Listing":
        """Return this listing in the order of its names (code points, as in UTF-8)."""
        if all(a <= b for a, b in itertools.pairwise(self.names)):
            return self
        return self.take(sorted(range(len(self)), key=self.names.__getitem__))

    def digest(self, layout: str = "") -> str:
        """Return the SHA-256 of the sorted (name, size, content); `layout` is one of archives."""
        state = hashlib.sha256()
        rows = zip(self.names, self.sizes, self.tags or self.crcs, strict=True)
        form = "%s\0%d\0%s\n" if self.tags else "%s\0%d\0%08x\n"
        while batch := list(itertools.islice(rows, _BATCH)):
            text = "".join([form % row for row in batch])
            state.update(text.encode("utf-8", "surrogateescape"))
        if layout:
            state.update(f"\0{layout}".encode())
        return state.hexdigest()

    def crc_digest(self, layout: str = "") -> str:
        """Return the digest of earlier releases, with crc32c alone where the store lists it."""
        listing = replace(self, tags=[]) if self.lists_crc else self
        return listing.digest(layout)

    @property
    def bytes(self) -> int:
        """Sum of the sizes."""
        return sum(self.sizes)


def new_hash(token: str) -> Any:
    """Return a new hash of hashlib for a token that is one of the content, else None."""
    if not _HASH.fullmatch(token):
        return None
    return hashlib.new(token.partition("-")[0], usedforsecurity=False)


def content_hash(token: str) -> Any:
    """Return `new_hash`, or one of crc32c for another token."""
    return new_hash(token) or google_crc32c.Checksum()  # type: ignore[no-untyped-call]


def expected_digest(token: str, crc: int) -> bytes:
    """Return what the digest of `content_hash` must be; `crc` is of the content."""
    if new_hash(token) is None:
        return crc.to_bytes(4, "big")
    return bytes.fromhex(token.partition("-")[2])


def token_of(state: Any) -> str:
    """Return the token of what a hash of `new_hash` was updated with."""
    return f"{state.name}-{state.hexdigest()}"


def is_crc(token: str) -> bool:
    """Return whether a token is a crc32c alone."""
    return len(token) == _CRC_DIGITS and _CRC.fullmatch(token) is not None


def weakness(url: str, listing: Listing) -> str:
    """Return a line for objects that only a crc32c identifies."""
    return (
        f"{url} lists nothing but crc32c for {listing.weak:,} objects: one that is replaced by "
        "another of the same size, made to have the same crc32c, counts as unchanged"
    )


def folders_of(names: Iterable[str]) -> set[str]:
    """Return the folders of these names; a name with a slash at its end is a folder."""
    folders: set[str] = set()
    for name in names:
        parent = name.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
    return folders


_PARTS = re.compile(r"\\([*?\s])|\*\*/?|[*?]|.", re.DOTALL)
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class Filter:
    """The names that match any of `include` (or all, when empty) and none of `exclude`.

    `*` and `?` stop at a slash, `**` does not, and a backslash makes them, and blanks, plain; a
    pattern without a slash matches the last segment of the name, as in rclone and gitignore.
    """

    def __init__(self, include: Iterable[str] = (), exclude: Sequence[str] = ()) -> None:
        self._wanted = _pattern(include)
        self._unwanted = _pattern(exclude)
        folders = [glob[:-3] for glob in map(_stripped, exclude) if glob.endswith("/**")]
        # With a slash at its start a glob matches the complete path, not the last segment.
        self._closed = _pattern(f"/{folder.removeprefix('/')}" for folder in folders)

    def selects(self, name: str) -> bool:
        """Return whether an object of this name is selected."""
        if self._wanted is not None and self._wanted.fullmatch(name) is None:
            return False
        return self._unwanted is None or self._unwanted.fullmatch(name) is None

    def excludes_folder(self, folder: str) -> bool:
        """Return whether a pattern such as `x/**` excludes everything below a folder."""
        return self._closed is not None and self._closed.fullmatch(folder) is not None

    def select(self, listing: Listing) -> Listing:
        """Return the selected objects."""
        if self._wanted is None and self._unwanted is None:
            return listing
        return listing.take([i for i, name in enumerate(listing.names) if self.selects(name)])


def _stripped(glob: str) -> str:
    """Return a glob without the blanks around it, except those after a backslash."""
    return re.sub(r"(?<!\\)\s+\Z", "", glob.lstrip())


def _pattern(globs: Iterable[str]) -> re.Pattern[str] | None:
    parts = [_translate(glob) for glob in map(_stripped, globs) if glob]
    return re.compile("|".join(parts), re.DOTALL) if parts else None


def _translate(glob: str) -> str:
    """Return a glob as a regular expression of the complete relative name."""
    start = "" if "/" in glob else "(?:.*/)?"
    parts = _PARTS.finditer(glob.removeprefix("/"))
    return start + "".join(map(_expression, parts))


def _expression(part: re.Match[str]) -> str:
    escaped = part[1]  # what follows a backslash
    return _WILD.get(part[0]) or re.escape(escaped or part[0])
