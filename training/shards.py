"""Packed versions: the archive and the bytes of each image, and reading ahead; free of torch."""

import contextlib
import functools
import json
import os
import tarfile
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import folder_below, open_below, open_plain

MANIFEST = "_MANIFEST.jsonl"
HEADER = 512
"""Bytes of the header before a member, or of its last block."""
_SHORT = 98
"""Fewer bytes of a name, with `./` before them, fit into a header."""
_LINE = 1 << 17
_LAST = (1 << 63) - 1
_OPEN = 256
"""Archives that a process keeps open."""


class Where(NamedTuple):
    """Where an image's bytes are: in a file of its own, or as a member of an archive."""

    file: str
    offset: int = 0
    size: int = -1
    """-1 for all of the file."""
    name: str = ""
    """Of the member."""

    def __str__(self) -> str:
        return f"{self.name} in {self.file}" if self.name else self.file


class Slices(NamedTuple):
    """Where members lie, one entry a member: compact, as there are millions."""

    root: str
    """The version's folder, with which paths begin."""
    files: tuple[str, ...]
    shards: "array[int]"
    """Positions in `files`."""
    offsets: "array[int]"
    sizes: "array[int]"

    def only(self, positions: Sequence[int]) -> "Slices":
        """Those of the members at these positions alone."""
        columns = (self.shards, self.offsets, self.sizes)
        chosen = [array(one.typecode, (one[at] for at in positions)) for one in columns]
        return Slices(self.root, self.files, *chosen)

    def where(self, position: int, path: str) -> Where:
        """The bytes of the member at a position, whose path is `<root>/<its name>`."""
        file, name = self.files[self.shards[position]], path.removeprefix(f"{self.root}/")
        return Where(file, self.offsets[position], self.sizes[position], name)


class Members(NamedTuple):
    """What a packed version holds: names relative to its folder, and where each is."""

    names: tuple[str, ...]
    slices: Slices


def members(root: Path) -> Members | None:
    """The files in the archives of a folder; None for a folder of plain files.

    A version's manifest tells; without one, archives (*.tar) that have no folder beside them.

    Raises:
        InputError: an archive or the manifest is damaged, or does not hold what it should.
    """
    rows = _from_manifest(root) if _is_version(root) else _from_archives(root)
    if rows is None:
        return None
    names: list[str] = []
    numbers: dict[str, int] = {}
    sizes: list[int] = []
    home = os.path.realpath(root)
    slices = Slices(str(root), (), array("I"), array("Q"), array("Q"))
    for name, shard, offset, size in rows:
        if shard not in numbers:
            numbers[shard] = len(sizes)
            sizes.append(_size(root, shard))
        number = numbers[shard]
        if offset < HEADER or offset + size > sizes[number]:
            raise InputError(
                f"{name} is to end at byte {offset + size} of {root / shard}, which has "
                f"{sizes[number]}: the archive is cut off; sync again with verify=full"
            )
        names.append(name)
        slices.shards.append(number)
        slices.offsets.append(offset)
        slices.sizes.append(size)
    return Members(tuple(names), slices._replace(files=tuple(f"{home}/{one}" for one in numbers)))


