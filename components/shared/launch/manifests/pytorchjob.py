"""The PyTorchJob of a specification, for the Training Operator v1."""

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
    """A PyTorchJob: a master and workers, or workers alone where it is elastic.

    The master makes the operator put an init container into the workers that waits for its name;
    an elastic job has no master because the operator does not count one in its range of nodes.
    """
    from kubeflow.training import (
        KubeflowOrgV1ElasticPolicy,
        KubeflowOrgV1PyTorchJob,
        KubeflowOrgV1PyTorchJobSpec,
    )

    template = pod.template(spec, metadata["labels"], "pytorch", script_map)
    replicas: dict[str, Any] = {}
    elastic = None
    if spec.elastic:
        low, high = spec.node_range()
        replicas["Worker"] = replica(spec, spec.pods(), template)
        elastic = KubeflowOrgV1ElasticPolicy(
            min_replicas=low,
            max_replicas=high,
            rdzv_backend="c10d",
            max_restarts=spec.restarts(),
            rdzv_id=metadata["name"],
        )
    else:
        replicas["Master"] = replica(spec, 1, template)
        if spec.nodes > 1:
            replicas["Worker"] = replica(spec, spec.nodes - 1, template)
    job = KubeflowOrgV1PyTorchJob(
        api_version="kubeflow.org/v1",
        kind="PyTorchJob",
        metadata=metadata,
        spec=KubeflowOrgV1PyTorchJobSpec(
            pytorch_replica_specs=replicas,
            elastic_policy=elastic,
            nproc_per_node=str(spec.processes()),
            run_policy=run_policy(spec),
        ),
    )
    return serialise(job)
