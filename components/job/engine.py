"""What the steps that run any job have in common: their inputs made a specification, and run."""

from typing import Any

from kfp_ddp.base.run_folder import open_run_dir
from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.components.shared.launch.manifests.script import unpacked
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec
from kfp_ddp.components.shared.launch.manifests.task_config import overlaid
from kfp_ddp.components.shared.launch.run import launch
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.train.outputs import write_job


@step
def run(
    kind: str,
    run_id: str,
    task_name: str,
    task_id: str,
    work_dir: str,
    fields: dict[str, Any],
    task_config: Any,
    job: Any,
) -> str:
    """Run a job of any kind to its end; returns its name.

    Raises:
        InputError: for input that cannot be used, and for a job that failed or was cancelled.
    """
    fields = {**fields, "script": unpacked(fields["script"])}
    spec = LaunchSpec.create(**overlaid(task_config, fields), kind=kind)
    run_dir = open_run_dir(work_dir, run_id) if work_dir else None
    finished = launch(spec, run_id, task_name, task_id, Api.connect(), run_dir)
    write_job(job, finished.job)
    return str(finished.job["metadata"]["name"])
