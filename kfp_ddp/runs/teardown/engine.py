"""The `teardown` step: stop the processes and jobs of a run, and notify of how it ended."""

import contextlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import LABEL_VALUE, RUN_ID, RunFolder, check_run_id
from kfp_ddp.core.step import last_error, step
from kfp_ddp.jobs import local
from kfp_ddp.jobs.ending import terminated
from kfp_ddp.jobs.identity import KFP_RUN, RUN
from kfp_ddp.jobs.kinds import KINDS, Kind
from kfp_ddp.jobs.launch_spec import Supervision
from kfp_ddp.jobs.live_runs import live_runs
from kfp_ddp.k8s.api import Api, ApiError, Object, Refused
from kfp_ddp.k8s.objects import phase
from kfp_ddp.k8s.pods import failure_reason, node_of, task_of, terminations
from kfp_ddp.k8s.resource import PODS, WORKFLOWS
from kfp_ddp.rollout.rollout import roll_back_run
from kfp_ddp.runs.notify import Notification, Outcome, send
from kfp_ddp.runs.record import TaskRecord, files_of_records, read_run
from kfp_ddp.runs.workspace import fetch, is_plain
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store


@step
def run(run_id: str, backend: str, job: Mapping[str, Any], work_dir: str, keep: int = 0) -> str:
    """Stop what the run left and return that as one line; ApiError if something cannot be stopped.

    Of folders of runs the newest `keep_runs` of `job`, else `keep`, are retained; 0 retains all.
    """
    check_run_id(run_id)
    work = folders.work_dir(work_dir)
    try:
        return _ended(run_id, backend, job, work, keep)
    finally:
        _notify(run_id, job, work)


def _ended(run_id: str, backend: str, job: Mapping[str, Any], work: str, keep: int) -> str:
    runs = InBucket(work) if is_remote(work) else OnClaim(Path(work))
    ended = _end_processes(Path(work) / run_id)
    if {backend, job.get("evaluate_backend", "local")} != {"local"}:
        ended += _jobs(run_id)
    elif os.environ.get("KFP_POD_NAME"):  # a run without jobs may deploy a model, too
        with contextlib.suppress(InputError):  # its pod may have no token
            ended += roll_back_run(Api.connect(), run_id)
    # Other invalid settings of the job are errors of the step train.
    settings = {"keep_runs": keep, **job}
    supervision = {name: settings[name] for name in Supervision.model_fields if name in settings}
    if keep_runs := Supervision.create(**supervision).keep_runs:
        ended += _old_runs(runs, run_id, keep_runs)
    summary = "; ".join(ended) or "nothing to clean up"
    log.info(summary)
    return summary


def _end_processes(run: Path) -> list[str]:
    """End the local processes of a run's tasks."""
    ended = []
    for task in tasks(run):
        process = local.recorded(task)
        if process is None:
            continue
        local.end(process, local.GRACE_SECONDS)
        RunFolder(task).process.unlink(missing_ok=True)
        ended.append(f"ended process group {process}")
    return ended


def _notify(run_id: str, job: Mapping[str, Any], work: str) -> None:
    """Notify of the run's end; an error is only a warning."""
    try:
        notification = Notification.among(job)
        if notification.keys:
            result = outcome(run_id, work, notification.link(run_id))
            print(*send(notification, result), sep="\n", flush=True)
    except Exception as error:  # noqa: BLE001 - a notification never fails a run
        log.warning(f"no notification of the run's end was sent: {error}")


def _old_runs(runs: "InBucket | OnClaim", run_id: str, keep: int) -> list[str]:
    """Delete folders of runs except the newest `keep`, and those with a lease or a live run."""
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
    lines = []
    if unused:
        lines.append(f"deleted {len(unused) - left} older run(s)")
    if left:
        lines.append(f"could not delete {left}")
    return lines


