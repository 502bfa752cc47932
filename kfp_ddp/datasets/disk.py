"""Files, folders and locks on the disk that a sync writes to, and its errors."""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.core import errors
from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.files import closing_descriptor, folder_below, lock, open_lock, open_plain
from kfp_ddp.datasets.context import Watch
from kfp_ddp.storage.listing import content_hash, expected_digest

_CHUNK = 1 << 20


def has_content(
    name: str, folder: int, token: str, crc: int, start: int = 0, size: int | None = None
) -> bool:
    """Return whether a plain file of this folder, or a part of it, has the hash in a token.

    Without one in the token, this crc32c. False if it cannot be read.
    """
    state = content_hash(token)
    left = sys.maxsize if size is None else size
    try:
        with open(open_plain(name, folder), "rb", buffering=0) as file:
            file.seek(start)
            while chunk := file.read(min(_CHUNK, left)):
                state.update(chunk)
                left -= len(chunk)
    except OSError:
        return False
    return not (size and left) and state.digest() == expected_digest(token, crc)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset; raise OSError for a full or failing disk."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def writing(target: Path) -> contextlib.AbstractContextManager[None]:
    """Raise StorageError for an OSError of the block; sources handle their own."""
    user = f"uid {os.geteuid()} (on a claim: fsGroup)"
    return errors.writing(target, f"free space there, or make it writable for {user}")


def plain_folder(root: Path, path: Path) -> None:
    """Create a folder below `root` (0755, no link) unless it exists; raise StorageError."""
    with writing(path):
        try:
            with folder_below(root, path.relative_to(root), make=True):
                pass
        except NotADirectoryError as error:
            raise StorageError(
                f"{error.filename} is a link or a file where a folder must be; remove it"
            ) from None


def remove(name: str, folder: int) -> None:
    """Remove a file, a link or a folder tree from the folder with this descriptor."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        import shutil  # most syncs remove nothing, and 4 ms of their start go without it

        shutil.rmtree(name, dir_fd=folder)


def flush_filesystem(path: Path) -> None:
    """Flush the file system that holds the path: one call, however many files."""
    import ctypes  # a sync without a change flushes nothing

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        os.sync()
        return
    with folder_below(path) as descriptor, writing(path):
        if libc.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def locked(root: Path, wait: float, what: str, watch: Watch) -> Iterator[bool]:
    """Lock the target; yield whether it had to wait. `what` is shown to other syncs that wait."""
    with writing(root / ".kfsync" / "lock"):
        descriptor = _opened(root, "lock")
    with closing_descriptor(descriptor):
        waited = _acquire(descriptor, root, wait, watch)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        holder = f"{socket.gethostname()} syncs {what} since {since}".encode("utf-8", "replace")
        with contextlib.suppress(OSError):  # it is only for syncs that wait
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder, 0)
            os.fsync(descriptor)  # who waits may be on another node
        yield waited


@contextlib.contextmanager
def versions_lock(root: Path) -> Iterator[None]:
    """Lock the list of versions, unless this user can write nothing: then no version changes."""
    try:
        descriptor = _opened(root, "handing-out")
    except OSError:
        yield
        return
    with closing_descriptor(descriptor):
        lock(descriptor, root, math.inf)
        yield


def _opened(root: Path, name: str) -> int:
    with folder_below(root, ".kfsync") as work:
        return open_lock(name, folder=work)


def _acquire(descriptor: int, root: Path, wait: float, watch: Watch) -> bool:
    deadline = time.monotonic() + wait
    reported = None
    while not lock(descriptor, root):
        text = os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
        shown = (character if character.isprintable() else "?" for character in text)
        holder = "".join(shown) or "unknown"
        if time.monotonic() >= deadline:
            raise StorageError(
                f"another sync is writing {root} ({holder}) and did not end in "
                f"{wait:.0f} s; wait for it, or give lock_wait more seconds"
            )
        if holder != reported:
            watch(f"waiting for another sync of {root}: {holder}", None, 0, 0)
            reported = holder
        time.sleep(0.2)
    return reported is not None