def content(where: Where, most: int) -> bytes:
    """The bytes of an image; a member's are read at once with the header before them.

    Raises:
        OSError: the file cannot be read.
        ValueError: there are more than `most`, or they are not what the archive's listing says.
    """
    if where.size < 0:
        with open(where.file, "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise ValueError("a larger file than any image of max_pixels")
            return file.read()
    if where.size > most:
        raise ValueError("a larger file than any image of max_pixels")
    length = HEADER + where.size
    found = pread(where.file, length, where.offset - HEADER)
    if len(found) < length:
        raise ValueError("the archive is cut off; sync again with verify=full")
    if not _is_header_of(found[:HEADER], where):
        raise ValueError(
            "its header in the archive is another: damaged or changed since it was listed; "
            "sync again with verify=full"
        )
    return found[HEADER:]


def _is_header_of(block: bytes, where: Where) -> bool:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    found = info.name.encode("utf-8", "surrogateescape").removeprefix(b"./")
    # What is long or not ASCII stands in full before this block, and here only as far as it fits.
    cut = len(found) >= _SHORT
    names = (
        where.name.encode("utf-8", "surrogateescape"),
        where.name.encode("ascii", "replace"),
    )
    named = any(name == found or (cut and name.startswith(found)) for name in names)
    return named and info.size == where.size


class _Archive:
    """An archive that is closed when nobody uses it; any process and thread may read at once."""

    def __init__(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        with folder_below(Path(folder)) as opened:
            self.descriptor = open_plain(name, opened)

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self.descriptor, length, offset)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@functools.lru_cache(_OPEN)
def _opened(path: str) -> _Archive:
    return _Archive(path)


def pread(file: str, length: int, offset: int) -> bytes:
    """So many bytes of an archive, fewer at its end; it stays open for the next call.

    Raises:
        OSError: it cannot be read.
    """
    # Two threads that miss at once open two, of which one is kept: the method holds the other.
    return _opened(file).read(length, offset)


def _size(root: Path, shard: str) -> int:
    try:
        with open_below(root, shard) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(
            f"cannot read the archive {root / shard} ({error.strerror}): sync again with "
            "verify=full"
        ) from None


def _is_version(root: Path) -> bool:
    """Whether a manifest says that this is a packed version."""
    try:
        with open_below(root, MANIFEST) as file:
            found = json.loads(file.readline(_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("pack") == "tar"


Row = tuple[str, str, int, int]
"""Name, archive, offset, size."""


def _from_manifest(root: Path) -> Iterator[Row]:
    with open_below(root, MANIFEST) as file:
        file.readline(_LINE)
        for number, line in enumerate(iter(lambda: file.readline(_LINE), b""), 2):
            row = _row(line)
            if row is None:
                raise InputError(
                    f"line {number} of {root / MANIFEST} is damaged: sync again with verify=full"
                )
            if not row[0].endswith("/"):
                yield row


def _row(line: bytes) -> Row | None:
    """One line of a packed version's manifest; None if it cannot be one."""
    try:
        fields: Any = json.loads(line)
        name, size, shard, offset = fields[0], fields[1], fields[6], fields[7]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    kinds = [type(one) for one in (name, shard, offset, size)]
    if kinds != [str, str, int, int] or not 0 <= min(offset, size) <= max(offset, size) <= _LAST:
        return None
    return (name, shard, offset, size) if shard and "/" not in shard else None


def _from_archives(root: Path) -> Iterator[Row] | None:
    """The members of archives that nothing lists; None if there are none, or folders too."""
    try:
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith((".", "_"))]
    except OSError:
        return None
    if any(entry.is_dir() for entry in entries):
        return None
    names = sorted(entry.name for entry in entries if entry.name.endswith(".tar"))
    return _listed(root, names) if names else None


def _listed(root: Path, shards: Sequence[str]) -> Iterator[Row]:
    for shard in shards:
        try:
            with open_below(root, shard) as file, tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    if member.isreg() and not member.issparse():
                        name = member.name.removeprefix("./")
                        yield name, shard, member.offset_data, member.size
        except (tarfile.TarError, OSError, ValueError) as error:
            raise InputError(f"cannot read the archive {root / shard} ({error})") from None


PIECE = 2 << 20
"""Bytes that are read at once."""
_GAP = PIECE // 8
"""Bytes of other images that are rather read than left out."""
_AT_ONCE = 4
_WAITING = 8

Piece = tuple[int, int]
"""The first and the last of images that lie one after the other, as positions in the index."""


def runs(slices: Slices, positions: Sequence[int]) -> list[range]:
    """Which of these positions, sorted as they are stored, make a piece: ranges of `positions`."""
    found: list[range] = []
    begin, shard, start, end = 0, -1, 0, 0
    for at, position in enumerate(positions):
        offset = slices.offsets[position]
        close = shard == slices.shards[position] and 0 <= offset - end <= _GAP
        if not close or offset + slices.sizes[position] - start > PIECE:
            if at > begin:
                found.append(range(begin, at))
            begin, shard, start = at, slices.shards[position], offset
        end = offset + slices.sizes[position]
    return [*found, range(begin, len(positions))] if positions else []


def in_store_order(slices: Slices) -> list[int]:
    """All positions, by archive and by place in it."""
    places = zip(slices.shards, slices.offsets, range(len(slices.shards)), strict=True)
    return [position for _, _, position in sorted(places)]


def pieces(slices: Slices, positions: Sequence[int]) -> list[Piece]:
    """The pieces that hold these images, which are sorted as they are stored."""
    return [(positions[run[0]], positions[run[-1]]) for run in runs(slices, positions)]


class ReadAhead:
    """Reads pieces in threads of this process, some at a time."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._pool: ThreadPoolExecutor | None = None
        self._coming: deque[Future[None]] = deque()

    def begin(self, ahead: Sequence[Piece]) -> None:
        """Begin to read these, and wait while there are more than a few to come."""
        for piece in ahead:
            self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE)
            while len(self._coming) >= _WAITING:
                self._coming.popleft().result()
            self._coming.append(self._pool.submit(self._read, *piece))

    def _read(self, first: int, last: int) -> None:
        slices = self._slices
        begin = slices.offsets[first] - HEADER
        length = slices.offsets[last] + slices.sizes[last] - begin
        with contextlib.suppress(OSError):  # said where an image of it is read
            pread(slices.files[slices.shards[first]], length, begin)
