"""The TFJob of a specification: a chief and workers, as MultiWorkerMirroredStrategy wants them."""

from typing import Any

from kfp_ddp.components.shared.cluster.api import Object
from kfp_ddp.components.shared.launch.manifests import pod
from kfp_ddp.components.shared.launch.manifests.training_operator import (
    replica,
    run_policy,
    serialise,
)
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec


def manifest(spec: LaunchSpec, metadata: Object, script_map: str = "") -> Object:
    """A TFJob; the operator gives each pod its place in the cluster as TF_CONFIG."""
    from kubeflow.training import KubeflowOrgV1TFJob, KubeflowOrgV1TFJobSpec

    template = pod.template(spec, metadata["labels"], "tensorflow", script_map)
    replicas: dict[str, Any] = {"Chief": replica(spec, 1, template)}
    if spec.nodes > 1:
        replicas["Worker"] = replica(spec, spec.nodes - 1, template)
    return serialise(
        KubeflowOrgV1TFJob(
            api_version="kubeflow.org/v1",
            kind="TFJob",
            metadata=metadata,
            spec=KubeflowOrgV1TFJobSpec(tf_replica_specs=replicas, run_policy=run_policy(spec)),
        )
    )
