"""The manifest of a dataset version: after a header, a line of JSON for each file, by name."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kfp_ddp.core.text import from_json

NAME = "_MANIFEST.jsonl"
_LINE = 1 << 17
"""No line of ours has more bytes: two names of a thousand characters, each escaped."""
_KINDS = [str, int, str, int, int, str, str, int]


class ManifestRow(NamedTuple):
    """One file: size in bytes, content token of the listing, crc32c, and its mtime on disk."""

    name: str
    size: int
    token: str
    crc: int
    mtime_ns: int
    origin: str
    pack: str = ""
    offset: int = 0
    """In a packed version: the archive, and where in it the bytes start."""


def pinned(data: Path) -> Path:
    """Return the version that `current` leads to now, as a sync may change it; else the folder."""
    if not data.is_symlink():
        return data
    target = os.readlink(data)
    if not target.startswith("versions/"):
        return data
    return data.parent / target


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Return the first line of a manifest; raise ValueError if it is damaged."""
    first = from_json(file.readline(_LINE))
    return first if isinstance(first, dict) else {}


def read_rows(file: BinaryIO) -> Iterator[ManifestRow]:
    """Yield the files in the lines after the header; raise ValueError naming a damaged line."""
    file.readline(_LINE)
    for number, line in enumerate(iter(lambda: file.readline(_LINE), b""), 2):
        try:
            name, size, token, crc, mtime, *rest = json.loads(line)
            origin = rest or (name,)  # in a packed version with archive and offset
            row = ManifestRow(name, size, token, int(crc, 16), mtime, *origin)
        except (ValueError, TypeError, RecursionError):
            row = None
        if row is None or not _possible(row):
            raise ValueError(f"line {number}")
        yield row


def _possible(row: ManifestRow) -> bool:
    """Return whether these are valid columns of a file."""
    kinds = [type(column) for column in row]
    if kinds != _KINDS or not 0 <= row.crc < 1 << 32:
        return False
    smallest = min(row.size, row.offset)
    largest = max(row.size, row.offset, abs(row.mtime_ns))
    return smallest >= 0 and largest < 1 << 63
