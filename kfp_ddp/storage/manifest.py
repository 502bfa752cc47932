"""The manifest of a version in its folder: read, and compared with a listing."""

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kfp_ddp.core.files import open_below
from kfp_ddp.core.version import NAME, ManifestRow, read_header, read_rows
from kfp_ddp.storage.listing import Listing, is_crc, new_hash

__all__ = ["NAME", "SUCCESS", "Changes", "ManifestRow", "compare", "dataset", "header", "rows"]

SUCCESS = "_SUCCESS"


@dataclass
class Changes:
    """How a listing differs from the version before; indices are into the listing."""

    same: list[int] = field(default_factory=list)
    mtimes: "array[int]" = field(default_factory=lambda: array("q"))
    """The mtime on disk of each file of `same`; likewise the next three. -1: of an earlier release,
    which recorded a crc32c alone, so the file must be read."""
    crcs: "array[int]" = field(default_factory=lambda: array("I"))
    packs: list[str] = field(default_factory=list)
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    added: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def header(path: Path) -> dict[str, Any]:
    """Return the first line of a manifest; {} where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError), _opened(path) as file:
        return read_header(file)
    return {}


def dataset(version: Path) -> str:
    """Return the name of a version's dataset; '' where its manifest cannot be read."""
    return str(header(version / NAME).get("dataset", ""))


def rows(path: Path) -> Iterator[ManifestRow]:
    """Yield the files of a manifest up to a damaged line; none if it is missing."""
    try:
        file = _opened(path)
    except OSError:
        return
    with file, contextlib.suppress(ValueError):
        yield from read_rows(file)


def _opened(path: Path) -> BinaryIO:
    """Open a manifest; neither it nor its folder may be a link."""
    folder = path.parent
    return open_below(folder.parent, f"{folder.name}/{path.name}")


def may_equal(row: ManifestRow, listing: Listing, index: int) -> bool:
    """Return whether the row has the crc32c alone, and the listing a hash to compare the file."""
    same = row.crc == listing.crcs[index] and is_crc(row.token)
    return same and new_hash(listing.token(index)) is not None


def compare(listing: Listing, before: Iterator[ManifestRow]) -> Changes:
    """Compare the sorted listing with the sorted rows of the previous version."""
    changes = Changes()
    row = next(before, None)
    for index, name in enumerate(listing.names):
        while row is not None and row.name < name:
            changes.removed.append(row.name)
            row = next(before, None)
        if row is None or row.name != name:
            changes.added.append(index)
            continue
        # A version from a store without crc32c has them by now, as of every download.
        equal = row.token == listing.tags[index] if listing.tags else row.crc == listing.crcs[index]
        unsure = not equal and may_equal(row, listing, index)
        if (equal or unsure) and row.size == listing.sizes[index]:
            changes.same.append(index)
            changes.mtimes.append(-1 if unsure else row.mtime_ns)
            changes.crcs.append(row.crc)
            changes.packs.append(row.pack)
            changes.offsets.append(row.offset)
        else:
            changes.changed.append(index)
        row = next(before, None)
    if row is not None:
        changes.removed.append(row.name)
        changes.removed.extend(rest.name for rest in before)
    return changes
