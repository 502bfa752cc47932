"""The manifests of the Training Operator's jobs: PyTorchJob, TFJob and MPIJob."""

from typing import Any

from kfp_ddp.jobs.manifests import pod
from kfp_ddp.jobs.specification.kinds import KINDS, V1_INDEX, V1_JOB, V1_TYPE
from kfp_ddp.jobs.specification.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object

# An MPIJob's worker waits to be given ranks by `kubectl exec`. The operator's own `sleep 365d` is
# deaf to SIGTERM as process 1, and would hold its GPUs for the whole grace period at the end.
WAIT = ["sh", "-c", "trap exit TERM; while :; do sleep 3600 & wait $!; done"]
# The operator starts the launcher beside the workers, and mpirun fails where one is not there yet.
# Its init container has left kubectl here, and its Role lets the launcher watch pods.
WHEN_WORKERS_RUN = """/opt/kube/kubectl wait pod --for=condition=Ready --timeout=-1s -l "$0" >&2 &&
exec "$@"
"""
# Where ranks meet; the operator's own port, which it gives the pods' Services.
PORT = "23456"
# The name of a pod is known while it runs. Process 1 hears SIGTERM only where it is trapped.
WHEN_FIRST_RUNS = """trap exit TERM
[ "$INDEX" = 0 ] || ! command -v getent || until getent hosts "$0"; do sleep 2; done
"""
WAIT_RESOURCES = {kind: {"cpu": "100m", "memory": "64Mi"} for kind in ("limits", "requests")}
# The launcher starts the ranks and computes nothing.
LAUNCHER_RESOURCES: Object = {
    "limits": {"cpu": "1", "memory": "2Gi"},
    "requests": {"cpu": "100m", "memory": "256Mi"},
}


def pytorchjob(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """A PyTorchJob of workers alone, the first of which the others meet at.

    A master would make the operator put an init container into the workers that gives up after
    200 s, less than an image may take to be pulled, and that PodSecurity `restricted` refuses.
    """
    from kubeflow import training

    template = pod.template(spec, metadata["labels"], "pytorch", script_map)
    first, elastic = f"{metadata['name']}-worker-0", None
    if spec.elastic:
        low, high = spec.node_range()
        elastic = training.KubeflowOrgV1ElasticPolicy(
            min_replicas=low,
            max_replicas=high,
            rdzv_backend="c10d",
            max_restarts=spec.restarts(),
            rdzv_id=metadata["name"],
        )
        # torchrun gives up after a minute here, and no setting of it is for this wait alone.
        waiting = _wait_for(first, template["spec"]["containers"][0])
        template["spec"].setdefault("initContainers", []).append(waiting)
    else:
        container = template["spec"]["containers"][0]
        given = {item["name"]: item for item in container.get("env", [])}
        container["env"] = list((given | _places(spec, first)).values())
    body = training.KubeflowOrgV1PyTorchJobSpec(
        pytorch_replica_specs={"Worker": _replica(spec, spec.pods(), template)},
        elastic_policy=elastic,
        nproc_per_node=str(spec.processes()),
        run_policy=_run_policy(spec),
    )
    return _job(training.KubeflowOrgV1PyTorchJob, spec, metadata, body)


def _places(spec: LaunchSpec, first: str) -> dict[str, Object]:
    """What the operator tells each pod of where it is among the others, if there is a master."""
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{V1_INDEX}']"}}
    fixed = {
        "MASTER_ADDR": first,
        "MASTER_PORT": PORT,
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": PORT,
        "WORLD_SIZE": str(spec.nodes * spec.processes()),
    }
    found: dict[str, Object] = {name: {"name": name, "value": fixed[name]} for name in fixed}
    ranks = ("RANK", "PET_NODE_RANK")
    return found | {name: {"name": name, "valueFrom": index} for name in ranks}


def _wait_for(first: str, container: Object) -> Object:
    """An init container that ends when the first worker runs, and at once in that one itself."""
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{V1_INDEX}']"}}
    return {
        "name": "wait-for-first",
        "image": container["image"],
        "command": ["sh", "-c", WHEN_FIRST_RUNS, first],
        "env": [{"name": "INDEX", "valueFrom": index}],
        "resources": WAIT_RESOURCES,
        "securityContext": container["securityContext"],
    }


def tfjob(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """A TFJob: a chief and workers, as MultiWorkerMirroredStrategy wants them.

    The operator gives each pod its place in the cluster as TF_CONFIG.
    """
    from kubeflow import training

    template = pod.template(spec, metadata["labels"], "tensorflow", script_map)
    replicas = {"Chief": _replica(spec, 1, template)}
    if spec.nodes > 1:
        replicas["Worker"] = _replica(spec, spec.nodes - 1, template)
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
    launcher["spec"].pop("automountServiceAccountToken", None)  # it starts the ranks by the API
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
