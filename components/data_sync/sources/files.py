"""A folder as a source: file:///path or a plain path."""

import io
import os
import stat
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import google_crc32c

from kfp_ddp.base.errors import InputError, StorageError
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.sources import Changed, Entry
from kfp_ddp.components.data_sync.sources.blocking import BlockingReader, Stream

_CHUNK = 1 << 20
_READERS = 8


class FolderSource:
    """The files below a folder. Their crc32c is computed by reading them, on every run."""

    resumes = True
    max_workers = 16

    def __init__(self, url: str, symlinks: str = "error") -> None:
        self.url = url
        parts = urlsplit(url) if url.startswith("file://") else None
        if parts and parts.netloc not in ("", "localhost"):
            raise InputError(f"source {url!r} names the host {parts.netloc}; use file:///folder")
        self.root = Path(unquote(parts.path) if parts else url)
        self._symlinks = symlinks

    def listing(self) -> Listing:
        """Walk the folder and read every file once; see `Source.listing`."""
        if not self.root.exists():
            raise InputError(f"source folder {self.root} does not exist; check the path")
        if not self.root.is_dir():
            raise InputError(f"source {self.root} is a file; give the folder that holds it")
        names, markers = self._walk()
        if not names:
            raise InputError(f"source folder {self.root} holds no files; check the path")
        found = Listing()
        with ThreadPoolExecutor(_READERS) as pool:
            for name, (size, crc) in zip(names, pool.map(self._checksum, names), strict=True):
                found.add(name, size, crc)
        for name in markers:
            found.add(name, 0, 0)
        return found

    def reader(self, threads: Executor) -> BlockingReader:
        """A reader of the folder."""
        return BlockingReader(self._open, threads)

    def _open(self, entry: Entry, offset: int) -> Stream:
        path = self.root / entry.name
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise Changed(entry.name) from error
        except OSError as error:
            raise _unreadable(path, error) from error
        file.seek(offset)
        return _FileStream(path, file)

    def _walk(self) -> tuple[list[str], list[str]]:
        """Relative names of files, and of empty folders with a trailing slash."""
        names, markers, folders = [], [], [""]
        seen = {os.path.realpath(self.root)}
        while folders:
            folder = folders.pop()
            try:
                entries = list(os.scandir(self.root / folder))
            except OSError as error:
                raise _unreadable(self.root / folder, error) from error
            if not entries and folder:
                markers.append(f"{folder}/")
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                kind = self._kind(entry)
                if kind == "folder":
                    real = os.path.realpath(entry.path)
                    if real in seen and entry.is_symlink():
                        raise InputError(f"source {entry.path} is a link to a folder above it")
                    seen.add(real)
                    folders.append(name)
                elif kind == "file":
                    names.append(name)
        return names, markers

    def _kind(self, entry: "os.DirEntry[str]") -> str:
        if entry.is_symlink() and self._symlinks != "follow":
            if self._symlinks == "skip":
                return "skipped"
            raise InputError(
                f"source {entry.path} is a symbolic link; set symlinks to skip or follow"
            )
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            raise _unreadable(Path(entry.path), error) from error
        if stat.S_ISDIR(mode):
            return "folder"
        if stat.S_ISREG(mode):
            return "file"
        raise InputError(f"source {entry.path} is neither a file nor a folder; remove it")

    def _checksum(self, name: str) -> tuple[int, int]:
        size = crc = 0
        try:
            with (self.root / name).open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    crc = google_crc32c.extend(crc, chunk)
                    size += len(chunk)
        except OSError as error:
            raise _unreadable(self.root / name, error) from error
        return size, crc


class _FileStream:
    """An open file; see `Stream`."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._path, self._file = path, file
        self.close = file.close

    def read(self, size: int = -1, /) -> bytes:
        """See `Stream.read`; a disk that fails is a `StorageError`."""
        try:
            return self._file.read(size)
        except OSError as error:
            raise _unreadable(self._path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read source {path}: {error.strerror}; check its permissions, and the disk it is on"
    )
