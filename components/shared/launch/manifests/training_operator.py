"""What the jobs of the Training Operator have in common: replicas, and how a job is run."""

from typing import Any

from kfp_ddp.components.shared.cluster.api import Object
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec


def replica(spec: LaunchSpec, count: int, template: Object) -> Any:
    """One kind of replica."""
    from kubeflow.training import KubeflowOrgV1ReplicaSpec

    return KubeflowOrgV1ReplicaSpec(
        replicas=count, restart_policy=spec.pod_restart_policy(), template=template
    )


def run_policy(spec: LaunchSpec) -> Any:
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


def serialise(job: Any) -> Object:
    """The job as JSON, by kubeflow-training's own client."""
    from kubeflow.training import ApiClient

    found: Object = ApiClient().sanitize_for_serialization(job)
    return found
