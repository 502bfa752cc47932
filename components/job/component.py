"""The KFP signature of `job`."""

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/launcher:0.2.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field, apply_to_task=field.name in ("ENV", "KUBERNETES_VOLUMES"))
        for field in dsl.TaskConfigField
    ],
)
def job(
    image: str,
    job_object: dsl.Output[dsl.Artifact],
    task_config: dsl.TaskConfig,
    run_id: str = "",
    task_name: str = "",
    task_id: str = "",
    kind: str = "pytorchjob",
    work_dir: str = "",
    command: list = [],  # noqa: B006
    args: list = [],  # noqa: B006
    script: str = "",
    code: str = "",
    entry: str = "",
    nodes: int = 1,
    gpus_per_node: int = 0,
    settings: dict = {},  # noqa: B006
) -> str:
    """Run a PyTorchJob, TrainJob, TFJob, MPIJob, XGBoostJob or RayJob, followed as if run here.

    Args:
        image: Container image of the workers.
        job_object: The job as it ended, for the record.
        task_config: What is set on this task, filled in by KFP: it reaches the workers.
        run_id: Id of the pipeline run; '' for that of the step's own pod.
        task_name: Name of this task in the pipeline; '' for that of the step's own pod.
        task_id: Id of the task, for iterations of a loop; '' for none, or that of the step's pod.
        kind: Kind of job: pytorchjob, trainjob, tfjob, mpijob, xgboostjob or rayjob.
        work_dir: Folder on a PVC, so that the logs continue after an eviction; '' for none.
        command: Command of each worker as a list of words, without a shell; empty for the image's.
        args: Arguments that follow the command, the script or the entry.
        script: Text of a Python file that the workers run instead of a command, plain or packed.
        code: Folder of code that each worker runs in, as as_folder packs it; '' for the image's.
        entry: File or module of code, as train.py or package.train; '' for command or script.
        nodes: Number of worker pods, in a RayJob with its head. An MPIJob has its launcher besides.
        gpus_per_node: GPUs of each pod; 0 for those of the KFP task, or none.
        settings: Further settings of the job by name, such as {"shm_size": "16Gi"}; see the README.

    Returns:
        Name of the job that succeeded.
    """
    inputs = dict(locals())
    from kfp_ddp.jobs.engine import run

    return run(**inputs)
