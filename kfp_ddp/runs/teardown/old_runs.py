"""The folders of earlier runs, on the work claim or below a bucket's prefix."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kfp_ddp.core import lease
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.run_folder import RUN_ID, RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.storage import leases
from kfp_ddp.storage.destination import open_destination


class Runs(Protocol):
    """Where folders of runs lie."""

    def last(self) -> dict[str, float]:
        """The runs, and when each was at work last, in seconds since 1970."""

    def in_use(self, run_id: str, alive: Callable[[str], bool]) -> bool:
        """Whether somebody holds it, or it lives."""

    def delete(self, run_id: str) -> bool:
        """Remove its folder; whether it is gone."""


class OnClaim:
    """Folders of runs in a folder."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def last(self) -> dict[str, float]:
        """The newest time of what lies in the folders of a run's tasks."""
        if not self._work.exists():
            return {}
        return {each.name: _last_written(each) for each in self._work.iterdir() if _is_run(each)}

    def in_use(self, run_id: str, alive: Callable[[str], bool]) -> bool:
        """By leases, and by processes of this machine."""
        return _in_use(self._work / run_id, alive)

    def delete(self, run_id: str) -> bool:
        """All of it."""
        shutil.rmtree(self._work / run_id, ignore_errors=True)
        return not (self._work / run_id).exists()


class InBucket:
    """Folders of runs below an address, by one listing."""

    def __init__(self, work: str) -> None:
        self._where = open_destination(work)
        self._names: dict[str, list[str]] = defaultdict(list)

    def last(self) -> dict[str, float]:
        """When a task of each run began last; what no task of ours began in is no run of ours."""
        self._names.clear()
        for name, _ in self._where.list(""):
            self._names[name.partition("/")[0]].append(name)
        begun = {run: leases.begun_at(names) for run, names in self._names.items()}
        return {run: time for run, time in begun.items() if time and RUN_ID.fullmatch(run)}

    def in_use(self, run_id: str, alive: Callable[[str], bool]) -> bool:
        """By leases."""
        return alive(run_id) or leases.held(self._names[run_id], alive)

    def delete(self, run_id: str) -> bool:
        """All of it, what makes it a run last: a removal that is cut off is done again."""
        try:
            for name in sorted(self._names[run_id], key=lambda name: f"/{leases.BEGUN}/" in name):
                self._where.delete(name)
        except KfpDdpError:
            return False
        return True


def tasks(run: Path) -> list[Path]:
    """The folders of a run's tasks, and that of the run, which was its one task's once.

    What cannot be looked into, as lost+found, or goes away meanwhile is no run of ours.
    """
    try:
        if run.is_symlink() or not run.is_dir():
            return []
        return [run, *(each for each in run.iterdir() if each.is_dir() and not each.is_symlink())]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any(_exists(RunFolder(each).metrics, RunFolder(each).leases) for each in tasks(folder))


def _exists(*paths: Path) -> bool:
    try:
        return any(path.exists() for path in paths)
    except OSError:
        return False


def _last_written(run: Path) -> float:
    """The newest time of what lies in the folders of a run's tasks, in seconds since 1970."""
    found = [0.0]
    for task in tasks(run):
        try:
            found += [path.lstat().st_mtime for path in (task, *task.iterdir())]
        except OSError:
            continue  # it goes away, or is renamed, by a run that goes on
    return max(found)


def _in_use(run: Path, alive: Callable[[str], bool]) -> bool:
    try:
        return alive(run.name) or any(
            lease.held(RunFolder(task).leases, alive) or local.recorded(task) for task in tasks(run)
        )
    except OSError:
        return True
