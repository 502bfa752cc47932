"""Who uses a folder now, told by files that its users renew: what nobody holds may be removed.

A lease is a file `<holder>.<random>` in a folder of leases. It counts while it was renewed lately,
by the clock of the file system that it lies on, or while its holder is a run that still lives.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kfp_ddp.core.files import folder_below

RENEWED_EVERY = 60.0
LASTING_SECONDS = 900.0
"""How long a lease counts that nobody renews: a pod may lose its node's storage for minutes."""
_LEFT = "left"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def holding(folder: Path, holder: str) -> Iterator[None]:
    """Hold a lease for as long as the block runs; where none can be written there is none.

    Args:
        folder: The leases of what is used; made if need be.
        holder: Id of the run, or another name without a slash.
    """
    lease = folder / f"{holder}.{os.urandom(4).hex()}"
    over = threading.Event()
    renewer = threading.Thread(target=_renew, args=(lease, over), daemon=True)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _touch(lease)
        renewer.start()
    try:
        yield
    finally:
        over.set()
        if renewer.ident is not None:
            renewer.join()
        with contextlib.suppress(OSError):
            lease.unlink()


def leave(folder: Path, holder: str) -> None:
    """Write a lease that counts for as long as the run that it names lives; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _touch(folder / f"{holder}.{_LEFT}")


def held(folder: Path, alive: Callable[[str], bool] = lambda holder: False) -> list[str]:
    """Who holds leases in a folder; those that count no more are removed.

    Args:
        folder: The leases of what may be removed.
        alive: Whether a run still lives, for leases that nobody renewed lately.

    Raises:
        OSError: they cannot be read, which is no sign that there are none.
    """
    if not folder.is_dir():
        return []
    now = _now(folder)
    found = set()
    with folder_below(folder.parent, folder.name) as opened:
        for entry in list(os.scandir(opened)):
            holder, _, number = entry.name.rpartition(".")
            try:
                age = now - entry.stat(follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue
            if age < LASTING_SECONDS or alive(holder):
                found.add(holder)
            elif number:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=opened)
    return sorted(found)


def _renew(lease: Path, over: threading.Event) -> None:
    while not over.wait(RENEWED_EVERY):
        with contextlib.suppress(OSError):  # a disk that is away for a while
            _touch(lease)


def _touch(lease: Path) -> None:
    """Make the file if need be, and set its time by the clock of its file system."""
    with folder_below(lease.parent.parent, lease.parent.name) as folder:
        descriptor = os.open(lease.name, _NEW, 0o644, dir_fd=folder)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def _now(folder: Path) -> float:
    """The clock of the file system, or this machine's where nothing can be written."""
    probe = folder / f".now-{os.urandom(4).hex()}"
    try:
        _touch(probe)
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
