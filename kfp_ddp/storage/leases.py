"""Who uses a run's folder in a bucket now: names that its users renew, so that a list tells all.

A lease is an empty object `.leases/<holder>.<random>.<seconds since 1970>`; renewing is a new name
and the end of the old one.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.lease import LASTING_SECONDS, RENEWED_EVERY
from kfp_ddp.storage.destination import Destination, open_destination

LEASES, BEGUN = ".leases", ".begun"


@contextlib.contextmanager
def holding(address: str, holder: str) -> Iterator[None]:
    """Hold a lease of a run's folder while the block runs; where none can be put there is none.

    Args:
        address: Of the folder.
        holder: Id of the run, or another name without a slash.
    """
    where, over = open_destination(address), threading.Event()
    stem = f"{LEASES}/{holder}.{os.urandom(4).hex()}"
    name = _renewed(where, stem, "")
    renewer = threading.Thread(target=_renew, args=(where, stem, name, over), daemon=True)
    renewer.start()
    try:
        yield
    finally:
        over.set()
        renewer.join()


def begin(where: Destination) -> None:
    """Note that a task begins in its folder, which makes it a run's; raises KfpDdpError."""
    _leave(where, f"{BEGUN}/{time.time():.0f}")


def begun_at(names: Iterable[str]) -> float:
    """When a run began last, by the names below its folder; 0 for what is no run of ours."""
    times = [_seconds(name) for name in names if f"/{BEGUN}/" in f"/{name}"]
    return max(times, default=0.0)


def held(names: Iterable[str], alive: Callable[[str], bool]) -> bool:
    """Whether somebody holds a lease, by the names below a run's folder."""
    now = time.time()
    for name in names:
        if f"/{LEASES}/" in f"/{name}":
            holder = name.rpartition("/")[2].rsplit(".", 2)[0]
            if abs(now - _seconds(name)) < LASTING_SECONDS or alive(holder):
                return True
    return False


def _seconds(name: str) -> float:
    last = name.rpartition("/")[2].rpartition(".")[2]
    return float(last) if last.isdecimal() else 0.0


def _renew(where: Destination, stem: str, name: str, over: threading.Event) -> None:
    while not over.wait(RENEWED_EVERY):
        name = _renewed(where, stem, name)
    if name:
        with contextlib.suppress(KfpDdpError):
            where.delete(name)


def _renewed(where: Destination, stem: str, before: str) -> str:
    """The name of the lease from now on: the one before where the bucket is away for a while."""
    name = f"{stem}.{time.time():.0f}"
    try:
        _leave(where, name)
    except KfpDdpError:
        return before
    if before and before != name:
        with contextlib.suppress(KfpDdpError):
            where.delete(before)
    return name


def _leave(where: Destination, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty")
        empty.touch()
        where.put(empty, name)
