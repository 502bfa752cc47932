"""The `teardown` step: stop the processes and jobs of a run, and notify of its end."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, JobError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import LABEL_VALUE, check_run_id
from kfp_ddp.core.step import step
from kfp_ddp.jobs import local
from kfp_ddp.jobs.identity import RUN, live_runs
from kfp_ddp.jobs.kinds import KINDS, Kind
from kfp_ddp.jobs.launch_spec import Supervision
from kfp_ddp.jobs.local import GRACE_SECONDS
from kfp_ddp.k8s.api import Api, ApiError
from kfp_ddp.models.serving.rollout import take_back_of
from kfp_ddp.runs.notify import Notification, send
from kfp_ddp.runs.teardown.old_runs import InBucket, OnClaim, tasks
from kfp_ddp.runs.teardown.outcome import outcome


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
    ended = [line for task in tasks(Path(work) / run_id) for line in _processes(task)]
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


def _processes(run_dir: Path) -> list[str]:
    pid = local.recorded(run_dir)
    if pid is None:
        return []
    local.end(pid, GRACE_SECONDS)
    local.forget(run_dir)
    return [f"ended process group {pid}"]


def _old_runs(runs: InBucket | OnClaim, run_id: str, keep: int) -> list[str]:
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
