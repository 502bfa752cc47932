"""The `teardown` step: end the processes and jobs that a run left behind."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.base import folders, lease
from kfp_ddp.base.errors import InputError, JobError, StorageError
from kfp_ddp.base.run_folder import LABEL_VALUE, RunFolder, check_run_id
from kfp_ddp.components.shared.cluster.api import Api, ApiError
from kfp_ddp.components.shared.cluster.live_runs import live_runs
from kfp_ddp.components.shared.launch import local_processes
from kfp_ddp.components.shared.launch.identity import RUN
from kfp_ddp.components.shared.launch.job_state import state
from kfp_ddp.components.shared.launch.local_ranks import GRACE_SECONDS
from kfp_ddp.components.shared.launch.specification.kinds import KINDS, Kind
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.train.settings import Supervision


@step
def run(run_id: str, backend: str, job: Mapping[str, Any], work_dir: str) -> str:
    """End what the run left and say so in one line; nothing to do is fine.

    Jobs that are over stay, for their logs, until their time to live has passed. Folders of runs
    before the newest `keep_runs` of `job` are deleted unless they are in use, 0 for none.

    Raises:
        InputError: for a setting that cannot be used.
        JobError: when something is left that could not be ended.
    """
    check_run_id(run_id)
    runs = Path(folders.work_dir(work_dir))
    ended = [line for task in _tasks(runs / run_id) for line in _processes(task)]
    if backend != "local":
        ended += _jobs(run_id)
    # Last, and these alone: what else of the job cannot be used, train tells.
    supervision = {name: job[name] for name in Supervision.model_fields if name in job}
    if keep_runs := Supervision.create(**supervision).keep_runs:
        ended += _old_runs(runs, run_id, keep_runs)
    said = "; ".join(ended) or "nothing was left to end"
    print(said, flush=True)
    return said


def _processes(run_dir: Path) -> list[str]:
    pid = local_processes.recorded(run_dir)
    if pid is None:
        return []
    local_processes.end(pid, GRACE_SECONDS)
    local_processes.forget(run_dir)
    return [f"ended process group {pid}"]


def _old_runs(work_dir: Path, run_id: str, keep: int) -> list[str]:
    """Delete folders of runs that nobody uses, but for the newest `keep`; this run counts as one.

    In use is what somebody holds a lease of, and what a run that lives, or waits, will go on with.
    """
    last = {folder: _last_written(folder) for folder in work_dir.iterdir() if _is_run(folder)}
    newest = sorted(last, key=lambda folder: (folder.name == run_id, last[folder]), reverse=True)
    old = newest[keep:]
    if not old:
        return []
    try:
        alive = live_runs()
    except StorageError as error:
        return [f"kept {len(old)} older run(s): {error}"]
    unused = [folder for folder in old if not _in_use(folder, alive)]
    for folder in unused:
        shutil.rmtree(folder, ignore_errors=True)
    left = sum(folder.exists() for folder in unused)
    said = [f"deleted {len(unused) - left} older run(s)"] if unused else []
    return said + ([f"could not delete {left}"] if left else [])


def _tasks(run: Path) -> list[Path]:
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
    return any(_exists(RunFolder(each).metrics, RunFolder(each).leases) for each in _tasks(folder))


def _exists(*paths: Path) -> bool:
    try:
        return any(path.exists() for path in paths)
    except OSError:
        return False


def _last_written(run: Path) -> float:
    """The newest time of what lies in the folders of a run's tasks, in seconds since 1970."""
    found = [0.0]
    for task in _tasks(run):
        try:
            found += [path.lstat().st_mtime for path in (task, *task.iterdir())]
        except OSError:
            continue  # it goes away, or is renamed, by a run that goes on
    return max(found)


def _in_use(run: Path, alive: Callable[[str], bool]) -> bool:
    try:
        return alive(run.name) or any(
            lease.held(RunFolder(task).leases, alive) or local_processes.recorded(task)
            for task in _tasks(run)
        )
    except OSError:
        return True


def _jobs(run_id: str) -> list[str]:
    if not LABEL_VALUE.fullmatch(run_id):
        raise InputError(f"run_id={run_id!r} is not a run's id; pass PIPELINE_JOB_ID_PLACEHOLDER")
    try:
        api = Api.connect()
    except InputError as error:
        return [f"no jobs were looked for: {error}"]
    return [line for kind in KINDS.values() for line in _jobs_of(api, kind, run_id)]


def _jobs_of(api: Api, kind: Kind, run_id: str) -> list[str]:
    """Delete the run's jobs of a kind that go on; a kind that is not there or not ours has none."""
    path, query = kind.path(api.namespace), {"labelSelector": f"{RUN}={run_id}"}
    try:
        found = api.patient(lambda: api.call("GET", path, query=query))["items"]
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise JobError(f"cannot list {kind.plural}: {error.message}") from error
    deleted = []
    for job in found:
        name = job["metadata"]["name"]
        if state(job).over:
            continue
        try:
            api.delete(kind.path(api.namespace, name))
        except ApiError as error:
            raise JobError(f"cannot delete {kind.title} {name}: {error.message}") from error
        deleted.append(f"deleted {kind.title} {name}")
    return deleted
