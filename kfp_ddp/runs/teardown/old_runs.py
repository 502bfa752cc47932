"""Folders of earlier runs, on the work PVC or in a bucket."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.run_folder import RUN_ID, RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store


class OnClaim:
    """Folders of runs in a folder, such as a PVC."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def last(self) -> dict[str, float]:
        """Return the newest time of the files of each run's tasks."""
        if not self._work.exists():
            return {}
        return {run.name: _last_written(run) for run in self._work.iterdir() if _is_run(run)}

    def in_use(self, run_id: str, alive: Callable[[str], bool]) -> bool:
        """Check leases and local processes."""
        try:
            return alive(run_id) or any(
                leases.folder_holders(RunFolder(task).leases, alive) or local.recorded(task)
                for task in tasks(self._work / run_id)
            )
        except OSError:
            return True

    def delete(self, run_id: str) -> bool:
        """Delete all files."""
        shutil.rmtree(self._work / run_id, ignore_errors=True)
        return not (self._work / run_id).exists()


class InBucket:
    """Folders of runs in a bucket, read by one listing."""

    def __init__(self, work: str) -> None:
        self._where = open_store(work)
        self._names: dict[str, list[str]] = defaultdict(list)

    def last(self) -> dict[str, float]:
        """Return when a task of each run started last; other folders are ignored."""
        self._names.clear()
        for name, _ in self._where.list(""):
            self._names[name.partition("/")[0]].append(name)
        begun = {run: leases.begun_at(names) for run, names in self._names.items()}
        return {run: time for run, time in begun.items() if time and RUN_ID.fullmatch(run)}

    def in_use(self, run_id: str, alive: Callable[[str], bool]) -> bool:
        """Check leases."""
        return alive(run_id) or leases.has_holder(self._names[run_id], alive)

    def delete(self, run_id: str) -> bool:
        """Delete all files, its start marker last, so that a partial deletion is repeated."""
        try:
            for name in sorted(self._names[run_id], key=lambda name: f"/{leases.BEGUN}/" in name):
                self._where.delete(name)
        except KfpDdpError:
            return False
        return True


def tasks(run: Path) -> list[Path]:
    """Return the folders of a run's tasks, and the run's own, which older versions wrote to.

    Folders that cannot be read, such as lost+found, or that disappear are ignored.
    """
    try:
        if run.is_symlink() or not run.is_dir():
            return []
        return [run, *(path for path in run.iterdir() if path.is_dir() and not path.is_symlink())]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any(_exists(RunFolder(task).metrics, RunFolder(task).leases) for task in tasks(folder))


def _exists(*paths: Path) -> bool:
    try:
        return any(path.exists() for path in paths)
    except OSError:
        return False


def _last_written(run: Path) -> float:
    """Return the newest time of the files of a run's tasks, in seconds since 1970."""
    times = [0.0]
    for task in tasks(run):
        try:
            times += [path.lstat().st_mtime for path in (task, *task.iterdir())]
        except OSError:
            continue  # deleted or renamed by a running task
    return max(times)