def _jobs(run_id: str) -> list[str]:
    if not LABEL_VALUE.fullmatch(run_id):
        raise InputError(f"run_id={run_id!r} is not a run's id; pass PIPELINE_JOB_ID_PLACEHOLDER")
    try:
        api = Api.connect()
    except InputError as error:
        return [f"no jobs were looked for: {error}"]
    ended = [line for kind in KINDS.values() for line in delete_jobs(api, kind, run_id)]
    return ended + roll_back_run(api, run_id)


def delete_jobs(api: Api, kind: Kind, run_id: str) -> list[str]:
    """Delete the run's unfinished jobs of a kind; a kind that is missing or forbidden has none."""
    try:
        jobs = api.list_objects(kind.resource, {"labelSelector": f"{RUN}={run_id}"}, retry=True)
    except Refused:
        return []
    deleted = []
    for job in jobs:
        name = job["metadata"]["name"]
        if kind.state(job).over:
            continue
        api.delete(kind.resource, name)
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
            if alive(run_id):
                return True
            for task in tasks(self._work / run_id):
                if leases.folder_holders(RunFolder(task).leases, alive) or local.recorded(task):
                    return True
        except OSError:
            return True
        return False

    def delete(self, run_id: str) -> bool:
        """Delete all files."""
        shutil.rmtree(self._work / run_id, ignore_errors=True)
        return not (self._work / run_id).exists()


class InBucket:
    """Folders of runs in a bucket."""

    def __init__(self, work: str) -> None:
        self._where = open_store(work)

    def last(self) -> dict[str, float]:
        """Return when a task of each run started last; other folders are ignored."""
        runs: dict[str, list[str]] = defaultdict(list)
        for name in self._names(""):
            runs[name.partition("/")[0]].append(name)
        begun = {run: leases.begun_at(runs[run]) for run in filter(RUN_ID.fullmatch, runs)}
        return {run: time for run, time in begun.items() if time}

    def in_use(self, run_id: str, alive: Callable[[str], bool]) -> bool:
        """Check leases, as they are now."""
        with contextlib.suppress(KfpDdpError):
            return alive(run_id) or leases.has_holder(self._names(f"{run_id}/"), alive)
        return True

    def delete(self, run_id: str) -> bool:
        """Delete all files, its start marker last, so that a partial deletion is repeated."""
        with contextlib.suppress(KfpDdpError):
            names = self._names(f"{run_id}/")
            for name in sorted(names, key=lambda name: f"/{leases.BEGUN}/" in name):
                self._where.delete(name)
            return True
        return False

    def _names(self, prefix: str) -> list[str]:
        return [name for name, _ in self._where.list(prefix)]


def tasks(run: Path) -> list[Path]:
    """Return the readable folders of a run's tasks, and its own, which older versions wrote to."""
    with contextlib.suppress(OSError):
        if _is_folder(run):
            return [run, *filter(_is_folder, run.iterdir())]
    return []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_run(folder: Path) -> bool:
    folders = map(RunFolder, tasks(folder))
    files = (path for task in folders for path in (task.metrics, task.leases))
    return any(map(os.path.exists, files))


def _last_written(run: Path) -> float:
    """Return the newest time of the files of a run's tasks, in seconds since 1970."""
    times = [0.0]
    for task in tasks(run):
        try:
            times += [path.lstat().st_mtime for path in (task, *task.iterdir())]
        except OSError:
            continue  # deleted or renamed by a running task
    return max(times)


LARGEST = 64 << 20
ADVANCE = ("trained", "failed", "not blessed", "blessed", "exported", "promoted")
"""States of a training; of several in a run, the most advanced counts."""


