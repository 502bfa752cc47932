"""Where a run's models are evaluated: in the step itself, or by a job of its own."""

from typing import Any

from kfp_ddp.checks.preflight.parameters import EVALUATE_ASKS, StepResources
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.evaluation.engine import JOB_OWN
from kfp_ddp.jobs import check_job
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api

OF_THE_TRAINING = frozenset(
    ("nodes", "gpus_per_node", "nproc_per_node", "cpu", "memory", "cpu_request", "memory_request")
) | {"resources"}
"""Settings of the job that trains which tell how large that is; the others hold for both jobs."""


def evaluation(steps: StepResources, spec: LaunchSpec) -> dict[str, Any]:
    """What the steps that evaluate are given: the backend, the job's settings, their own GPUs.

    Args:
        steps: What was set of steps.
        spec: The job that trains.
    """
    backend, gpus = steps.evaluate_backend, steps.evaluate_gpus
    if backend == "local":
        return {"evaluate_backend": backend, "evaluate_job": {}, "evaluate_gpus": str(gpus or "")}
    not_ours = OF_THE_TRAINING | set(JOB_OWN)
    job = {name: value for name, value in spec.given().items() if name not in not_ours}
    job |= {"nodes": steps.evaluate_nodes, "gpus_per_node": gpus}
    for name, least in EVALUATE_ASKS.items():
        job |= {name: getattr(steps, f"evaluate_{name}"), f"{name}_request": least}
    return {"evaluate_backend": backend, "evaluate_job": job, "evaluate_gpus": ""}


def check_evaluation(found: dict[str, Any], data_claim: str, work_claim: str) -> list[str]:
    """Warnings about the job that evaluates, if one does.

    Args:
        found: What `evaluation` returned.
        data_claim: Of the dataset; empty for none.
        work_claim: Of the runs; empty for none.

    Raises:
        InputError: it could not run.
    """
    if found["evaluate_backend"] == "local":
        return []
    mounts = {
        path: name for path, name in ((data_dir(), data_claim), (work_dir(), work_claim)) if name
    }
    fields = {**found["evaluate_job"], "kind": found["evaluate_backend"], "command": ["true"]}
    fields["claims"] = {**mounts, **fields.get("claims", {})}
    return check_job.check(Api.connect(), LaunchSpec.create(**fields))
