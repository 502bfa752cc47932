"""A folder as a store; other processes may write to it, so files are opened by descriptors."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from kfp_ddp.core.errors import FULL, InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.files import (
    atomic_write,
    closing_descriptor,
    folder_below,
    lock,
    open_below,
    open_lock,
)
from kfp_ddp.core.folders import path_of
from kfp_ddp.storage import store
from kfp_ddp.storage.store import BLOCK, CONFLICT, SMALL, Change, Store, bounded, sha256_of

_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN}
_UNAVAILABLE = _UNREACHABLE | {errno.ESTALE, errno.EAGAIN}
"""Numbers of an OSError where a file server does not respond."""
_BROKEN = frozenset({*FULL, errno.EIO, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE})

_Level = tuple[PurePosixPath, list[str], list[str], int]


def open_folder(uri: str) -> "Folder":
    """Return the store at a path or a file URI; raise InputError."""
    if not uri.strip():
        raise InputError("the path is empty: give gs://bucket/prefix or a folder")
    return Folder(Path(path_of(uri)), uri)


class Folder(Store):
    """A folder of a file system. It may be a link itself; below it no link is followed."""

    def __init__(self, root: Path, uri: str) -> None:
        self.root = root
        self.uri = uri.rstrip("/") or "/"
        self.place = os.path.realpath(root).rstrip("/")

    def prepare(self) -> None:
        """Make the folder and create a temporary file in it."""
        with self._translating("write"):
            self.root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()  # of no name, so a kill leaves none

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield plain files, neither links nor temporary files; see `Store.list`."""
        for path, _, files, here in self._walk(prefix):
            for file in files:
                name = str(path / file)
                size = _size(file, here)
                if size is not None and name.startswith(prefix):
                    yield name, size

    def entries(self, prefix: str) -> Iterator[str]:
        """Yield files, links, pipes, and empty folders with a slash, also that of `prefix`."""
        for path, folders, files, here in self._walk(prefix):
            links = [name for name in folders if _is_link(name, here)]
            yield from (str(path / name) for name in (*files, *links))
            is_empty = not (folders or files)
            if path.name and is_empty:
                yield f"{path}/"

    def _walk(self, prefix: str) -> Iterator[_Level]:
        """Yield path, folders, files and descriptor of each folder, that of `prefix` first."""
        above = prefix.rpartition("/")[0]
        with self._translating("list", above), folder_below(self.root, above) as top:
            walk = os.fwalk(".", onerror=_unless_missing, dir_fd=top)
            for folder, folders, files, here in walk:
                yield PurePosixPath(above, folder), folders, files, here

    def exists(self, name: str) -> bool:
        """Return whether there is a plain file of this name."""
        folder, _, file = name.rpartition("/")
        with self._translating("read", name), folder_below(self.root, folder) as descriptor:
            return _size(file, descriptor) is not None
        return False

    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy the content of a plain file; see `Store.fetch`."""
        write = bounded(into, limit, str(self.root / name))
        with self._translating("read", name), open_below(self.root, name) as file:
            while block := file.read(BLOCK):
                write(block)
            return True
        return False

    def _put(self, content: BinaryIO, name: str, again: bool = True) -> bool:
        """Copy to a temporary name and rename it, so that a file is never incomplete."""
        target = self.root / name
        digest = sha256_of(content)
        with self._translating("write", name):
            if self._sha256(name) == digest:
                return False
            self._make_folder_of(name)
            content.seek(0)
            try:
                with atomic_write(target, root=self.root) as out:
                    shutil.copyfileobj(content, out, BLOCK)
                    out.flush()
                    out.seek(0)
                    if sha256_of(out) != digest:
                        raise StorageError(f"{target} is not what was written: check the disk")
                    os.fchmod(out.fileno(), 0o644)
            except FileNotFoundError:  # another upload of this took ours for a killed one's
                if not again:
                    raise
                content.seek(0)
                return self._put(content, name, again=False)
        return True

    def update(self, name: str, change: Change) -> None:
        """Hold a lock on a file beside it, which the kernel releases if this process ends."""
        with self._translating("write", name):
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
        """Remove a file with what `update` wrote beside it, or an empty folder; no folder above."""
        path = PurePosixPath(name)
        parent = str(path.parent)
        beside = () if name.endswith("/") else (f".{path.name}.lock", f".{path.name}.tmp")
        remove = os.rmdir if name.endswith("/") else os.unlink
        for entry in (*beside, path.name):
            with self._translating("delete", name), folder_below(self.root, parent) as folder:
                remove(entry, dir_fd=folder)

    @contextlib.contextmanager
    def _translating(self, verb: str, name: str = "") -> Iterator[None]:
        """Translate errors of the file system; a missing file ends the block, unless it writes."""
        if "\0" in name or not {"/", ".."}.isdisjoint(PurePosixPath(name).parts):
            raise InputError(f"{name!r} is not a name below {self.root}: correct it")
        try:
            yield
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            if verb == "write" or not missing:
                raise _problem(verb, str(self.root / name), error) from None

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = PurePosixPath(name)
        with folder_below(self.root, str(path.parent)) as folder:
            descriptor = open_lock(f".{path.name}.lock", 0o666, folder)
        with closing_descriptor(descriptor):
            with contextlib.suppress(OSError):  # of another user, who may have done it
                os.fchmod(descriptor, 0o666)  # steps run as other users than a person who promotes
            if not lock(descriptor, self.root, store.PATIENCE):
                raise StorageError(f"{self.root / name} {CONFLICT}")
            yield

    def _sha256(self, name: str) -> str:
        """Return the SHA-256 of a plain file, '' where there is none."""
        with contextlib.suppress(OSError), open_below(self.root, name) as file:
            return sha256_of(file)
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
