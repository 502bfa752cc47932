"""Leases on folders, which a process renews while it uses them; without one they may be deleted.

In a folder a lease is a file `<holder>.<random>` with the time of its renewal, in a bucket an empty
object `.leases/<holder>.<random>.<seconds since 1970>`, so that one listing shows all. It is valid
for a time after its renewal, or while its holder is a run that is alive.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.files import closing_descriptor, folder_below
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

RENEWED_EVERY = 60.0
BUCKET_RENEWED_EVERY = 300.0
"""Less often: a bucket with versions keeps the object of each renewal."""
LASTING_SECONDS = 900.0
"""How long a lease is valid without renewal: a pod may lose its node's storage for minutes."""
LEASES = ".leases"
BEGUN = ".begun"
_PERMANENT = "left"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def folder_lease(folder: Path, holder: str) -> Iterator[None]:
    """Hold a lease of `holder`, a run's id or a name, in the block; none if unwritable."""
    lease = folder / f"{holder}.{os.urandom(4).hex()}"
    renewals = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _touch(lease)
        renewals.enter_context(_every(RENEWED_EVERY, lambda: _touch(lease)))
    try:
        with renewals:
            yield
    finally:
        with contextlib.suppress(OSError):
            lease.unlink()


@contextlib.contextmanager
def bucket_lease(address: str, holder: str) -> Iterator[None]:
    """Hold a lease of the run's folder at an address while the block runs; see `folder_lease`."""
    where = open_store(address)
    stem = f"{LEASES}/{holder}.{os.urandom(4).hex()}"
    name = ""

    def renew() -> None:
        nonlocal name
        before = name
        renewed = f"{stem}.{time.time():.0f}"
        with contextlib.suppress(KfpDdpError):  # a bucket that is unavailable for a while
            where.write(renewed, b"")
            name = renewed
            if before not in ("", renewed):
                where.delete(before)

    renew()
    try:
        with _every(BUCKET_RENEWED_EVERY, renew):
            yield
    finally:
        if name:
            with contextlib.suppress(KfpDdpError):
                where.delete(name)


def write_permanent(folder: Path, holder: str) -> None:
    """Write a lease that is valid while the run of its name is alive; raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _touch(folder / f"{holder}.{_PERMANENT}")


def folder_holders(folder: Path, alive: Callable[[str], bool] = lambda holder: False) -> list[str]:
    """Return the holders of valid leases; remove expired ones. Raises OSError if unreadable."""
    if not folder.is_dir():
        return []
    now = _now(folder)
    holders = set()
    with folder_below(folder.parent, folder.name) as descriptor:
        for entry in list(os.scandir(descriptor)):
            holder, _, number = entry.name.rpartition(".")
            try:
                age = now - entry.stat(follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue
            if age < LASTING_SECONDS or alive(holder):
                holders.add(holder)
            elif number:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=descriptor)
    return sorted(holders)


def has_holder(names: Iterable[str], alive: Callable[[str], bool]) -> bool:
    """Return whether there is a valid lease among the names below a run's folder in a bucket."""
    now = time.time()
    for name in names:
        if f"/{LEASES}/" in f"/{name}":
            holder = name.rpartition("/")[2].rsplit(".", 2)[0]
            if abs(now - _seconds(name)) < LASTING_SECONDS or alive(holder):
                return True
    return False


def mark_begin(where: Store) -> None:
    """Record that a task begins in its folder, which makes it a run's; raise KfpDdpError."""
    where.write(f"{BEGUN}/{time.time():.0f}", b"")


def begun_at(names: Iterable[str]) -> float:
    """Return when a run began last, by the names below its folder; 0 for what is not a run."""
    return max((_seconds(name) for name in names if f"/{BEGUN}/" in f"/{name}"), default=0.0)


@contextlib.contextmanager
def _every(seconds: float, renew: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        while not over.wait(seconds):
            with contextlib.suppress(OSError):  # a disk that is away for a while
                renew()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _seconds(name: str) -> float:
    last = name.rpartition("/")[2].rpartition(".")[2]
    return float(last) if last.isdecimal() else 0.0


def _touch(lease: Path) -> None:
    """Make the file if it does not exist, and set its time by the clock of its file system."""
    with folder_below(lease.parent.parent, lease.parent.name) as folder:
        descriptor = os.open(lease.name, _NEW, 0o644, dir_fd=folder)
        with closing_descriptor(descriptor):
            os.utime(descriptor)


def _now(folder: Path) -> float:
    """Return the time of the file system, or of this machine where nothing can be written."""
    probe = folder / f".now-{os.urandom(4).hex()}"
    try:
        _touch(probe)
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
