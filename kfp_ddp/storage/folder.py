"""A folder of a file system, file:///path or a plain path: a store and a source.

Other processes may write to it at the same time. So every file is opened below the descriptor of
its folder, and no link is followed that should not be.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import google_crc32c

from kfp_ddp.core.errors import FULL, InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.files import atomic_write, folder_below, open_below
from kfp_ddp.core.text import printable
from kfp_ddp.storage import event_loop, store
from kfp_ddp.storage.http.origin import display
from kfp_ddp.storage.listing import Filter, Listing
from kfp_ddp.storage.source import Changed, Entry, SourceOptions, Transient
from kfp_ddp.storage.store import BLOCK, CONFLICT, SMALL, Change, Store, bounded, sha256_of

LOST_AND_FOUND = "lost+found"
"""A folder at the root of a file system, for its repair."""
_READERS = 8
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_REPLACED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN}
_UNAVAILABLE = _UNREACHABLE | {errno.ESTALE, errno.EAGAIN}
"""Numbers of an OSError where a file server does not respond."""
_BROKEN = frozenset({*FULL, errno.EIO, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE})


def open_folder(uri: str) -> "Folder":
    """Return the store at a path or a file URI; raises InputError."""
    if not uri.strip():
        raise InputError("the path is empty: give gs://bucket/prefix or a folder")
    if not uri.startswith("file://"):
        return Folder(Path(uri), uri)
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"{uri} is not a file URI; write file:///folder with three slashes")
    return Folder(Path(unquote(parts.path)), uri)


class Folder(Store):
    """A folder of a file system. It may be a link itself; below it no link is followed."""

    def __init__(self, root: Path, uri: str) -> None:
        self.root = root
        self.uri = uri.rstrip("/") or "/"
        self.place = os.path.realpath(root).rstrip("/")

    def prepare(self) -> None:
        """Make the folder and write a temporary file in it."""
        with self._translating("write"):
            self.root.mkdir(parents=True, exist_ok=True)
            import tempfile  # a source in a folder starts without it

            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".probe-"):
                pass

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield plain files, neither links nor temporary files; see `Store.list`."""
        above = prefix.rpartition("/")[0]
        try:
            with self._translating("list"), folder_below(self.root, above) as top:
                for folder, _, files, here in os.fwalk(".", onerror=_unless_missing, dir_fd=top):
                    for file in files:
                        name, size = str(PurePosixPath(above, folder, file)), _size(file, here)
                        if size is not None and name.startswith(prefix):
                            yield name, size
        except (FileNotFoundError, NotADirectoryError):
            return

    def entries(self, prefix: str) -> Iterator[str]:
        """Yield files, links, pipes, and empty folders with a slash; `prefix` is a folder."""
        above = prefix.rpartition("/")[0]
        try:
            with self._translating("list"), folder_below(self.root, above) as top:
                walk = os.fwalk(".", onerror=_unless_missing, dir_fd=top)
                for folder, folders, files, here in walk:
                    links = [name for name in folders if _is_link(name, here)]
                    for name in (*files, *links):
                        yield str(PurePosixPath(above, folder, name))
                    if folder != "." and not (folders or files):
                        yield f"{PurePosixPath(above, folder)}/"
        except (FileNotFoundError, NotADirectoryError):
            return

    def has_files(self, prefix: str = "") -> bool:
        """Stop at the first file; see `Store.has_files`."""
        return any(True for _ in self.list(prefix))

    def exists(self, name: str) -> bool:
        """Return whether there is a plain file of this name."""
        path = PurePosixPath(name)
        try:
            with self._translating("read"), folder_below(self.root, str(path.parent)) as folder:
                return _size(path.name, folder) is not None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy the content of a plain file; see `Store.fetch`."""
        write = bounded(into, limit, str(self.root / name))
        try:
            with self._translating("read", name), open_below(self.root, name) as file:
                while block := file.read(BLOCK):
                    write(block)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _put(self, content: BinaryIO, name: str) -> bool:
        """Copy to a temporary name and rename it, so that a file is never incomplete."""
        target, digest = self.root / name, sha256_of(content)
        with self._translating("write"):
            if self._sha256(name) == digest:
                return False
            self._make_folder_of(name)
            content.seek(0)
            with atomic_write(target, root=self.root) as out:
                while block := content.read(BLOCK):
                    out.write(block)
                out.flush()
                out.seek(0)
                if sha256_of(out) != digest:
                    raise StorageError(f"{target} differs from what was written: check the disk")
                os.fchmod(out.fileno(), 0o644)
        return True

    def update(self, name: str, change: Change) -> None:
        """Hold a lock on a file beside it, which the kernel releases if this process ends."""
        with self._translating("write"):
            self._make_folder_of(name)
            with self._locked(name):
                content = change(self.read(name, SMALL))
                if content is not None:
                    target = self.root / name
                    # One name, as this holds the lock: that of a killed writer is replaced.
                    aside = target.with_name(f".{target.name}.tmp")
                    with atomic_write(target, aside, self.root) as out:
                        out.write(content)
                        os.fchmod(out.fileno(), 0o644)

    def delete(self, name: str) -> None:
        """Remove the file but not its folder; see `Store.delete`."""
        path = PurePosixPath(name)
        try:
            with self._translating("delete"), folder_below(self.root, str(path.parent)) as folder:
                os.unlink(path.name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            return

    @contextlib.contextmanager
    def _translating(self, verb: str, name: str = "") -> Iterator[None]:
        """Translate errors of the file system, other than of a missing file unless it writes."""
        try:
            yield
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            if missing and verb != "write":
                raise
            raise _problem(verb, str(self.root / name), error) from None

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = PurePosixPath(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with folder_below(self.root, str(path.parent)) as folder:
            lock = os.open(f".{path.name}.lock", flags, 0o666, dir_fd=folder)
        with contextlib.suppress(OSError):  # of another user, who may have done it
            os.fchmod(lock, 0o666)  # steps run as other users than a person who promotes
        try:
            self._wait_for(lock, name)
            yield
        finally:
            os.close(lock)

    def _wait_for(self, lock: int, name: str) -> None:
        deadline = time.monotonic() + store.PATIENCE
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(f"{self.root / name} {CONFLICT}") from None
                time.sleep(0.02)
            except OSError as error:
                raise StorageError(
                    f"{self.root} does not support locks ({error.strerror}); use a file system "
                    "with flock, or a bucket"
                ) from None

    def _sha256(self, name: str) -> str:
        """Return the SHA-256 of a plain file, '' where there is none."""
        try:
            with open_below(self.root, name) as file:
                return sha256_of(file)
        except OSError:
            return ""

    def _make_folder_of(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with folder_below(self.root, str(PurePosixPath(name).parent), make=True):
            pass


def _problem(verb: str, path: str, error: OSError) -> KfpDdpError:
    """Return the error for a wrong path or missing rights, or for a volume that fails."""
    problem = f"cannot {verb} {path}: {error.strerror}"
    if error.errno in _UNAVAILABLE:
        return UnavailableError(f"{problem}; check the volume, then run again")
    if error.errno in _BROKEN:
        return StorageError(f"{problem}; make room or repair the volume")
    return InputError(f"{problem}; check the path and this user's rights")


def _size(file: str, folder: int) -> int | None:
    """Return the bytes of a plain file; None for a missing or a temporary one."""
    if file.startswith(".") and file.endswith((".lock", ".tmp")):
        return None
    try:
        status = os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class FolderSource:
    """The files below a folder. Their crc32c is computed by reading them, in every sync."""

    exposed, resumes = False, True
    max_workers = 16

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url, path = display(url) if url.startswith("file://") else url, url
        if url.startswith("file://"):
            host, slash, below = url.removeprefix("file://").partition("/")
            if host not in ("", "localhost"):
                host = host.rpartition("@")[2]
                raise InputError(f"source {self.url!r} names the host {host}; use file:///folder")
            path = unquote(slash + below)
        if not path:
            raise InputError("source is empty; give gs://bucket/prefix or a folder")
        if "\0" in path:
            raise InputError(f"source {url!r} names no folder; give gs://bucket/prefix or a folder")
        self.root = Path(path)
        self._symlinks, self._filter = options.symlinks, options.select or Filter()

    def listing(self) -> Listing:
        """Walk the folder and read every file once; see `Source.listing`."""
        try:
            is_folder = stat.S_ISDIR(os.stat(self.root).st_mode)
        except FileNotFoundError as error:
            raise InputError(
                f"source folder {printable(str(self.root))} does not exist; check the path"
            ) from error
        except OSError as error:
            raise _unreadable(self.root, error) from error
        if not is_folder:
            raise InputError(f"source {printable(str(self.root))} is a file; give the folder of it")
        names, pins, markers = self._walk()
        if not names:
            raise InputError(
                f"source folder {printable(str(self.root))} holds no files to sync; "
                "check the path, and what is included and excluded"
            )
        listing = Listing()
        with ThreadPoolExecutor(_READERS) as pool:
            sums = pool.map(self._checksum, names, pins)
            for name, pin, (size, crc) in zip(names, pins, sums, strict=True):
                listing.add(name, size, crc, pin)
        for name in markers:
            listing.add(name, 0, 0)
        return listing

    def reader(self, threads: Executor | None) -> "FolderReader":
        """Return a reader of the folder."""
        return FolderReader(self, threads)

    def _walk(self) -> tuple[list[str], "array[int]", list[str]]:
        """Return the names of files, what pins each, and empty folders with a slash at the end."""
        names, pins, markers = list[str](), array("Q"), list[str]()
        folders: list[tuple[str, tuple[int, ...]]] = [("", ())]
        while folders:
            folder, above = folders.pop()
            with self._reading(folder), self._folder(folder) as descriptor:
                here = _pin(os.fstat(descriptor))
                if here in above:
                    path = printable(str(self.root / folder))
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
        """Return what an entry counts as: "folder", "file", or "nothing"."""
        path, link, mode = self.root / name, entry.is_symlink(), 0
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            if not link:
                raise
            if self._symlinks == "follow" and self._filter.takes(name):
                raise _unreadable(path, error) from error
        if name == LOST_AND_FOUND and stat.S_ISDIR(mode):
            return "nothing"
        out = self._filter.passes_over(name) if stat.S_ISDIR(mode) else not self._filter.takes(name)
        if out or (link and self._symlinks == "skip"):
            return "nothing"
        if link and self._symlinks != "follow":
            raise InputError(
                f"source {printable(str(path))} is a symbolic link; set symlinks to skip or follow"
            )
        if stat.S_ISDIR(mode):
            return "folder"
        if stat.S_ISREG(mode):
            return "file"
        raise InputError(f"source {printable(str(path))} is neither a file nor a folder; remove it")

    def _checksum(self, name: str, pin: int) -> tuple[int, int]:
        size = crc = 0
        for block in self.blocks(name, pin, 0):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
        return size, crc

    def blocks(self, name: str, pin: int, offset: int) -> Iterator[bytes]:
        """Yield the content of a listed file from an offset on.

        Raises Changed if something else has replaced it, StorageError if it cannot be read.
        """
        with self.opened(name, pin) as file:
            try:
                file.seek(offset)
                while block := file.read(BLOCK):
                    yield block
            except OSError as error:
                raise _unreadable(self.root / name, error) from error

    def opened(self, name: str, pin: int) -> FileIO:
        """Open a listed file; raises as `blocks`."""
        folder, _, last = name.rpartition("/")
        flags = _READ if self._symlinks == "follow" else _READ | os.O_NOFOLLOW
        with self._reading(name), self._folder(folder) as descriptor:
            opened = os.open(last, flags, dir_fd=descriptor)
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or (pin and pin != _pin(status)):
            os.close(opened)
            raise Changed(name)
        return FileIO(opened)

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


class FolderReader:
    """Reads files in threads, as a disk blocks; see `Reader`."""

    def __init__(self, source: FolderSource, threads: Executor | None) -> None:
        self._source, self._threads = source, threads

    def prefetch(self, entry: Entry) -> None:
        """Do nothing; see `Reader.prefetch`."""

    async def read(self, entry: Entry) -> bytes:
        """See `Reader.read`."""
        body = bytearray()

        def take(block: bytes) -> None:
            body.extend(block)
            if len(body) > entry.size:
                raise Transient(f"{len(body)} bytes instead of {entry.size}")

        await self.pour(entry, 0, take)
        return bytes(body)

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """See `Reader.pour`."""

        def read() -> None:
            for block in self._source.blocks(entry.name, entry.generation, offset):
                take(block)

        await event_loop.in_thread(self._threads, read)

    def close(self) -> None:
        """Do nothing: no file is open between two objects."""


def _pin(status: os.stat_result) -> int:
    """Return 64 bits that identify this file or folder."""
    return hash((status.st_dev, status.st_ino)) & 0xFFFF_FFFF_FFFF_FFFF


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read source {printable(str(path))}: {error.strerror}; check its "
        "permissions, and the disk it is on"
    )
