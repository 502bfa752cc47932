"""A folder of a file system as a source: only listed files are read, and no link is followed."""

import contextlib
import errno
import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Protocol

import google_crc32c

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import folder_below
from kfp_ddp.core.folders import path_of
from kfp_ddp.core.text import printable
from kfp_ddp.pictures.reading import is_needless, system_folder
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.listing import EMPTY, Filter, Listing, new_hash, token_of
from kfp_ddp.storage.source import Changed, Damaged, Entry, SourceOptions
from kfp_ddp.storage.store import BLOCK

LOST_AND_FOUND = "lost+found"
"""A folder at the root of a file system, for its repair."""
_READERS = 8
_TOGETHER = 4096
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFREG: "file"}
_REPLACED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


class FolderSource:
    """The files below a folder. Every sync reads them: neither times nor numbers are content."""

    exposed = False
    resumes = False
    """A file is compared with the SHA-256 of its listing as a whole."""
    max_workers = 16

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url = url
        path = path_of(url)
        if not path or "\0" in path:
            raise InputError(f"source {url!r} names no folder; give gs://bucket/prefix or a folder")
        self.root = Path(path)
        self._symlinks = options.symlinks
        self._filter = options.select or Filter()

    def listing(self) -> Listing:
        """Walk the folder and read every file once; see `Source.listing`."""
        shown = printable(str(self.root))
        try:
            is_folder = stat.S_ISDIR(os.stat(self.root).st_mode)
        except FileNotFoundError as error:
            raise InputError(f"source folder {shown} does not exist; check the path") from error
        except OSError as error:
            raise _unreadable(self.root, error) from error
        if not is_folder:
            raise InputError(f"source {shown} is a file; give the folder of it")
        names, pins, markers = self._walk()
        if not names:
            raise InputError(
                f"source folder {shown} holds no files to sync; check the path, and what is "
                "included and excluded"
            )
        listing = Listing()
        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(names), _TOGETHER):  # a million futures take 1.7 GB
                end = start + _TOGETHER
                files = (names[start:end], pins[start:end])
                checksums = pool.map(self._checksum, *files)
                for name, pin, (size, crc, token) in zip(*files, checksums, strict=True):
                    listing.add(name, size, crc, pin, token)
        for name in markers:
            listing.add(name, 0, 0, tag=EMPTY)
        return listing

    def reader(self, threads: Executor | None) -> "FolderReader":
        """Return a reader of the folder."""
        return FolderReader(self, threads)

    def _walk(self) -> tuple[list[str], "array[int]", list[str]]:
        """Return the names of files, what pins each, and empty folders with a slash at the end."""
        names: list[str] = []
        pins = array("Q")
        markers: list[str] = []
        folders: list[tuple[str, tuple[int, ...]]] = [("", ())]
        while folders:
            folder, above = folders.pop()
            needed = not system_folder(folder)
            with self._reading(folder, needed), self._folder(folder) as descriptor:
                identity = _pin(os.fstat(descriptor))
                if identity in above:
                    path = printable(str(self.root / folder))
                    raise InputError(f"source {path} is a link to a folder above it")
                entries = list(os.scandir(descriptor))
                if not entries and folder:
                    markers.append(f"{folder}/")
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    kind = self._kind(name, entry)
                    if kind == "folder":
                        folders.append((name, (*above, identity)))
                    elif kind == "file":
                        names.append(name)
                        pins.append(_pin(entry.stat()) if self._symlinks == "follow" else 0)
        return names, pins, markers

    def _kind(self, name: str, entry: "os.DirEntry[str]") -> str:
        """Return what an entry counts as: "folder", "file", or "nothing"."""
        link = entry.is_symlink()
        mode = self._mode(name, entry, link)
        is_folder = stat.S_ISDIR(mode)
        is_skipped = link and self._symlinks == "skip"
        if is_skipped or self._is_left_out(name, is_folder):
            return "nothing"
        path = self.root / name
        kind = _KINDS.get(stat.S_IFMT(mode), "")
        problem = ""
        if link and self._symlinks != "follow":
            problem = "is a symbolic link; set symlinks to skip or follow"
        elif not kind:
            problem = "is neither a file nor a folder; remove it"
        # What no step reads stops none.
        if is_needless(name) and (problem or not _is_readable(path)):
            return "nothing"
        if problem:
            raise InputError(f"source {printable(str(path))} {problem}")
        return kind

    def _mode(self, name: str, entry: "os.DirEntry[str]", link: bool) -> int:
        """Return the mode of an entry, or of what a link leads to; 0 for a link to nothing."""
        try:
            return entry.stat().st_mode
        except OSError as error:
            if is_needless(name):
                return 0
            if not link:
                raise
            if self._symlinks == "follow" and self._filter.selects(name):
                raise _unreadable(self.root / name, error) from error
        return 0

    def _is_left_out(self, name: str, is_folder: bool) -> bool:
        if is_folder:
            return name == LOST_AND_FOUND or self._filter.excludes_folder(name)
        return not self._filter.selects(name)

    def _checksum(self, name: str, pin: int) -> tuple[int, int, str]:
        size = crc = 0
        state = hashlib.sha256()
        for block in self.blocks(name, pin, 0):
            crc = google_crc32c.extend(crc, block)
            state.update(block)
            size += len(block)
        return size, crc, token_of(state)

    def blocks(self, name: str, pin: int, offset: int) -> Iterator[bytes]:
        """Yield the content of a listed file from an offset on; raise Changed, StorageError."""
        with self.opened(name, pin) as file:
            try:
                file.seek(offset)
                while block := file.read(BLOCK):
                    yield block
            except OSError as error:
                raise _unreadable(self.root / name, error) from error

    def opened(self, name: str, pin: int) -> FileIO:
        """Open a listed file; raise as `blocks`."""
        folder, _, last = name.rpartition("/")
        flags = _READ if self._symlinks == "follow" else _READ | os.O_NOFOLLOW
        with self._reading(name), self._folder(folder) as descriptor:
            opened = os.open(last, flags, dir_fd=descriptor)
        status = os.fstat(opened)
        is_other = pin and pin != _pin(status)
        if is_other or not stat.S_ISREG(status.st_mode):
            os.close(opened)
            raise Changed(name)
        return FileIO(opened)

    def _folder(self, name: str) -> contextlib.AbstractContextManager[int]:
        follows = self._symlinks == "follow"
        return folder_below(self.root / name) if follows else folder_below(self.root, name)

    @contextlib.contextmanager
    def _reading(self, name: str, needed: bool = True) -> Iterator[None]:
        """Translate errors of the file system; what is not `needed` is left out in their place."""
        try:
            yield
        except OSError as error:
            if not needed:
                return
            if error.errno in _REPLACED:
                raise Changed(name) from error
            raise _unreadable(self.root / name, error) from error


