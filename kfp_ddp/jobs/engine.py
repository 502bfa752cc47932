"""Run a job of any kind: a step's inputs made one specification, which is launched and followed."""

from typing import Any

from kfp_ddp.core import folders
from kfp_ddp.core.packed import WORD, unpack
from kfp_ddp.core.run_folder import open_run_dir, task_title
from kfp_ddp.core.settings import check_reserved
from kfp_ddp.core.step import step, write_job
from kfp_ddp.jobs.identity import ids_of_step
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.local import run_script
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.shipping.payload import bring
from kfp_ddp.jobs.task import with_task_config
from kfp_ddp.k8s.api import COMPUTE_HERE, Api
from kfp_ddp.k8s.pods import record_images


@step
def run(
    run_id: str,
    task_name: str,
    task_id: str,
    work_dir: str,
    settings: dict[str, Any],
    task_config: Any,
    job_object: Any,
    **inputs: Any,
) -> str:
    """Run a job to its end and return its name; raise InputError or JobError.

    `inputs` are the fields of LaunchSpec that are no `settings`; the rest is as in the component.
    The kind local is a script with its ranks on this machine.
    """
    ids = ids_of_step(run_id, task_name, task_id)
    task = task_title(ids.task_name, ids.task_id)
    here = inputs["kind"] == "local"
    if here:
        inputs["kind"] = "pytorchjob"  # a job of one script is described alike
    spec = specification(settings, task_config, **inputs)
    if here:
        run_script(spec, open_run_dir(folders.work_dir(work_dir), ids.run_id, task))
        write_job(job_object, {"kind": "local", "kfp_ddp": record_images()})
        return task
    run_dir = open_run_dir(work_dir, ids.run_id, task) if work_dir else None
    spec = bring(spec, run_dir)
    finished = launch(spec, *ids, Api.connect(otherwise=COMPUTE_HERE), run_dir)
    ran = record_images(finished.pods, spec.job_kind.containers)
    write_job(job_object, {**finished.job, "kfp_ddp": ran})
    return str(finished.job["metadata"]["name"])


def specification(settings: dict[str, Any], task_config: Any, **inputs: Any) -> LaunchSpec:
    """Return the job of a step's inputs, further settings and KFP task; raise InputError."""
    check_reserved("settings", settings, dict.fromkeys(inputs, "is an input of its own"))
    if inputs.get("script", "").startswith("data:"):
        inputs["script"] = unpack(inputs["script"], "script").decode()
    inputs["args"] = [
        unpack(word, "args", WORD).decode() if str(word).startswith(WORD) else word
        for word in inputs.get("args", ())
    ]
    return LaunchSpec.create(**with_task_config(task_config, {**inputs, **settings}))
