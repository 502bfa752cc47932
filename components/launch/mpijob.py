"""The MPIJob of a specification: a launcher that runs `mpirun`, and workers that it reaches."""

from typing import Any

from kfp_ddp.components.launch import pod
from kfp_ddp.components.launch.api import Object
from kfp_ddp.components.launch.pytorchjob import replica, run_policy, serialise
from kfp_ddp.components.launch.specification import LaunchSpec


def manifest(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """An MPIJob: the command runs in the launcher, and the workers wait to be given ranks.

    The launcher takes no GPU; it is one pod beside the `nodes` workers.
    """
    from kubeflow.training import KubeflowOrgV1MPIJob, KubeflowOrgV1MPIJobSpec

    worker = pod.template(spec, metadata["labels"], "mpi", script_map)
    launcher = pod.template(
        spec.model_copy(update={"gpus_per_node": 0}), metadata["labels"], "mpi", script_map
    )
    # The operator gives a worker without a command one that waits for the launcher.
    for key in ("command", "args"):
        worker["spec"]["containers"][0].pop(key, None)
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
                slots_per_worker=spec.nproc_per_node or max(1, spec.gpus_per_node),
                run_policy=run_policy(spec),
                clean_pod_policy=spec.clean_pod_policy,
            ),
        )
    )
