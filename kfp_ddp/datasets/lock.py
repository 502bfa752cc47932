"""Lock of a target: one sync at a time writes to it."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.files import folder_below
from kfp_ddp.datasets.context import Watch
from kfp_ddp.datasets.disk import unwritable


@contextlib.contextmanager
def locked(root: Path, wait: float, what: str, watch: Watch) -> Iterator[bool]:
    """Lock the target against other syncs, and yield whether it had to wait.

    The kernel releases the lock if this process dies. `what` is the source, shown to syncs that
    wait. Raises StorageError if another sync has the lock for more than `wait` seconds.
    """
    try:
        descriptor = _opened(root, "lock")
    except OSError as error:
        raise unwritable(root / ".kfsync" / "lock", error) from error
    try:
        waited = _acquire(descriptor, root, wait, watch)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        _write_holder(descriptor, f"{socket.gethostname()} syncs {what} since {since}")
        yield waited
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def briefly(root: Path) -> Iterator[None]:
    """Lock the handing out and removal of versions for a moment; raises StorageError without flock.

    Without the right to write there is no lock, as no version can be handed out or removed.
    """
    try:
        descriptor = _opened(root, "handing-out")
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise _no_locks(root, error) from error
        yield
    finally:
        os.close(descriptor)


def _opened(root: Path, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with folder_below(root, ".kfsync") as work:
        return os.open(name, flags, 0o644, dir_fd=work)


def _no_locks(root: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{root} does not support locks ({error.strerror}); use a file system with flock"
    )


def _acquire(descriptor: int, root: Path, wait: float, watch: Watch) -> bool:
    """Lock the file; return whether that had to wait."""
    deadline = time.monotonic() + wait
    reported = None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"another sync is writing {root} ({holder}) and did not end in "
                    f"{wait:.0f} s; wait for it, or give lock_wait more seconds"
                ) from None
            if holder != reported:
                watch(f"waiting for another sync of {root}: {holder}", None, 0, 0)
                reported = holder
            time.sleep(0.2)
        except OSError as error:
            raise _no_locks(root, error) from error
        else:
            return reported is not None


def _write_holder(descriptor: int, holder: str) -> None:
    """Write the holder of the lock, for syncs that wait; errors are ignored."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode("utf-8", "replace"), 0)
        os.fsync(descriptor)  # who waits may be on another node


def _read_holder(descriptor: int) -> str:
    text = os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "unknown"
