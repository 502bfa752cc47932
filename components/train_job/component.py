"""The KFP signature of `train_job`."""

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/launcher:0.1.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigField.RESOURCES,
        dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
        dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
        dsl.TaskConfigField.KUBERNETES_AFFINITY,
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.ENV, apply_to_task=True),
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_VOLUMES, apply_to_task=True),
    ],
)
def train_job(
    run_id: str,
    image: str,
    job: dsl.Output[dsl.Artifact],
    task_config: dsl.TaskConfig,
    task_name: str = "train-job",
    task_id: str = "",
    work_dir: str = "",
    command: list = [],  # noqa: B006
    args: list = [],  # noqa: B006
    script: str = "",
    nodes: int = 1,
    nproc_per_node: int = 0,
    runtime: str = "torch-distributed",
    gpus_per_node: int = 0,
    gpu_resource: str = "nvidia.com/gpu",
    cpu: str = "",
    memory: str = "",
    cpu_request: str = "",
    memory_request: str = "",
    shm_size: str = "2Gi",
    env: dict = {},  # noqa: B006
    claims: dict = {},  # noqa: B006
    nccl_debug: str = "",
    nccl_socket_interface: str = "",
    nccl_infiniband: str = "",
    nccl_timeout_minutes: float = 0.0,
    metrics_port: int = 0,
    istio: bool = False,
    node_selector: dict = {},  # noqa: B006
    spot: str = "",
    scheduler: str = "",
    queue: str = "",
    image_pull_secrets: list = [],  # noqa: B006
    service_account: str = "",
    run_as_user: int = -1,
    fs_group: int = -1,
    non_root: bool = True,
    grace_seconds: int = 120,
    deadline_minutes: float = 0.0,
    pending_minutes: float = 0.0,
    retries: int = 2,
) -> str:
    """Run a TrainJob of Kubeflow Trainer, followed as if it ran in this step.

    Args:
        run_id: Id of the pipeline run.
        image: Image of the workers.
        job: The job as it ended, for the record.
        task_config: What is set on this task, filled in by KFP: it reaches the workers.
        task_name: Name of this task in the pipeline.
        task_id: The pipeline's task id, which tells iterations of a loop apart.
        work_dir: Folder on a claim, for the place in the logs over an eviction; '' for none.
        command: Command in exec form; no shell.
        args: Arguments of the command.
        script: Text of a Python file that the workers run, plain or packed.
        nodes: Pods of the job.
        nproc_per_node: Processes a node; 0 for one for each GPU.
        runtime: Runtime of a TrainJob.
        gpus_per_node: GPUs of a node.
        gpu_resource: Name of a GPU.
        cpu: CPU request and limit of a node.
        memory: Memory request and limit of a node.
        cpu_request: CPU request, if below the limit.
        memory_request: Memory request, if lower.
        shm_size: Shared memory of a node; '' for none.
        env: Environment variables.
        claims: Claims by mount path; claim:ro for read-only.
        nccl_debug: What NCCL logs.
        nccl_socket_interface: Network interface of NCCL and gloo.
        nccl_infiniband: InfiniBand or RoCE.
        nccl_timeout_minutes: Silence of NCCL's watchdog that ends a rank; 0 for torch's own.
        metrics_port: Port of /metrics, for Prometheus' annotations; 0 for none.
        istio: Let Istio inject its sidecar.
        node_selector: Labels of nodes.
        spot: Interruptible nodes of a provider.
        scheduler: Who queues and gang-schedules the job; '' for the cluster's default.
        queue: Queue of that scheduler.
        image_pull_secrets: Secrets of the registry.
        service_account: Service account of the pods.
        run_as_user: User id; -1 for the image's.
        fs_group: Group that owns the claims; -1 for none.
        non_root: Refuse to run as root.
        grace_seconds: From SIGTERM to SIGKILL.
        deadline_minutes: The job's time, without its wait in a queue; 0 for no end.
        pending_minutes: Wait for pods that cannot start; 0 for no end.
        retries: Whole-job retries after a lost node.

    Returns:
        Name of the job that succeeded.
    """
    from kfp_ddp.components.job.engine import run

    return run(
        kind="trainjob",
        run_id=run_id,
        task_name=task_name,
        task_id=task_id,
        work_dir=work_dir,
        fields={
            "image": image,
            "command": command,
            "args": args,
            "script": script,
            "nodes": nodes,
            "nproc_per_node": nproc_per_node,
            "runtime": runtime,
            "gpus_per_node": gpus_per_node,
            "gpu_resource": gpu_resource,
            "cpu": cpu,
            "memory": memory,
            "cpu_request": cpu_request,
            "memory_request": memory_request,
            "shm_size": shm_size,
            "env": env,
            "claims": claims,
            "nccl_debug": nccl_debug,
            "nccl_socket_interface": nccl_socket_interface,
            "nccl_infiniband": nccl_infiniband,
            "nccl_timeout_minutes": nccl_timeout_minutes,
            "metrics_port": metrics_port,
            "istio": istio,
            "node_selector": node_selector,
            "spot": spot,
            "scheduler": scheduler,
            "queue": queue,
            "image_pull_secrets": image_pull_secrets,
            "service_account": service_account,
            "run_as_user": run_as_user,
            "fs_group": fs_group,
            "non_root": non_root,
            "grace_seconds": grace_seconds,
            "deadline_minutes": deadline_minutes,
            "pending_minutes": pending_minutes,
            "retries": retries,
        },
        task_config=task_config,
        job=job,
    )
