"""Results in a folder of a file system."""

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

from kfp_ddp.core.errors import FULL, InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.files import atomic_write, folder_below, open_below
from kfp_ddp.storage.destination import place
from kfp_ddp.storage.destination.place import (
    BLOCK,
    CHANGED,
    SMALL,
    Bounded,
    Change,
    Destination,
    sha256,
    sha256_of,
)

_TEMPORARY = frozenset(
    {
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOTCONN,
        errno.EAGAIN,
    }
)
"""Of a file server that does not respond."""
_BROKEN = frozenset({*FULL, errno.EIO, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE})


class Folder(Destination):
    """A folder of a file system. It may be a link itself; below it no link is followed."""

    def __init__(self, root: Path, uri: str) -> None:
        self.root = root
        self.uri = uri.rstrip("/") or "/"
        self.place = os.path.realpath(root).rstrip("/")

    def prepare(self) -> None:
        """Make the folder and try a file in it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".probe-"):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy a plain file's content; False if it or its folder is not there."""
        bounded = Bounded(into, limit, str(self.root / name))
        try:
            with open_below(self.root, name) as file:
                while block := file.read(BLOCK):
                    bounded.write(block)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _failed(f"{self.root / name} cannot be read", error) from None
        return True

    def put(self, file: Path, name: str) -> bool:
        """Copy through a temporary name, so that a file with its own name is whole."""
        target = self.root / name
        wanted = sha256(file)
        try:
            if self._sha256(name) == wanted:
                return False
            self._make_folder_of(name)
            with atomic_write(target, root=self.root) as out, file.open("rb") as source:
                shutil.copyfileobj(source, out, BLOCK)
                out.flush()
                out.seek(0)
                if sha256_of(out) != wanted:
                    raise StorageError(f"{target} came out different from {file}: check the disk")
                os.fchmod(out.fileno(), 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        return True

    def update(self, name: str, change: Change) -> None:
        """Hold a lock beside the file, which the kernel frees if this process ends."""
        try:
            self._make_folder_of(name)
            with self._locked(name):
                content = change(self.read(name, SMALL))
                if content is not None:
                    with atomic_write(self.root / name, root=self.root) as out:
                        out.write(content)
                        os.fchmod(out.fileno(), 0o644)
        except OSError as error:
            raise self._unwritable(error) from None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Plain files; a link is neither listed nor followed, nor what a writer has aside."""
        above = prefix.rpartition("/")[0]
        try:
            with folder_below(self.root, above) as top:
                for folder, _, files, here in os.fwalk(".", onerror=_unless_gone, dir_fd=top):
                    for file in files:
                        name, size = str(PurePosixPath(above, folder, file)), _size(file, here)
                        if size is not None and name.startswith(prefix):
                            yield name, size
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _failed(f"{self.root} cannot be listed", error) from None

    def delete(self, name: str) -> None:
        """Unlink the file; its folder stays."""
        path = PurePosixPath(name)
        try:
            with folder_below(self.root, str(path.parent)) as folder:
                os.unlink(path.name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unwritable(error) from None

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = PurePosixPath(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with folder_below(self.root, str(path.parent)) as folder:
            lock = os.open(f".{path.name}.lock", flags, 0o666, dir_fd=folder)
        try:
            self._wait_for(lock, name)
            yield
        finally:
            os.close(lock)

    def _wait_for(self, lock: int, name: str) -> None:
        deadline = time.monotonic() + place.PATIENCE
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(f"{self.root / name} {CHANGED}") from None
                time.sleep(0.02)
            except OSError as error:
                raise StorageError(
                    f"{self.root} does not support locks ({error.strerror}); use a file system "
                    "with flock, or a bucket"
                ) from None

    def _sha256(self, name: str) -> str:
        """SHA-256 of a file; '' where no plain file is."""
        try:
            with open_below(self.root, name) as file:
                return sha256_of(file)
        except OSError:
            return ""

    def _make_folder_of(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with folder_below(self.root, str(PurePosixPath(name).parent), make=True):
            pass

    def _unwritable(self, error: OSError) -> KfpDdpError:
        return _failed(f"{self.root} cannot be written", error)


def _failed(problem: str, error: OSError) -> KfpDdpError:
    """Return the error for a path or rights that are wrong, or for a volume that fails."""
    if error.errno in _TEMPORARY:
        return UnavailableError(f"{problem}: {error.strerror}; check the volume, then run again")
    if error.errno in _BROKEN:
        return StorageError(f"{problem}: {error.strerror}; make room or repair the volume")
    return InputError(f"{problem}: {error.strerror}; check its path and this user's rights")


def _size(file: str, folder: int) -> int | None:
    """Bytes of a file that stays; None where none is, or one that is being written."""
    if file.startswith(".") and file.endswith((".lock", ".tmp")):
        return None
    try:
        found = os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
