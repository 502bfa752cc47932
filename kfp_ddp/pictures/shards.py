"""Packed versions: the archive and the bytes of each image, and reading ahead."""

import contextlib
import errno
import functools
import os
import stat
import tarfile
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import folder_below, open_below, open_plain
from kfp_ddp.core.version import NAME, read_header, read_rows

HEADER = 512
"""Bytes of the header before a member, or of the last block of a long one."""
_SHORT = 98
"""Names of fewer bytes, with `./` before them, fit into a header."""
_OPEN = 256
"""Open archives per process."""


class Where(NamedTuple):
    """Location of an image's bytes: a file, or a member of an archive."""

    file: str
    offset: int = 0
    size: int = -1
    """-1 for the complete file."""
    name: str = ""
    """Name of the member."""

    def __str__(self) -> str:
        return f"{self.name} in {self.file}" if self.name else self.file


class Slices(NamedTuple):
    """Locations of members, in compact arrays, as there are millions."""

    root: str
    """Folder of the version, the prefix of all paths."""
    files: tuple[str, ...]
    shards: "array[int]"
    """Positions in `files`."""
    offsets: "array[int]"
    sizes: "array[int]"

    def only(self, positions: Sequence[int]) -> "Slices":
        """Select the members at these positions."""
        columns = (self.shards, self.offsets, self.sizes)
        chosen = []
        for column in columns:
            values = (column[position] for position in positions)
            chosen.append(array(column.typecode, values))
        return Slices(self.root, self.files, *chosen)

    def where(self, position: int, path: str) -> Where:
        """Return the location of the member at a position; its path is `<root>/<name>`."""
        file = self.files[self.shards[position]]
        name = path.removeprefix(f"{self.root}/")
        return Where(file, self.offsets[position], self.sizes[position], name)


