"""A folder as a source: file:///path or a plain path.

Others may write to it meanwhile. So what is read is opened below the descriptor of its folder, no
link is followed that should not be, and no file is read that is not the one that was listed.
"""

import contextlib
import errno
import io
import os
import stat
from array import array
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import google_crc32c

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import folder_below
from kfp_ddp.storage.http.origin import display
from kfp_ddp.storage.listing import Filter, Listing
from kfp_ddp.storage.sources import Changed, Entry
from kfp_ddp.storage.sources.blocking import BlockingReader

LOST_AND_FOUND = "lost+found"
"""What a file system keeps at its root, for itself."""
_CHUNK = 1 << 20
_READERS = 8
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_REPLACED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


class FolderSource:
    """The files below a folder. Their crc32c is computed by reading them, on every run."""

    exposed, resumes = False, True
    max_workers = 16

    def __init__(self, url: str, symlinks: str = "error", wanted: Filter | None = None) -> None:
        self.url, path = display(url) if url.startswith("file://") else url, url
        if url.startswith("file://"):
            host, slash, below = url.removeprefix("file://").partition("/")
            if host not in ("", "localhost"):
                host = host.rpartition("@")[2]
                raise InputError(f"source {self.url!r} names the host {host}; use file:///folder")
            path = unquote(slash + below)
        if not path or "\0" in path:
            raise InputError(f"source {url!r} names no folder; give gs://bucket/prefix or a folder")
        self.root = Path(path)
        self._symlinks, self._wanted = symlinks, wanted or Filter()

    def listing(self) -> Listing:
        """Walk the folder and read every file once; see `Source.listing`."""
        try:
            is_folder = stat.S_ISDIR(os.stat(self.root).st_mode)
        except FileNotFoundError as error:
            raise InputError(
                f"source folder {_shown(self.root)} does not exist; check the path"
            ) from error
        except OSError as error:
            raise _unreadable(self.root, error) from error
        if not is_folder:
            raise InputError(f"source {_shown(self.root)} is a file; give the folder that holds it")
        names, pins, markers = self._walk()
        if not names:
            raise InputError(
                f"source folder {_shown(self.root)} holds no files to sync; check the path, and "
                "what is included and excluded"
            )
        found = Listing()
        with ThreadPoolExecutor(_READERS) as pool:
            sums = pool.map(self._checksum, names, pins)
            for name, pin, (size, crc) in zip(names, pins, sums, strict=True):
                found.add(name, size, crc, pin)
        for name in markers:
            found.add(name, 0, 0)
        return found

    def reader(self, threads: Executor) -> BlockingReader:
        """A reader of the folder."""
        return BlockingReader(self._open, threads)

    def _open(self, entry: Entry, offset: int) -> "_FileStream":
        stream = self._stream(entry.name, entry.generation)
        stream.seek(offset)
        return stream

    def _walk(self) -> tuple[list[str], "array[int]", list[str]]:
        """Names of files, what pins each, and empty folders with a trailing slash."""
        names, pins, markers = list[str](), array("Q"), list[str]()
        folders: list[tuple[str, tuple[int, ...]]] = [("", ())]
        while folders:
            folder, above = folders.pop()
            with self._reading(folder), self._folder(folder) as descriptor:
                here = _pin(os.fstat(descriptor))
                if here in above:
                    path = _shown(self.root / folder)
                    raise InputError(f"source {path} is a link to a folder above it")
                entries = list(os.scandir(descriptor))
                if not entries and folder:
                    markers.append(f"{folder}/")
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    kind = self._kind(name, entry)
                    if kind == "folder":
                        folders.append((name, (*above, here)))
                    elif kind == "file":
                        names.append(name)
                        pins.append(_pin(entry.stat()) if self._symlinks == "follow" else 0)
        return names, pins, markers

    def _kind(self, name: str, entry: "os.DirEntry[str]") -> str:
        """What an entry counts as: "folder", "file", or "nothing"."""
        path, link, mode = self.root / name, entry.is_symlink(), 0
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            if not link:
                raise
            if self._symlinks == "follow" and self._wanted.takes(name):
                raise _unreadable(path, error) from error
        if name == LOST_AND_FOUND and stat.S_ISDIR(mode):
            return "nothing"
        out = self._wanted.passes_over(name) if stat.S_ISDIR(mode) else not self._wanted.takes(name)
        if out or (link and self._symlinks == "skip"):
            return "nothing"
        if link and self._symlinks != "follow":
            raise InputError(
                f"source {_shown(path)} is a symbolic link; set symlinks to skip or follow"
            )
        if stat.S_ISDIR(mode):
            return "folder"
        if stat.S_ISREG(mode):
            return "file"
        raise InputError(f"source {_shown(path)} is neither a file nor a folder; remove it")

    def _checksum(self, name: str, pin: int) -> tuple[int, int]:
        size = crc = 0
        with contextlib.closing(self._stream(name, pin)) as stream:
            while chunk := stream.read(_CHUNK):
                crc = google_crc32c.extend(crc, chunk)
                size += len(chunk)
        return size, crc

    def _stream(self, name: str, pin: int) -> "_FileStream":
        """Open a file that was listed.

        Raises:
            Changed: something else is in its place, or in that of a folder above it.
            StorageError: it cannot be read.
        """
        folder, _, last = name.rpartition("/")
        flags = _READ if self._symlinks == "follow" else _READ | os.O_NOFOLLOW
        with self._reading(name), self._folder(folder) as descriptor:
            file = os.open(last, flags, dir_fd=descriptor)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or (pin and pin != _pin(found)):
            os.close(file)
            raise Changed(name)
        return _FileStream(self.root / name, open(file, "rb", buffering=0))

    def _folder(self, name: str) -> contextlib.AbstractContextManager[int]:
        follows = self._symlinks == "follow"
        return folder_below(self.root / name) if follows else folder_below(self.root, name)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _REPLACED:
                raise Changed(name) from error
            raise _unreadable(self.root / name, error) from error


class _FileStream:
    """An open file; see `Stream`."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._path, self._file = path, file
        self.seek, self.close = file.seek, file.close

    def read(self, size: int = -1, /) -> bytes:
        """See `Stream.read`; a disk that fails is a `StorageError`."""
        try:
            return self._file.read(size)
        except OSError as error:
            raise _unreadable(self._path, error) from error


def _pin(found: os.stat_result) -> int:
    """What tells this file or folder from all others, in 64 bits."""
    return hash((found.st_dev, found.st_ino)) & 0xFFFF_FFFF_FFFF_FFFF


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read source {_shown(path)}: {error.strerror}; check its permissions, and the disk "
        "it is on"
    )


def _shown(path: Path) -> str:
    """A path whose names others chose, in one line."""
    text = str(path)
    return text if text.isprintable() else repr(text)
