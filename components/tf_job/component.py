"""The KFP signature of `tf_job`."""

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
def tf_job(
    run_id: str,
    image: str,
    job: dsl.Output[dsl.Artifact],
    task_config: dsl.TaskConfig,
    task_name: str = "tf-job",
    task_id: str = "",
    work_dir: str = "",
    command: list = [],  # noqa: B006
    args: list = [],  # noqa: B006
    script: str = "",
    nodes: int = 1,
    gpus_per_node: int = 0,
    gpu_resource: str = "nvidia.com/gpu",
    cpu: str = "",
    memory: str = "",
    cpu_request: str = "",
    memory_request: str = "",
    shm_size: str = "2Gi",
    env: dict = {},  # noqa: B006
    env_from_secrets: list = [],  # noqa: B006
    claims: dict = {},  # noqa: B006
    nccl_debug: str = "",
    nccl_socket_interface: str = "",
    nccl_infiniband: str = "",
    host_network: bool = False,
    metrics_port: int = 0,
    istio: bool = False,
    node_selector: dict = {},  # noqa: B006
    spot: str = "",
    priority_class: str = "",
    scheduler: str = "",
    queue: str = "",
    image_pull_secrets: list = [],  # noqa: B006
    image_pull_policy: str = "",
    service_account: str = "",
    run_as_user: int = -1,
    fs_group: int = -1,
    non_root: bool = True,
    grace_seconds: int = 120,
    restart_policy: str = "Never",
    backoff_limit: int = -1,
    clean_pod_policy: str = "Running",
    ttl_seconds: int = 86400,
    deadline_minutes: float = 0.0,
    pending_minutes: float = 0.0,
    retries: int = 2,
) -> str:
    """Run a TFJob (MultiWorkerMirroredStrategy), followed as if it ran in this step.

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
        gpus_per_node: GPUs of a node.
        gpu_resource: Name of a GPU.
        cpu: CPU request and limit of a node.
        memory: Memory request and limit of a node.
        cpu_request: CPU request, if below the limit.
        memory_request: Memory request, if lower.
        shm_size: Shared memory of a node; '' for none.
        env: Environment variables.
        env_from_secrets: Secrets whose keys become env.
        claims: Claims by mount path; claim:ro for read-only.
        nccl_debug: What NCCL logs.
        nccl_socket_interface: Network interface of NCCL and gloo.
        nccl_infiniband: InfiniBand or RoCE.
        host_network: Use the node's network.
        metrics_port: Port of /metrics, for Prometheus' annotations; 0 for none.
        istio: Let Istio inject its sidecar.
        node_selector: Labels of nodes.
        spot: Interruptible nodes of a provider.
        priority_class: PriorityClass of the pods.
        scheduler: Who queues and gang-schedules the job; '' for the cluster's default.
        queue: Queue of that scheduler.
        image_pull_secrets: Secrets of the registry.
        image_pull_policy: When the image is pulled; '' for the cluster's default.
        service_account: Service account of the pods.
        run_as_user: User id; -1 for the image's.
        fs_group: Group that owns the claims; -1 for none.
        non_root: Refuse to run as root.
        grace_seconds: From SIGTERM to SIGKILL.
        restart_policy: What the operator does with a pod that failed.
        backoff_limit: Restarts that it bears; -1 for any number.
        clean_pod_policy: Pods that are removed when the job is over.
        ttl_seconds: Life of a job that is over; -1 for that of its run's Workflow.
        deadline_minutes: The job's time, without its wait in a queue; 0 for no end.
        pending_minutes: Wait for pods that cannot start; 0 for no end.
        retries: Whole-job retries after a lost node.

    Returns:
        Name of the job that succeeded.
    """
    from kfp_ddp.components.job.engine import run

    return run(
        kind="tfjob",
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
            "gpus_per_node": gpus_per_node,
            "gpu_resource": gpu_resource,
            "cpu": cpu,
            "memory": memory,
            "cpu_request": cpu_request,
            "memory_request": memory_request,
            "shm_size": shm_size,
            "env": env,
            "env_from_secrets": env_from_secrets,
            "claims": claims,
            "nccl_debug": nccl_debug,
            "nccl_socket_interface": nccl_socket_interface,
            "nccl_infiniband": nccl_infiniband,
            "host_network": host_network,
            "metrics_port": metrics_port,
            "istio": istio,
            "node_selector": node_selector,
            "spot": spot,
            "priority_class": priority_class,
            "scheduler": scheduler,
            "queue": queue,
            "image_pull_secrets": image_pull_secrets,
            "image_pull_policy": image_pull_policy,
            "service_account": service_account,
            "run_as_user": run_as_user,
            "fs_group": fs_group,
            "non_root": non_root,
            "grace_seconds": grace_seconds,
            "restart_policy": restart_policy,
            "backoff_limit": backoff_limit,
            "clean_pod_policy": clean_pod_policy,
            "ttl_seconds": ttl_seconds,
            "deadline_minutes": deadline_minutes,
            "pending_minutes": pending_minutes,
            "retries": retries,
        },
        task_config=task_config,
        job=job,
    )
