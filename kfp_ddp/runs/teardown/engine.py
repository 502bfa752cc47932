"""The `teardown` step: stop the processes and jobs of a run, and notify of its end."""

import contextlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import LABEL_VALUE, RUN_ID, RunFolder, check_run_id
from kfp_ddp.core.step import step
from kfp_ddp.jobs import local
from kfp_ddp.jobs.identity import RUN, live_runs
from kfp_ddp.jobs.kinds import KINDS, Kind
from kfp_ddp.jobs.launch_spec import Supervision
from kfp_ddp.k8s.api import Api, ApiError
from kfp_ddp.models.serving.rollout import take_back_of
from kfp_ddp.runs.notify import Notification, send
from kfp_ddp.runs.teardown.outcome import outcome
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store


@step
def run(run_id: str, backend: str, job: Mapping[str, Any], work_dir: str, keep: int = 0) -> str:
    """Stop what the run left and return that as one line; JobError if something cannot be stopped.

    A model that the run has on trial at a service is rolled back. Finished jobs remain, for their
    logs, until their time to live has passed. Of the folders of runs the newest `keep_runs` of
    `job`, else `keep`, and those in use are retained; 0 retains all.
    """
    check_run_id(run_id)
    work = folders.work_dir(work_dir)
    try:
        return _ended(run_id, backend, job, work, keep)
    finally:
        _notify(run_id, job, work)


def _ended(run_id: str, backend: str, job: Mapping[str, Any], work: str, keep: int) -> str:
    runs = InBucket(work) if is_remote(work) else OnClaim(Path(work))
    ended = []
    for task in tasks(Path(work) / run_id):
        if (pid := local.recorded(task)) is not None:
            local.end(pid, local.GRACE_SECONDS)
            local.forget(task)
            ended.append(f"ended process group {pid}")
    if {backend, job.get("evaluate_backend", "local")} != {"local"}:
        ended += _jobs(run_id)
    elif os.environ.get("KFP_POD_NAME"):  # a run without jobs may deploy a model, too
        with contextlib.suppress(InputError):  # its pod may have no token
            ended += take_back_of(Api.connect(), run_id)
    # Other invalid settings of the job are errors of the step train.
    settings = {"keep_runs": keep, **job}
    supervision = {name: settings[name] for name in Supervision.model_fields if name in settings}
    if keep_runs := Supervision.create(**supervision).keep_runs:
        ended += _old_runs(runs, run_id, keep_runs)
    summary = "; ".join(ended) or "nothing was left to end"
    print(summary, flush=True)
    return summary


def _notify(run_id: str, job: Mapping[str, Any], work: str) -> None:
    """Notify of the run's end; an error is only a warning."""
    try:
        notification = Notification.among(job)
        if notification.keys:
            result = outcome(run_id, work, notification.link(run_id))
            print(*send(notification, result), sep="\n", flush=True)
    except Exception as error:  # noqa: BLE001 - a notification never fails a run
        print(f"warning: no notification of the run's end was sent: {error}", flush=True)


def _old_runs(runs: "InBucket | OnClaim", run_id: str, keep: int) -> list[str]:
    """Delete unused folders of runs, except the newest `keep`, of which this run is one.

    A folder is in use while it has a lease, or while its run is running or pending.
    """
    last = runs.last()
    newest = sorted(last, key=lambda name: (name == run_id, last[name]), reverse=True)
    old = newest[keep:]
    if not old:
        return []
    try:
        alive = live_runs()
    except StorageError as error:
        return [f"retained {len(old)} older run(s): {error}"]
    unused = [name for name in old if not runs.in_use(name, alive)]
    left = sum(not runs.delete(name) for name in unused)
    deleted = [f"deleted {len(unused) - left} older run(s)"] if unused else []
    return deleted + ([f"could not delete {left}"] if left else [])


def _jobs(run_id: str) -> list[str]:
    if not LABEL_VALUE.fullmatch(run_id):
        raise InputError(f"run_id={run_id!r} is not a run's id; pass PIPELINE_JOB_ID_PLACEHOLDER")
    try:
        api = Api.connect()
    except InputError as error:
        return [f"no jobs were looked for: {error}"]
    ended = [line for kind in KINDS.values() for line in delete_jobs(api, kind, run_id)]
    return ended + take_back_of(api, run_id)


def delete_jobs(api: Api, kind: Kind, run_id: str) -> list[str]:
    """Delete the run's unfinished jobs of a kind; a kind that is missing or forbidden has none."""
    path, query = kind.path(api.namespace), {"labelSelector": f"{RUN}={run_id}"}
    try:
        jobs = api.call("GET", path, query=query, retry=True)["items"]
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise JobError(f"cannot list {kind.plural}: {error.message}") from error
    deleted = []
    for job in jobs:
        name = job["metadata"]["name"]
        if kind.state(job).over:
            continue
        try:
            api.delete(kind.path(api.namespace, name))
        except ApiError as error:
            raise JobError(f"cannot delete {kind.title} {name}: {error.message}") from error
        deleted.append(f"deleted {kind.title} {name}")
    return deleted


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
    folders = map(RunFolder, tasks(folder))
    return any(os.path.exists(task.metrics) or os.path.exists(task.leases) for task in folders)


def _last_written(run: Path) -> float:
    """Return the newest time of the files of a run's tasks, in seconds since 1970."""
    times = [0.0]
    for task in tasks(run):
        try:
            times += [path.lstat().st_mtime for path in (task, *task.iterdir())]
        except OSError:
            continue  # deleted or renamed by a running task
    return max(times)