def outcome(run_id: str, work: str, address: str) -> Outcome:
    """Return how a run ended; `address` is its page in the UI, '' if not known."""
    fields: dict[str, Any] = {"run_id": run_id, "address": address}
    records = _records(f"{work.rstrip('/')}/{run_id}")
    states = [state for state in map(_state, records) if state]
    unchanged: dict[str, Any] = {"state": "unchanged"}
    last = max(states, key=_advance, default=unchanged)
    fields |= last
    try:
        api = Api.connect()
    except InputError:
        pass  # no cluster, so no pods
    else:
        if _cancelled(api, run_id):
            return Outcome(**fields | {"state": "cancelled", "reason": ""})
        if failed := _failed(api, run_id):
            fields |= {"state": "failed", "step": failed[0], "reason": failed[1]}
    return Outcome(**fields)


def _advance(fields: dict[str, Any]) -> int:
    return ADVANCE.index(fields["state"])


def _records(run: str) -> list[TaskRecord]:
    """Return the records of a run's tasks; what is not plain, too large or unreadable is absent."""
    where = open_store(run)
    small = [name for name, size in where.list("") if size <= LARGEST]
    names = filter(is_plain, small)
    with tempfile.TemporaryDirectory() as scratch:
        for name in files_of_records(names):
            with contextlib.suppress(KfpDdpError, OSError):
                fetch(where, [name], Path(scratch))
        return read_run(Path(scratch))


def _state(record: TaskRecord) -> dict[str, Any]:
    """Return the fields of the outcome that a task gives; none if nothing came of it."""
    verdict = record.verdict
    exported = record.exported
    if not exported and "blessed" not in verdict:
        return _state_of_training(record)
    if exported:
        state = "promoted" if exported.get("champion") else "exported"
        reason = str(exported.get("champion_stays", ""))
    else:
        state = "blessed" if verdict["blessed"] else "not blessed"
        reason = str(verdict.get("reason", "")).removeprefix(f"{state}: ")
    return {
        "state": state,
        "reason": reason,
        "model": str(exported.get("name") or verdict.get("model", "")),
        "accuracy": verdict.get("accuracy"),
        "champion": str(verdict.get("champion", "")),
        "champion_accuracy": verdict.get("champion_accuracy"),
        "bundle": str(exported.get("uri", "")),
        "dataset": str(verdict.get("dataset_digest", "")),
    }


def _state_of_training(record: TaskRecord) -> dict[str, Any]:
    if record.failure:
        return {"state": "failed", "step": record.task, "reason": record.failure.summary}
    return {"state": "trained"} if record.events else {}


def _cancelled(api: Api, run_id: str) -> bool:
    with contextlib.suppress(ApiError):
        workflows = api.list_objects(WORKFLOWS, {"labelSelector": f"{KFP_RUN}={run_id}"})
        return any(map(terminated, workflows))
    return False


def _failed(api: Api, run_id: str) -> tuple[str, str] | None:
    """Return the first step that failed and why; None for none, or if pods cannot be listed."""
    try:
        pods = api.list_objects(PODS, {"labelSelector": f"{KFP_RUN}={run_id}"})
    except ApiError:
        return None
    last: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", "")):
        last[_node(pod)] = pod
    failed = [pod for pod in last.values() if phase(pod) == "Failed"]
    if not failed:
        return None
    first = min(failed, key=_ended_at)
    return task_of(_node(first)), _why(api, first)


def _node(pod: Object) -> str:
    return node_of(pod) or str(pod["metadata"]["name"])


def _ended_at(pod: Object) -> str:
    return max((str(state.get("finishedAt", "")) for state in terminations(pod)), default="")


def _why(api: Api, pod: Object) -> str:
    """Return the error in the step's log, else the reason that Kubernetes gives."""
    path = f"{PODS.path(api.namespace, pod['metadata']['name'])}/log"
    names = [container["name"] for container in pod["spec"]["containers"]]
    query = {"container": "main" if "main" in names else names[0], "tailLines": "400"}
    error = ""
    with contextlib.suppress(ApiError):  # the pod is deleted, or its log is forbidden
        error = last_error(api.call("GET", path, query=query, raw=True)["value"])
    reason = failure_reason(pod)
    text = reason.text if reason else pod["status"].get("message")
    return error or text or "see its log"
