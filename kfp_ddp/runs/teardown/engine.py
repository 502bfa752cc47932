"""The `teardown` step: end the processes and jobs that a run left behind."""

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
from kfp_ddp.jobs.identity import RUN
from kfp_ddp.jobs.kinds import KINDS, Kind
from kfp_ddp.jobs.live_runs import live_runs
from kfp_ddp.jobs.local import GRACE_SECONDS
from kfp_ddp.jobs.supervision import Supervision
from kfp_ddp.k8s.api import Api, ApiError
from kfp_ddp.models.serving.rollout import take_back_of
from kfp_ddp.runs.notify import Notification, send
from kfp_ddp.runs.teardown.came_to import outcome
from kfp_ddp.runs.teardown.old_runs import InBucket, OnClaim, Runs, tasks


@step
def run(run_id: str, backend: str, job: Mapping[str, Any], work_dir: str, keep: int = 0) -> str:
    """End what the run left and say so in one line; nothing to do is fine.

    A model that it has on trial at a service gives way to the one before.

    Jobs that are over stay, for their logs, until their time to live has passed. Folders of runs
    before the newest `keep_runs` of `job`, else `keep`, are deleted unless they are in use, 0 for
    none.

    Raises:
        InputError: for a setting that cannot be used.
        JobError: when something is left that could not be ended.
    """
    check_run_id(run_id)
    work = folders.work_dir(work_dir)
    try:
        return _ended(run_id, backend, job, work, keep)
    finally:
        _tell(run_id, job, work)


def _ended(run_id: str, backend: str, job: Mapping[str, Any], work: str, keep: int) -> str:
    runs: Runs = InBucket(work) if is_remote(work) else OnClaim(Path(work))
    ended = [line for task in tasks(Path(work) / run_id) for line in _processes(task)]
    if {backend, job.get("evaluate_backend", "local")} != {"local"}:
        ended += _jobs(run_id)
    elif os.environ.get("KFP_POD_NAME"):  # on a cluster a run without jobs rolls out, too
        with contextlib.suppress(InputError):  # its pod may have no token
            ended += take_back_of(Api.connect(), run_id)
    # Last, and these alone: what else of the job cannot be used, train tells.
    told = {"keep_runs": keep, **job}
    supervision = {name: told[name] for name in Supervision.model_fields if name in told}
    if keep_runs := Supervision.create(**supervision).keep_runs:
        ended += _old_runs(runs, run_id, keep_runs)
    said = "; ".join(ended) or "nothing was left to end"
    print(said, flush=True)
    return said


def _tell(run_id: str, job: Mapping[str, Any], work: str) -> None:
    """Tell who wants to know what the run came to; whatever stands against it is said, no more."""
    try:
        notification = Notification.among(job)
        if notification.keys:
            found = outcome(run_id, work, notification.link(run_id))
            print(*send(notification, found), sep="\n", flush=True)
    except Exception as error:  # noqa: BLE001 - a run that ended well stays one
        print(f"warning: nobody was told of the run's end: {error}", flush=True)


def _processes(run_dir: Path) -> list[str]:
    pid = local.recorded(run_dir)
    if pid is None:
        return []
    local.end(pid, GRACE_SECONDS)
    local.forget(run_dir)
    return [f"ended process group {pid}"]


def _old_runs(runs: Runs, run_id: str, keep: int) -> list[str]:
    """Delete folders of runs that nobody uses, but for the newest `keep`; this run counts as one.

    In use is what somebody holds a lease of, and what a run that lives, or waits, will go on with.
    """
    last = runs.last()
    newest = sorted(last, key=lambda name: (name == run_id, last[name]), reverse=True)
    old = newest[keep:]
    if not old:
        return []
    try:
        alive = live_runs()
    except StorageError as error:
        return [f"kept {len(old)} older run(s): {error}"]
    unused = [name for name in old if not runs.in_use(name, alive)]
    left = sum(not runs.delete(name) for name in unused)
    said = [f"deleted {len(unused) - left} older run(s)"] if unused else []
    return said + ([f"could not delete {left}"] if left else [])


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
    """Delete the run's jobs of a kind that go on; a kind that is not there or not ours has none."""
    path, query = kind.path(api.namespace), {"labelSelector": f"{RUN}={run_id}"}
    try:
        found = api.call("GET", path, query=query, retry=True)["items"]
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise JobError(f"cannot list {kind.plural}: {error.message}") from error
    deleted = []
    for job in found:
        name = job["metadata"]["name"]
        if kind.state(job).over:
            continue
        try:
            api.delete(kind.path(api.namespace, name))
        except ApiError as error:
            raise JobError(f"cannot delete {kind.title} {name}: {error.message}") from error
        deleted.append(f"deleted {kind.title} {name}")
    return deleted
