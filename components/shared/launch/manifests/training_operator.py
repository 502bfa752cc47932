"""The manifests of the Training Operator's jobs: PyTorchJob, TFJob and MPIJob."""

from typing import Any

from kfp_ddp.components.shared.cluster.api import Object
from kfp_ddp.components.shared.launch.manifests import pod
from kfp_ddp.components.shared.launch.specification.kinds import KINDS, V1_JOB, V1_TYPE
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec

# An MPIJob's worker waits to be given ranks by `kubectl exec`. The operator's own `sleep 365d` is
# deaf to SIGTERM as process 1, and would hold its GPUs for the whole grace period at the end.
WAIT = ["sh", "-c", "trap exit TERM; while :; do sleep 3600 & wait $!; done"]
# The operator starts the launcher beside the workers, and mpirun fails where one is not there yet.
# Its init container has left kubectl here, and its Role lets the launcher watch pods.
WHEN_WORKERS_RUN = """/opt/kube/kubectl wait pod --for=condition=Ready --timeout=-1s -l "$0" >&2 &&
exec "$@"
"""
# The launcher starts the ranks and computes nothing.
LAUNCHER_RESOURCES: Object = {
    "limits": {"cpu": "1", "memory": "2Gi"},
    "requests": {"cpu": "100m", "memory": "256Mi"},
}


def pytorchjob(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """A PyTorchJob: a master and workers, or workers alone where it is elastic.

    The master makes the operator put an init container into the workers that waits for its name;
    an elastic job has no master because the operator does not count one in its range of nodes.
    """
    from kubeflow import training

    template = pod.template(spec, metadata["labels"], "pytorch", script_map)
    elastic = None
    if spec.elastic:
        low, high = spec.node_range()
        replicas = {"Worker": _replica(spec, spec.pods(), template)}
        elastic = training.KubeflowOrgV1ElasticPolicy(
            min_replicas=low,
            max_replicas=high,
            rdzv_backend="c10d",
            max_restarts=spec.restarts(),
            rdzv_id=metadata["name"],
        )
    else:
        replicas = _first_and_workers("Master", spec, template)
    body = training.KubeflowOrgV1PyTorchJobSpec(
        pytorch_replica_specs=replicas,
        elastic_policy=elastic,
        nproc_per_node=str(spec.processes()),
        run_policy=_run_policy(spec),
    )
    return _job(training.KubeflowOrgV1PyTorchJob, spec, metadata, body)


def tfjob(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """A TFJob: a chief and workers, as MultiWorkerMirroredStrategy wants them.

    The operator gives each pod its place in the cluster as TF_CONFIG.
    """
    from kubeflow import training

    template = pod.template(spec, metadata["labels"], "tensorflow", script_map)
    replicas = _first_and_workers("Chief", spec, template)
    body = training.KubeflowOrgV1TFJobSpec(tf_replica_specs=replicas, run_policy=_run_policy(spec))
    return _job(training.KubeflowOrgV1TFJob, spec, metadata, body)


def mpijob(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """An MPIJob: the command runs in the launcher, and the workers wait to be given ranks.

    The launcher takes no GPU; it is one pod beside the `nodes` workers.
    """
    from kubeflow import training

    worker, launcher = (pod.template(spec, metadata["labels"], "mpi", script_map) for _ in range(2))
    worker["spec"]["containers"][0]["command"] = WAIT
    worker["spec"]["containers"][0].pop("args", None)
    launcher["spec"]["containers"][0]["resources"] = LAUNCHER_RESOURCES
    if "command" in launcher["spec"]["containers"][0]:
        workers = f"{V1_JOB}={metadata['name']},{V1_TYPE}=worker"
        first = ["sh", "-c", WHEN_WORKERS_RUN, workers]
        launcher["spec"]["containers"][0]["command"][:0] = first
    body = training.KubeflowOrgV1MPIJobSpec(
        mpi_replica_specs={
            "Launcher": _replica(spec, 1, launcher),
            "Worker": _replica(spec, spec.nodes, worker),
        },
        slots_per_worker=spec.processes(),
        run_policy=_run_policy(spec),
        clean_pod_policy=spec.clean_pod_policy,
    )
    return _job(training.KubeflowOrgV1MPIJob, spec, metadata, body)


def _first_and_workers(first: str, spec: LaunchSpec, template: Object) -> dict[str, Any]:
    replicas = {first: _replica(spec, 1, template)}
    if spec.nodes > 1:
        replicas["Worker"] = _replica(spec, spec.nodes - 1, template)
    return replicas


def _replica(spec: LaunchSpec, count: int, template: Object) -> Any:
    from kubeflow.training import KubeflowOrgV1ReplicaSpec

    return KubeflowOrgV1ReplicaSpec(
        replicas=count, restart_policy=spec.pod_restart_policy(), template=template
    )


def _run_policy(spec: LaunchSpec) -> Any:
    """Clean-up, time to live, deadline and gang, as the operator takes them."""
    from kubeflow.training import KubeflowOrgV1RunPolicy, KubeflowOrgV1SchedulingPolicy

    scheduling = None
    if spec.scheduler in ("volcano", "coscheduling"):
        scheduling = KubeflowOrgV1SchedulingPolicy(
            # Left out, it is all pods, of which an MPIJob has one more than nodes.
            min_available=spec.node_range()[0] if spec.elastic else None,
            queue=spec.queue or None,
            priority_class=spec.priority_class or None,
        )
    return KubeflowOrgV1RunPolicy(
        clean_pod_policy=spec.clean_pod_policy,
        ttl_seconds_after_finished=spec.ttl_seconds if spec.ttl_seconds >= 0 else None,
        active_deadline_seconds=spec.operator_deadline(),
        backoff_limit=spec.backoff_limit if spec.backoff_limit >= 0 else None,
        scheduling_policy=scheduling,
    )


def _job(model: Any, spec: LaunchSpec, metadata: Object, body: Any) -> Object:
    """The job as JSON, by kubeflow-training's own client."""
    from kubeflow.training import ApiClient

    kind = KINDS[spec.kind]
    job = model(api_version=kind.group_version, kind=kind.title, metadata=metadata, spec=body)
    found: Object = ApiClient().sanitize_for_serialization(job)
    return found