class Members(NamedTuple):
    """Content of a packed version: names relative to its folder, and locations."""

    names: tuple[str, ...]
    slices: Slices

    def archive(self, position: int) -> str:
        """Return the name of the archive of the member at a position."""
        return Path(self.slices.files[self.slices.shards[position]]).name

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a file as `content` does; raise ValueError for an unknown name."""
        position = self.names.index(name)
        return content(self.slices.where(position, f"{self.slices.root}/{name}"), most)


def members(root: Path) -> Members | None:
    """List the files in the archives of a folder, None for plain files; raise InputError."""
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
                f"{name} should end at byte {offset + size} of {root / shard}, which has "
                f"{sizes[number]}: the archive is truncated; sync again with verify=full"
            )
        names.append(name)
        slices.shards.append(number)
        slices.offsets.append(offset)
        slices.sizes.append(size)
    files = tuple(f"{home}/{shard}" for shard in numbers)
    return Members(tuple(names), slices._replace(files=files))


def content(where: Where, most: int) -> bytes:
    """Read the bytes of an image, at most `most`, with its header; raise OSError or ValueError."""
    if where.size < 0:
        with open(where.file, "rb", opener=_open_at_once) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file")
            if about.st_size > most:
                raise ValueError("the file is larger than any image of max_pixels")
            return file.read()
    if where.size > most:
        raise ValueError("the file is larger than any image of max_pixels")
    length = HEADER + where.size
    data = pread(where.file, length, where.offset - HEADER)
    if len(data) < length:
        raise ValueError("the archive is truncated; sync again with verify=full")
    if not _is_header_of(data[:HEADER], where):
        raise ValueError(
            "its header in the archive differs: damaged or changed since it was listed; "
            "sync again with verify=full"
        )
    return data[HEADER:]


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_header_of(block: bytes, where: Where) -> bool:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    stored = info.name.encode("utf-8", "surrogateescape").removeprefix(b"./")
    # A name that is long or not ASCII is complete in an earlier block; here it is truncated.
    cut = len(stored) >= _SHORT
    names = (where.name.encode("utf-8", "surrogateescape"), where.name.encode("ascii", "replace"))
    begins = cut and any(name.startswith(stored) for name in names)
    named = begins or stored in names
    return named and info.size == where.size


class _Archive:
    """An open archive, closed when it is garbage collected; threads can read at the same time."""

    def __init__(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        with folder_below(Path(folder)) as opened:
            self.descriptor = open_plain(name, opened)

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self.descriptor, length, offset)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_opened = functools.lru_cache(_OPEN)(_Archive)


def pread(file: str, length: int, offset: int) -> bytes:
    """Read bytes of an archive, fewer at its end; it remains open. Raise OSError."""
    # Two threads may both open it: one stays in the cache, the method call references the other.
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
    return _header(root).get("pack") == "tar"


def addresses(root: Path) -> tuple[str, str]:
    """Return the folder of a dataset, and the address that it is a version of, if it is one."""
    return str(root), str(_header(root).get("source", root))


def _header(root: Path) -> dict[str, Any]:
    """Return the first line of the manifest of a version; {} for another folder."""
    with contextlib.suppress(OSError, ValueError), open_below(root, NAME) as file:
        return read_header(file)
    return {}


def checksums(root: Path) -> dict[str, str]:
    """Return the crc32c of each file of a version, by name; {} for another folder."""
    sums: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError), open_below(root, NAME) as file:
        for row in read_rows(file):
            sums[row.name] = f"{row.crc:08x}"
    return sums


Member = tuple[str, str, int, int]
"""Name, archive, offset, size."""


def _from_manifest(root: Path) -> Iterator[Member]:
    with open_below(root, NAME) as file:
        try:
            for number, row in enumerate(read_rows(file), 2):
                if not row.pack or "/" in row.pack:
                    raise ValueError(f"line {number}")
                if not row.name.endswith("/"):
                    yield row.name, row.pack, row.offset, row.size
        except ValueError as error:
            raise InputError(
                f"{error} of {root / NAME} is damaged: sync again with verify=full"
            ) from None


def _from_archives(root: Path) -> Iterator[Member] | None:
    """Yield the members of archives without manifest; None if there are none, or also folders."""
    try:
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith((".", "_"))]
    except OSError:
        return None
    if any(entry.is_dir() for entry in entries):
        return None
    names = sorted(entry.name for entry in entries if entry.name.endswith(".tar"))
    return _listed(root, names) if names else None


def _listed(root: Path, shards: Sequence[str]) -> Iterator[Member]:
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
"""Bytes of a chunk that is read at once."""
_GAP = PIECE // 8
"""Bytes of other images between two that are read with them rather than skipped."""
_AT_ONCE = 4
_WAITING = 8

Piece = tuple[int, int]
"""First and last of images that are stored in sequence, as positions in the index."""


def runs(slices: Slices, positions: Sequence[int]) -> list[range]:
    """Group positions in storage order into pieces; return ranges of `positions`."""
    ranges: list[range] = []
    begin = 0
    shard = -1
    start = 0
    end = 0
    for at, position in enumerate(positions):
        offset = slices.offsets[position]
        size = slices.sizes[position]
        close = shard == slices.shards[position] and 0 <= offset - end <= _GAP
        if not close or offset + size - start > PIECE:
            if at > begin:
                ranges.append(range(begin, at))
            begin = at
            shard = slices.shards[position]
            start = offset
        end = offset + size
    return [*ranges, range(begin, len(positions))] if positions else []


def sort_by_offset(slices: Slices) -> list[int]:
    """Return all positions, ordered by archive and offset."""
    places = zip(slices.shards, slices.offsets, range(len(slices.shards)), strict=True)
    return [position for _, _, position in sorted(places)]


def pieces(slices: Slices, positions: Sequence[int]) -> list[Piece]:
    """Return the pieces of these images, which are in storage order."""
    return [(positions[run[0]], positions[run[-1]]) for run in runs(slices, positions)]


class ReadAhead:
    """Reads pieces into the page cache, which all loaders share, ahead of the images in them."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def begin(self, ahead: Sequence[Piece]) -> None:
        """Start to read these pieces; wait while too many are pending."""
        for piece in ahead:
            self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE)
            while len(self._pending) >= _WAITING:
                self._pending.popleft().result()
            self._pending.append(self._pool.submit(self._read, *piece))

    def _read(self, first: int, last: int) -> None:
        slices = self._slices
        begin = slices.offsets[first] - HEADER
        length = slices.offsets[last] + slices.sizes[last] - begin
        with contextlib.suppress(OSError):  # reported when one of its images is read
            pread(slices.files[slices.shards[first]], length, begin)
