"""A pipeline of the train step alone, on data that is there: for what happens to jobs."""

from pathlib import Path
from typing import Any

from kfp import compiler, dsl, kubernetes

from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train

NAME = "train-only"


@dsl.pipeline(name=NAME)  # type: ignore[untyped-decorator]
def train_only(
    dataset_path: str,
    data_claim: str,
    work_claim: str,
    backend: str = "pytorchjob",
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    nodes: int = 2,
    cpu: str = "",
    retries: int = 2,
    pending_minutes: float = 0.0,
    epochs: int = 20,
    checkpoint_epochs: int = 5,
    prometheus_port: int = 0,
    cluster: dict = {},  # type: ignore[type-arg]  # noqa: B006
) -> None:
    """Train as the digits tests do."""
    last = teardown(
        run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, work_dir="/work", backend=backend
    ).set_caching_options(False)
    kubernetes.mount_pvc(last, pvc_name=work_claim, mount_path="/work")
    with dsl.ExitHandler(last, name="training"):
        task = train(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            dataset_path=dataset_path,
            work_dir="/work",
            backend=backend,
            image=image,
            nodes=nodes,
            nproc_per_node=1,
            cpu=cpu,
            retries=retries,
            pending_minutes=pending_minutes,
            cluster=cluster,
            model="cifar_resnet8",
            image_size=16,
            epochs=epochs,
            batch_size=32,
            warmup_epochs=2.0,
            workers=0,
            checkpoint_epochs=checkpoint_epochs,
            checkpoint_minutes=0.0,
            prometheus_port=prometheus_port,
        ).set_caching_options(False)
        kubernetes.mount_pvc(task, pvc_name=data_claim, mount_path="/data")
        kubernetes.mount_pvc(task, pvc_name=work_claim, mount_path="/work")


def compiled(folder: Path) -> Path:
    """The pipeline as a document in `folder`."""
    path = folder / f"{NAME}.yaml"
    compiler.Compiler().compile(train_only, str(path))
    return path


# The trainer's image runs as root in this cluster, so the user of our own image is named.
WORKERS: dict[str, Any] = {"run_as_user": 1000, "env": {"OMP_NUM_THREADS": "1"}}
