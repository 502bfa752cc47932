"""The `teardown` step: end the processes and jobs that a run left behind."""

from pathlib import Path

from kfp_ddp.components.launch import processes
from kfp_ddp.components.launch.api import Api, ApiError
from kfp_ddp.components.launch.ending import DELETE
from kfp_ddp.components.launch.identity import LABEL_VALUE, RUN
from kfp_ddp.components.launch.kinds import KINDS, Kind, state
from kfp_ddp.components.launch.local import GRACE_SECONDS
from kfp_ddp.components.step import step
from kfp_ddp.training.errors import InputError


@step
def run(run_id: str, work_dir: str, backend: str) -> str:
    """End what the run left and say so in one line; nothing to do is fine.

    Jobs that are over stay, for their logs, until their time to live has passed.

    Raises:
        InputError: when something is left that could not be ended.
    """
    ended = _processes(Path(work_dir) / run_id)
    if backend != "local":
        ended += _jobs(run_id)
    said = "; ".join(ended) or "nothing was left to end"
    print(said, flush=True)
    return said


def _processes(run_dir: Path) -> list[str]:
    pid = processes.recorded(run_dir)
    if pid is None:
        return []
    processes.end(pid, GRACE_SECONDS)
    processes.forget(run_dir)
    return [f"ended process group {pid}"]


def _jobs(run_id: str) -> list[str]:
    if not LABEL_VALUE.fullmatch(run_id):
        raise InputError(f"run_id={run_id!r} is no id of a run; pass PIPELINE_JOB_ID_PLACEHOLDER")
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
        raise InputError(f"cannot list {kind.plural}: {error.message}") from error
    deleted = []
    for job in found:
        name = job["metadata"]["name"]
        if not state(job).over:
            _delete(api, kind, name)
            deleted.append(f"deleted {kind.title} {name}")
    return deleted


def _delete(api: Api, kind: Kind, name: str) -> None:
    try:
        api.patient(lambda: api.call("DELETE", kind.path(api.namespace, name), DELETE))
    except ApiError as error:
        if error.status != 404:
            raise InputError(f"cannot delete {kind.title} {name}: {error.message}") from error
