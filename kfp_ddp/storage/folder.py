"""A folder of a file system as a store: file:///path, or a plain path.

Other processes may write to it at the same time. So every file is opened below the descriptor of
its folder, and no link is followed that should not be.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from kfp_ddp.core.errors import FULL, InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.files import atomic_write, folder_below, open_below
from kfp_ddp.storage import store
from kfp_ddp.storage.store import BLOCK, CONFLICT, SMALL, Change, Store, bounded, sha256_of

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
                shutil.copyfileobj(content, out, BLOCK)
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
