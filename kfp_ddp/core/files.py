"""Durable files, their digests, and names below a folder without following links."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import resource
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kfp_ddp.core.errors import InputError, StorageError

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_KEPT_OPEN = 2048 if _DESCRIPTORS < 0 else min(_DESCRIPTORS // 8, 2048)
"""Folders that stay open; connections and files need descriptors too."""


def sha256(file: Path) -> str:
    """Return the digest of a file's content in hex; raise OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the digest of a JSON value, whatever the order of names in its objects."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def newest_file(folder: Path, patterns: Iterable[str]) -> Path | None:
    """Return the file of these globs below a folder that was written last; None for none."""
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk; raise OSError."""
    with closing_descriptor(os.open(path, os.O_RDONLY)) as descriptor:
        os.fsync(descriptor)


def folder_below(
    root: Path, name: str | Path = "", make: bool = False
) -> contextlib.AbstractContextManager[int]:
    """Return a context with the descriptor of a folder below `root`; no link below is followed.

    `make` creates folders with mode 0755. Raises OSError with the full path, ValueError for `..`.
    """
    return closing_descriptor(_open_folder(root, name, make))


class Folders:
    """Folders below a root, each opened once; thread-safe. See `folder_below`."""

    def __init__(self, root: Path, below: str | Path = "") -> None:
        self._root = root
        self._below = Path(below)
        self._known: dict[str, contextlib.nullcontext[int]] = {}

    def at(self, name: str) -> contextlib.AbstractContextManager[int]:
        """Return a context with the descriptor of a folder; '' for the root."""
        return self._known.get(name) or self._open(name)

    def _open(self, name: str) -> contextlib.AbstractContextManager[int]:
        if name:
            with self.at("") as top:
                opened = _walk(top, name.split("/"), self._root / self._below)
        else:
            opened = _open_folder(self._root, self._below)
        if len(self._known) < _KEPT_OPEN:
            cached = contextlib.nullcontext(opened)
            if self._known.setdefault(name, cached) is cached:
                return cached
        return closing_descriptor(opened)

    def close(self) -> None:
        """Close all; `at` opens a folder again."""
        while self._known:
            os.close(self._known.popitem()[1].enter_result)


@contextlib.contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Yield a descriptor, and close it after the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(root: Path, name: str | Path, make: bool = False) -> int:
    if Path(name).is_absolute():
        raise ValueError(f"{name!s} is not a folder below {root}")
    with closing_descriptor(os.open(root, _FOLDER)) as top:
        return _walk(top, Path(name).parts, Path(root), make)


def _walk(top: int, parts: Sequence[str], root: Path, make: bool = False) -> int:
    """Return a new descriptor of the folder with this path below an open one."""
    if ".." in parts:
        raise ValueError(f"{'/'.join(parts)} is not a folder below {root}")
    descriptor = os.dup(top)
    for index, part in enumerate(parts):
        above = descriptor
        created = False
        try:
            with contextlib.suppress(FileExistsError):
                if make:
                    os.mkdir(part, 0o755, dir_fd=above)
                    created = True
            descriptor = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            if created:
                os.fchmod(descriptor, 0o755)  # whatever the umask
        except OSError as error:
            error.filename = str(root.joinpath(*parts[: index + 1]))
            raise
        finally:
            os.close(above)
    return descriptor


def open_below(root: Path, name: str | Path) -> BinaryIO:
    """Open a plain file below `root` without following links; raise OSError and ValueError."""
    path = Path(root, name)
    with folder_below(root, Path(name).parent) as folder:
        try:
            return os.fdopen(open_plain(path.name, folder), "rb")
        except OSError as error:
            error.filename = str(path)
            raise


def read_below(root: Path, name: str | Path, limit: int) -> bytes:
    """Return the content of a file as `open_below`; raise InputError above `limit` bytes."""
    with open_below(root, name) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InputError(f"{Path(root, name)} has more than {limit:,} bytes: name another file")
    return content


def open_plain(name: str, folder: int) -> int:
    """Return a descriptor to read a file of an open folder; raise OSError for a link or a pipe."""
    descriptor = os.open(name, _READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", name)
    return descriptor


def open_lock(name: str | Path, mode: int = 0o644, folder: int | None = None) -> int:
    """Return a descriptor of a file for `lock`, created if it is missing; raise OSError."""
    return os.open(name, _LOCK, mode, dir_fd=folder)


def lock(descriptor: int, where: Path, seconds: float = 0) -> bool:
    """Lock an open file until it is closed or we die; False if another has it for `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        except OSError as error:
            raise StorageError(
                f"{where} does not support locks ({error.strerror}); use a file system with flock"
            ) from None
        else:
            return True


@contextlib.contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in place of one of this name, flushed at the end; raise OSError."""
    with folder_below(path.parent) as folder, _written(path, folder) as file:
        yield file


@contextlib.contextmanager
def atomic_write(
    path: Path, aside: Path | None = None, root: Path | None = None
) -> Iterator[BinaryIO]:
    """Yield a file to write that gets its name if the block succeeds, and is deleted if not.

    Its content is flushed, not its name. `aside` is the temporary path. No link below `root` is
    followed, by default the folder of the file. Raises OSError with the full path.
    """
    aside = aside or path.with_name(f".{os.urandom(8).hex()}.tmp")
    with _folder_of(path, root) as into, _folder_of(aside, root) as folder:
        try:
            with _written(aside, folder) as file:
                yield file
            os.replace(aside.name, path.name, src_dir_fd=folder, dst_dir_fd=into)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(aside.name, dir_fd=folder)
            if isinstance(error, OSError) and error.filename in (aside.name, str(aside)):
                error.filename = str(path)
                error.filename2 = None
            raise


def _folder_of(path: Path, root: Path | None) -> contextlib.AbstractContextManager[int]:
    root = path.parent if root is None else root
    return folder_below(root, path.parent.relative_to(root))


@contextlib.contextmanager
def _written(path: Path, folder: int) -> Iterator[BinaryIO]:
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        descriptor = os.open(path.name, _NEW, 0o666, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        raise
    with os.fdopen(descriptor, "w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        import shutil  # few programs that import this module need it

        shutil.copyfile(source, target)
