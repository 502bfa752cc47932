"""The MPIJob of a specification: a launcher that runs `mpirun`, and workers that it reaches."""

from typing import Any

from kfp_ddp.components.shared.cluster.api import Object
from kfp_ddp.components.shared.launch.manifests import pod
from kfp_ddp.components.shared.launch.manifests.training_operator import (
    replica,
    run_policy,
    serialise,
)
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec

WORKERS = "training.kubeflow.org/replica-type=worker"
# A worker waits to be given ranks by `kubectl exec`. The operator's own `sleep 365d` is deaf to
# SIGTERM as process 1, and would hold its GPUs for the whole grace period when the job is over.
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


def manifest(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """An MPIJob: the command runs in the launcher, and the workers wait to be given ranks.

    The launcher takes no GPU; it is one pod beside the `nodes` workers.
    """
    from kubeflow.training import KubeflowOrgV1MPIJob, KubeflowOrgV1MPIJobSpec

    worker, launcher = (pod.template(spec, metadata["labels"], "mpi", script_map) for _ in range(2))
    worker["spec"]["containers"][0]["command"] = WAIT
    worker["spec"]["containers"][0].pop("args", None)
    launcher["spec"]["containers"][0]["resources"] = LAUNCHER_RESOURCES
    if "command" in launcher["spec"]["containers"][0]:
        workers = f"training.kubeflow.org/job-name={metadata['name']}," + WORKERS
        first = ["sh", "-c", WHEN_WORKERS_RUN, workers]
        launcher["spec"]["containers"][0]["command"][:0] = first
    replicas: dict[str, Any] = {
        "Launcher": replica(spec, 1, launcher),
        "Worker": replica(spec, spec.nodes, worker),
    }
    return serialise(
        KubeflowOrgV1MPIJob(
            api_version="kubeflow.org/v1",
            kind="MPIJob",
            metadata=metadata,
            spec=KubeflowOrgV1MPIJobSpec(
                mpi_replica_specs=replicas,
                slots_per_worker=spec.processes(),
                run_policy=run_policy(spec),
                clean_pod_policy=spec.clean_pod_policy,
            ),
        )
    )
