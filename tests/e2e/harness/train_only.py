"""A pipeline of the train step alone, on data that is there: for what happens to jobs."""

from pathlib import Path

from kfp import compiler, dsl, kubernetes

from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train

NAME = "train-only"


@dsl.pipeline(name=NAME)  # type: ignore[untyped-decorator]
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


def compiled(folder: Path) -> Path:
    """The pipeline as a document in `folder`."""
    path = folder / f"{NAME}.yaml"
    compiler.Compiler().compile(train_only, str(path))
    return path
