"""Files that outlive a power cut, and names in a shared folder that lead nowhere else."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KEPT_OPEN = 256


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk.

    Raises:
        OSError: the disk is full, or failing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_below(root: Path, name: str | Path = "", make: bool = False) -> Iterator[int]:
    """The descriptor of a folder below `root`, to give as `dir_fd`.

    `root` may be a link, as a mount point may; nothing below it is followed.

    Args:
        root: A folder that is there.
        name: The folder in it, as deep as it may be; `root` itself without a value.
        make: Whether to make what is missing, with mode 0755.

    Raises:
        OSError: it is not there, or a link or a file stands on the way; with its whole path.
        ValueError: the name leads out of `root`.
    """
    descriptor = _open_folder(root, name, make)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Folders:
    """The folders below a root, each opened once: for many files in few folders.

    Any thread may ask; see `folder_below`.
    """

    def __init__(self, root: Path, below: str | Path = "", make: bool = False) -> None:
        self._root, self._below, self._make = root, Path(below), make
        self._known: dict[str, int] = {}

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[int]:
        """The descriptor of a folder, '' for the root; see `folder_below`."""
        found = self._known.get(name)
        if found is not None:
            yield found
            return
        opened = _open_folder(self._root, self._below / name, self._make)
        if len(self._known) < _KEPT_OPEN and self._known.setdefault(name, opened) == opened:
            yield opened
            return
        try:
            yield opened
        finally:
            os.close(opened)

    def close(self) -> None:
        """Close them; the next `at` opens its folder again."""
        while self._known:
            os.close(self._known.popitem()[1])


def _open_folder(root: Path, name: str | Path, make: bool) -> int:
    parts = Path(name).parts
    if ".." in parts or Path(name).is_absolute():
        raise ValueError(f"{name!s} is no folder below {root}")
    descriptor = os.open(root, _FOLDER)
    path = Path(root)
    for part in parts:
        path /= part
        above = descriptor
        try:
            made = make and _make_folder(part, above)
            descriptor = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            if made:
                os.fchmod(descriptor, 0o755)  # whatever the umask
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(above)
    return descriptor


def _make_folder(name: str, folder: int) -> bool:
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def open_below(root: Path, name: str | Path) -> BinaryIO:
    """Open a file below `root` for reading; a link is followed neither on the way nor at its end.

    Raises:
        OSError: it cannot be read, or is no plain file.
        ValueError: the name leads out of `root`.
    """
    path = Path(root, name)
    with folder_below(root, Path(name).parent) as folder:
        try:
            descriptor = os.open(path.name, _READ, dir_fd=folder)
        except OSError as error:
            error.filename = str(path)
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def durable(path: Path, root: Path | None = None) -> Iterator[BinaryIO]:
    """A new file to write, whose content is on the disk when the block ends.

    What has its name, a link perhaps, goes first.

    Args:
        path: Its name.
        root: A folder above it, below which no link is followed; its own without a value.

    Raises:
        OSError: it cannot be made or written; with its whole path.
    """
    with _folder_of(path, root) as folder, _written(path, folder) as file:
        yield file


@contextlib.contextmanager
def atomic_write(
    path: Path, aside: Path | None = None, root: Path | None = None
) -> Iterator[BinaryIO]:
    """A file to write that gets its name when the block ends well, and else goes.

    Its content is on the disk by then; for the name to be, `fsync` its folder.

    Args:
        path: Its name.
        aside: Where it is written; beside it, under a name of chance, without a value.
        root: A folder above both, below which no link is followed; their own without a value.

    Raises:
        OSError: it cannot be made or written; with its whole path.
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
                error.filename, error.filename2 = str(path), None
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
