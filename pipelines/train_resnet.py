"""The pipeline `train_resnet`: bucket to evaluated, gated and exported model."""

import inspect
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from kfp import dsl, kubernetes

from kfp_ddp.base.folders import SCRATCH
from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate as judge
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.components.preflight.parameters import (
    EVALUATE_ASKS,
    LAUNCHER_ASKS,
    SYNC_ASKS,
    described,
)
from kfp_ddp.components.shared.step import KEY
from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train
from kfp_ddp.pipelines import pods

# Keys of the bucket's secret that become environment variables.
SECRET_ENV = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"),
    *("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_TENANT_ID", "AZURE_CLIENT_ID"),
    *("AZURE_CLIENT_SECRET", "HF_TOKEN", "HF_ENDPOINT"),
)


def _bucket(task: dsl.PipelineTask, secret: object) -> dsl.PipelineTask:
    """Give a step the bucket's credentials, if such a secret is there."""
    kubernetes.use_secret_as_volume(
        task, secret_name=secret, mount_path=str(PurePosixPath(KEY).parent), optional=True
    )
    return kubernetes.use_secret_as_env(
        task, secret_name=secret, secret_key_to_env={k: k for k in SECRET_ENV}, optional=True
    )


class Claims(NamedTuple):
    """What a pipeline mounts: the claims that its form or preflight name, or an emptyDir."""

    data: bool = True
    """Else each pod that reads the dataset brings it."""
    work: bool = True
    """Else the runs' folders lie below a bucket's prefix."""


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Join the steps: check, sync a bucket, train with DDP, evaluate, gate and export."""
    secret, backend, job = form.pop("bucket_secret"), form["backend"], form["job"]
    work = form["work_claim" if claims.work else "work"]
    at = {} if claims.work else {"work_dir": work}

    def mounted(task: dsl.PipelineTask, data: Any, *, runs: bool = True) -> dsl.PipelineTask:
        """Mount what a step uses, and switch its cache off: what it reads changes under a path."""
        if claims.data and data is not None:
            kubernetes.mount_pvc(task, pvc_name=data, mount_path="/data")
        if claims.work and runs:
            kubernetes.mount_pvc(task, pvc_name=work, mount_path="/work")
        if not (claims.data and claims.work) and (runs or data is not None):
            kubernetes.empty_dir_mount(task, volume_name="scratch", mount_path=SCRATCH)
        return task.set_caching_options(False)

    # Not in the group: where a claim is missing, the pod of teardown could not start either.
    each = {} if claims.data else {"publish": "each-node"}
    first = pods.waiting(preflight(**form, **each).set_caching_options(False))
    plan = _bucket(first, secret).outputs
    computing = (
        *(EVALUATE_ASKS, plan["evaluate_cpu"], plan["evaluate_memory"]),
        *(plan["evaluate_gpus"], plan["gpu_resource"]),
    )
    last = teardown(run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, backend=backend, job=job, **at)
    pods.waiting(mounted(last, None) if claims.work else _bucket(mounted(last, None), secret))
    with dsl.ExitHandler(last, name="training"):
        synced = data_sync(
            source=form["source"],
            dataset=plan["dataset"],
            options=plan["sync"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            layout=plan["layout"],
        )
        _bucket(mounted(synced, plan["data_claim"], runs=False), secret)
        pods.kept(pods.working(synced, SYNC_ASKS, plan["sync_cpu"], plan["sync_memory"]))
        volume = dataset_volume(
            dataset=synced.outputs["dataset"],
            digest=synced.outputs["digest"],
            path=synced.outputs["path"],
            claim=plan["data_claim"],
            publish=plan["publish"],
            source=form["source"],
            sync=plan["sync"],
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        )
        pods.waiting(volume.set_caching_options(False))
        data = volume.outputs["claim"]
        trained = train(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
            dataset_path=volume.outputs["path"],
            training=plan["training"],
            backend=backend,
            job=plan["job"],
            **at,
        )
        # It brings init_from, and without claims the workers read and write buckets with it.
        _bucket(mounted(trained, data), secret)
        pods.kept(pods.working(trained, LAUNCHER_ASKS, plan["train_cpu"], plan["train_memory"]))
        evaluated = evaluate(
            checkpoint=trained.outputs["checkpoint"],
            run_dir=trained.outputs["run_dir"],
            dataset_path=volume.outputs["path"],
            champion=plan["champion"],
        )
        _bucket(mounted(evaluated, data), secret)
        pods.working(evaluated, *computing)
        verdict = judge(
            accuracy=evaluated.outputs["accuracy"],
            evaluation=evaluated.outputs["evaluation"],
            rules=plan["gate"],
            champion=plan["champion"],
        )
        pods.waiting(_bucket(mounted(verdict, None), secret))
        with dsl.If(verdict.outputs["Output"] == True, name="blessed"):  # noqa: E712
            exported = export(
                checkpoint=trained.outputs["checkpoint"],
                run_dir=trained.outputs["run_dir"],
                dataset_path=volume.outputs["path"],
                evaluation=evaluated.outputs["evaluation"],
                model_name=form["model_name"],
                destination=form["destination"],
                champion=plan["champion"],
                champion_version=verdict.outputs["champion_version"],
            )
            _bucket(mounted(exported, data), secret)
            pods.working(exported, *computing)


@dsl.pipeline(
    name="train-resnet",
    display_name="Train a ResNet with PyTorch DDP",
    description="Bucket to verified dataset, DDP training, evaluation, gate and exported bundle.",
)
@described
def train_resnet(
    source: str,
    recipe: str = "none",
    model: str = "auto",
    epochs: int = 0,
    batch_size: int = 0,
    learning_rate: float = 0.0,
    training: dict = {},  # noqa: B006
    backend: str = "pytorchjob",
    nodes: int = 1,
    gpus_per_node: int = -1,
    job: dict = {},  # noqa: B006
    sync: dict = {},  # noqa: B006
    gate: dict = {"min_accuracy": 0.7},  # noqa: B006
    champion: str = "",
    model_name: str = "resnet",
    destination: str = "",
    work_claim: str = "kfp-ddp-work",
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Check, sync a bucket, train with DDP, evaluate, gate and export."""
    wire(dict(locals()), Claims())


def in_a_bucket(name: str, claims: Claims) -> Callable[..., None]:
    """The pipeline's form and steps, with `work` below a bucket's prefix and no claim for it.

    Args:
        name: Of the pipeline's function.
        claims: What it mounts.
    """
    form = inspect.signature(train_resnet.pipeline_func)
    work = inspect.Parameter("work", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    source, *others = (p for n, p in form.parameters.items() if n != "work_claim")
    signature = form.replace(parameters=[source, work, *others])

    def pipeline(*given: Any) -> None:
        wire(dict(zip(signature.parameters, given, strict=True)), claims)

    pipeline.__name__, pipeline.__doc__ = name, "The steps of train_resnet, run in a bucket."
    vars(pipeline)["__signature__"] = signature
    return pipeline