class Blocks(Protocol):
    """A source whose content comes in blocks, without waiting in the event loop."""

    def blocks(self, name: str, pin: int, offset: int) -> Iterator[bytes]:
        """Yield the content of a listed object from an offset on."""


class FolderReader:
    """Reads files in threads, as a disk blocks; see `Reader`."""

    def __init__(self, source: Blocks, threads: Executor | None) -> None:
        self._source = source
        self._threads = threads

    def prefetch(self, entry: Entry) -> None:
        """Do nothing; see `Reader.prefetch`."""

    async def read(self, entry: Entry) -> bytes:
        """See `Reader.read`."""
        body = bytearray()

        def take(block: bytes) -> None:
            body.extend(block)
            if len(body) > entry.size:
                raise Damaged(f"{len(body)} bytes instead of {entry.size}")

        await self.pour(entry, 0, take)
        return bytes(body)

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """See `Reader.pour`."""
        state = None if offset else new_hash(entry.tag)

        def read() -> None:
            for block in self._source.blocks(entry.name, entry.generation, offset):
                if state is not None:
                    state.update(block)
                take(block)

        await event_loop.in_thread(self._threads, read)
        if state is not None and token_of(state) != entry.tag:
            raise Changed(entry.name)

    def close(self) -> None:
        """Do nothing: no file is open between two objects."""


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)


def _pin(status: os.stat_result) -> int:
    """Return 64 bits that identify this file or folder."""
    return hash((status.st_dev, status.st_ino)) & 0xFFFF_FFFF_FFFF_FFFF


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read source {printable(str(path))}: {error.strerror}; check its "
        "permissions, and the disk it is on"
    )
