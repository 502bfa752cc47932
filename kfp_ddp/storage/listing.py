"""The listing of a source: names, sizes and checksums in columns, their digest, and filters."""

import hashlib
import itertools
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_BATCH = 4096


@dataclass
class Listing:
    """Objects of one source, sorted by name; columns, so that a million fit in 150 MB.

    `names` are relative to the source's prefix and, after the name policy, to the target.
    `crcs` are crc32c values; `tags` replaces them (ETags) where a store lists no crc32c, and
    is empty otherwise. `generations` pin the content of a download, 0 for stores without.
    `origins` maps a target name back to the object's own name where the two differ.
    """

    names: list[str] = field(default_factory=list)
    sizes: "array[int]" = field(default_factory=lambda: array("Q"))
    crcs: "array[int]" = field(default_factory=lambda: array("I"))
    generations: "array[int]" = field(default_factory=lambda: array("Q"))
    tags: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

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

    def origin(self, index: int) -> str:
        """Return the object's name in the source, relative to its prefix."""
        name = self.names[index]
        return self.origins.get(name, name) if self.origins else name

    def token(self, index: int) -> str:
        """Return what identifies the content in the digest: crc32c in hex, or ETag."""
        return self.tags[index] if self.tags else f"{self.crcs[index]:08x}"

    def take(self, indices: Sequence[int]) -> "Listing":
        """Return a listing of these objects, in this order."""
        return Listing(
            [self.names[i] for i in indices],
            array("Q", [self.sizes[i] for i in indices]),
            array("I", [self.crcs[i] for i in indices]),
            array("Q", [self.generations[i] for i in indices]),
            [self.tags[i] for i in indices] if self.tags else [],
            self.origins,
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

    @property
    def bytes(self) -> int:
        """Sum of the sizes."""
        return sum(self.sizes)


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
        self._wanted, self._unwanted = _pattern(include), _pattern(exclude)
        whole = [glob[:-3] for glob in map(_stripped, exclude) if glob.endswith("/**")]
        self._closed = _pattern(f"/{folder.removeprefix('/')}" for folder in whole)

    def selects(self, name: str) -> bool:
        """Return whether an object of this name is selected."""
        return (self._wanted is None or self._wanted.fullmatch(name) is not None) and (
            self._unwanted is None or self._unwanted.fullmatch(name) is None
        )

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
    start, parts = "" if "/" in glob else "(?:.*/)?", _PARTS.finditer(glob.removeprefix("/"))
    return start + "".join(_WILD.get(part[0]) or re.escape(part[1] or part[0]) for part in parts)
