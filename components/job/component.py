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
        task_name: Name of this task in the pipeline; '' for that of the step's own pod. Each task \
            of a run has its own jobs.
        task_id: The pipeline's task id, which tells iterations of a loop apart; '' for none, or \
            where run_id or task_name is empty, for what the step's own pod has.
        kind: Kind of job: pytorchjob, tfjob, mpijob and xgboostjob are of the Training Operator, \
            trainjob of Kubeflow Trainer, rayjob of KubeRay.
        work_dir: Folder on a PVC. After an eviction, the logs continue from the position saved \
            there; '' for none.
        command: Command of each worker as a list of words, which no shell reads; empty for the \
            image's own. In an MPIJob the launcher alone runs it, in a RayJob the head.
        args: Arguments that follow the command, the script or the entry.
        script: Text of a Python file that the workers run instead of a command, plain or packed \
            into one line.
        code: Folder of code that each worker runs in, as as_folder packs it: in the value itself, \
            or the address of its archive on a claim of the workers or in a bucket; '' for the \
            image's own.
        entry: File or module of that folder that the workers run, such as train.py or \
            package.train; '' for command or script.
        nodes: Number of worker pods, in a RayJob with its head. An MPIJob has its launcher besides.
        gpus_per_node: GPUs of each pod; 0 for those that are set on the KFP task, or none.
        settings: Further settings of the job by name, such as {"shm_size": "16Gi"}; the README \
            lists them.

    Returns:
        Name of the job that succeeded.
    """
    inputs = dict(locals())
    from kfp_ddp.jobs.engine import run

    return run(**inputs)
