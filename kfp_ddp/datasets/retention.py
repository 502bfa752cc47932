"""Which versions go: those that nobody uses any more."""

import time
from collections.abc import Callable
from pathlib import Path

from kfp_ddp.core import lease
from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.files import folder_below
from kfp_ddp.datasets.lock import briefly
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.result import Result
from kfp_ddp.datasets.versions import Store


def collect(store: Store, options: Options, result: Result) -> None:
    """Remove all but the `keep_versions` of a dataset that were handed out last.

    Never the current one, nor that of the result, nor one that somebody holds a lease of, nor one
    that was handed out in the last `keep_hours`. Notes in the result what went, and why nothing
    could where it cannot be seen which runs live.
    """
    if options.keep_versions <= 0:
        return
    others = [each for each in store.versions_of(result.dataset) if each[1] != result.path]
    latest = time.time_ns() - int(options.keep_hours * 3600e9)
    old = [(when, path) for when, path in others[options.keep_versions - 1 :] if when < latest]
    if not old:
        return
    try:
        alive = _live_runs()
    except StorageError as error:
        result.kept_why = str(error)
        return
    for when, path in old:
        with briefly(store.root):
            if path == store.current() or _used(store, path, when, alive):
                continue
            gone = [store.take_away(each) for each in (path, store.leases(path.name))]
        store.clear(gone)
        result.removed_versions.append(path.name)


def _used(store: Store, path: Path, when: int, alive: Callable[[str], bool]) -> bool:
    """Whether a version was handed out since we looked, or is held."""
    leases = store.leases(path.name)
    try:
        if store.handed_out(path) != when:
            return True
        with folder_below(store.root, leases.relative_to(store.root)):
            return bool(lease.held(leases, alive))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _live_runs() -> Callable[[str], bool]:
    from kfp_ddp.jobs.live_runs import live_runs  # most syncs remove nothing

    return live_runs()
