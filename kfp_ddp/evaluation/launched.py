"""The ranks of an evaluation, started here or as a job, and what they left."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.failure import read
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import split
from kfp_ddp.evaluation import results
from kfp_ddp.evaluation.request import Request
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.local import EVALUATION, Ended, run_ranks
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.script import unexpanded
from kfp_ddp.jobs.supervision import check_backend
from kfp_ddp.jobs.task import overlaid, with_folders
from kfp_ddp.k8s.api import Api
from kfp_ddp.runs.training_folder import followed_folder

JOB_OWN = dict.fromkeys(
    ("kind", "command", "args", "script", "code", "entry", "elastic", "metrics_port"),
    "the step sets itself",
)
"""Fields of LaunchSpec that the step sets, with why they cannot be given."""


def specified(job: Mapping[str, Any], image: str, backend: str) -> dict[str, Any]:
    """The fields of LaunchSpec that a step's inputs make.

    Raises:
        InputError: naming the one that cannot be used.
    """
    (given,) = split("job", job, LaunchSpec, own=JOB_OWN)
    fields = {"image": image, **given}
    check_backend(backend, int(fields.get("nodes", 1)))
    LaunchSpec.create(**{**fields, "kind": "pytorchjob" if backend == "local" else backend})
    return fields


def here(request: Request, ranks: int) -> None:
    """Evaluate with processes of this step.

    Args:
        request: With folders that are at hand.
        ranks: How many.

    Raises:
        KfpDdpError: what the first of them failed of.
    """
    request = Request.create(**{**request.given(), "output_dir": str(request.target)})
    folder = RunFolder(request.target)
    results.prepare(folder.path, RunFolder(request.run_dir).path)
    print(f"evaluate: {ranks} ranks, output in {folder.path}", flush=True)
    ended = run_ranks(request.to_argv(), ranks, folder.path, EVALUATION)
    if ended.code != 0 or ended.stopped_by is not None:
        raise _failure(ended, folder)


def _failure(ended: Ended, folder: RunFolder) -> KfpDdpError:
    if ended.stopped_by is not None or ended.code == RunCancelledError.exit_code:
        return RunCancelledError("the evaluation was stopped; run it again to begin it anew")
    told = read(folder.logs)
    if told is not None and told.exit_code == InputError.exit_code:
        return InputError(told.error)
    return JobError(f"evaluation failed: {ended.cause(folder.path)}")


def on_cluster(
    request: Request,
    fields: dict[str, Any],
    task_config: Any,
    backend: str,
    ids: tuple[str, str, str],
) -> None:
    """Evaluate with a job.

    Args:
        request: With the folders as all steps call them.
        fields: Those of LaunchSpec.
        task_config: What was set on the task.
        backend: Kind of the job.
        ids: Of run, task and iteration.

    Raises:
        InputError: what cannot be used, before a job is made.
        JobError: the job failed, with its root cause.
        RunCancelledError: the run was terminated.
    """
    api = Api.connect()
    given = overlaid(task_config, {**fields, "kind": backend})
    given = with_folders(api, given, request.data, request.run_dir, "evaluate")
    words = map(unexpanded, request.to_argv())
    command = ["python3", "-m", EVALUATION, "--", *words]
    with followed_folder(request.run_dir) as (folder, _):
        launch(LaunchSpec.create(**given, command=command), *ids, api, folder)
