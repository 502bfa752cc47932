"""A pipeline of your own, of kfp-ddp's components and a step of yours.

    kfp-ddp compile examples/own_pipeline.py --output build --registry registry.example.com/ml
    kfp-ddp run build/photographs.yaml --set source=gs://bucket/photos

The registry may also be set once: KFP_DDP_REGISTRY, or `registry:` in your settings.
"""

from kfp import dsl, kubernetes

from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.train.component import train


@dsl.component(base_image="python:3.11-slim", install_kfp_package=False)
def verdict(accuracy: float, least: float) -> str:
    """A step of yours, in any image."""
    return "good" if accuracy >= least else "not yet"


@dsl.pipeline(name="photographs")
def photographs(
    source: str,
    training: dict = {"model": "resnet18"},
    job: dict = {},
    backend: str = "pytorchjob",
    data_claim: str = "kfp-ddp-data",
    work_claim: str = "kfp-ddp-work",
    least: float = 0.8,
) -> None:
    """Sync, train and evaluate, and compare the accuracy with the least that is good."""
    synced = data_sync(source=source, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    trained = train(
        # By these a retried step finds its job, and two steps never share a folder.
        run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
        task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
        dataset_path=synced.outputs["path"],
        training=training,
        backend=backend,
        job=job,
    )
    evaluated = evaluate(
        checkpoint=trained.outputs["checkpoint"],
        run_dir=trained.outputs["run_dir"],
        dataset_path=synced.outputs["path"],
    )
    for task in (synced, trained, evaluated):
        # What is mounted on train reaches its workers. KFP's cache knows nothing of claims.
        kubernetes.mount_pvc(task, pvc_name=data_claim, mount_path="/data")
        task.set_caching_options(False)
    for task in (trained, evaluated):
        kubernetes.mount_pvc(task, pvc_name=work_claim, mount_path="/work")
    verdict(accuracy=evaluated.outputs["accuracy"], least=least)
