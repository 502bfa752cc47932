"""Pipelines of the data_sync or the train step alone, and what can be seen of their jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp import compiler, dsl, kubernetes

from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import Scene

Begin = Callable[..., Run]


@dsl.pipeline(name="sync-only")  # type: ignore[untyped-decorator]
def sync_only(source: str, data_claim: str, dataset: str) -> None:
    """Sync as the whole pipeline does."""
    task = data_sync(source=source, dataset=dataset).set_caching_options(False)
    kubernetes.mount_pvc(task, pvc_name=data_claim, mount_path="/data")


@dsl.pipeline(name="train-only")  # type: ignore[untyped-decorator]
def train_only(
    dataset_path: str,
    data_claim: str,
    work_claim: str,
    training: dict,  # type: ignore[type-arg]
    job: dict,  # type: ignore[type-arg]
    backend: str = "pytorchjob",
) -> None:
    """Train as the whole pipeline does."""
    last = teardown(run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, backend=backend, job=job)
    kubernetes.mount_pvc(last.set_caching_options(False), pvc_name=work_claim, mount_path="/work")
    with dsl.ExitHandler(last, name="training"):
        task = train(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
            dataset_path=dataset_path,
            training=training,
            backend=backend,
            job=job,
        ).set_caching_options(False)
        kubernetes.mount_pvc(task, pvc_name=data_claim, mount_path="/data")
        kubernetes.mount_pvc(task, pvc_name=work_claim, mount_path="/work")


def compiled(pipeline: Any, folder: Path) -> Path:
    """Return the compiled pipeline, in `folder`."""
    path = folder / f"{pipeline.name}.yaml"
    compiler.Compiler().compile(pipeline, str(path))
    return path


def workers(scene: Scene, run: Run) -> list[str]:
    """Return the run's workers that are not over."""
    pods = scene.grounds.workers(run.id)
    return [pod.metadata.name for pod in pods if pod.status.phase in ("Pending", "Running")]


def starts(scene: Scene, run: Run) -> list[dict[str, Any]]:
    return [event for event in scene.events(run) if event["event"] == "start"]


def attempts(run: Run) -> int:
    return len(run.steps["train"].attempts) if "train" in run.steps else 0


def log(run: Run) -> str:
    return run.steps["train"].log if "train" in run.steps else ""
