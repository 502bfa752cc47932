"""What the jobs of the Training Operator (kubeflow.org/v1) have in common."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kfp_ddp.jobs.kinds.base import Kind, PodRole
from kfp_ddp.k8s.api import Object

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec

JOB = "training.kubeflow.org/job-name"
TYPE, INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
LEADING = ("launcher", "master", "chief")


class TrainingOperatorKind(Kind):
    """A kind of job of the Training Operator."""

    group_version = "kubeflow.org/v1"
    operator = "Kubeflow Training Operator 1.9"
    operator_selector = "control-plane=kubeflow-training-operator"
    job_label = JOB

    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""
        labels = pod["metadata"].get("labels") or {}
        if TYPE not in labels:
            return None
        number = str(labels.get(INDEX, ""))
        return PodRole(
            f"{labels[TYPE]}-{number or 0}",
            int(number) if number.isdecimal() else sys.maxsize,
            labels[TYPE] in LEADING,
        )

    def suspended(self, job: Object) -> bool:
        """Return whether the job's spec suspends it, as a queue does."""
        return bool(((job.get("spec") or {}).get("runPolicy") or {}).get("suspend"))

    def job(self, model: Any, metadata: Object, body: Any) -> Object:
        """Return the job as JSON, by the client of kubeflow-training."""
        from kubeflow.training import ApiClient

        job = model(api_version=self.group_version, kind=self.title, metadata=metadata, spec=body)
        manifest: Object = ApiClient().sanitize_for_serialization(job)
        return manifest


def replica(spec: LaunchSpec, count: int, template: Object) -> Any:
    """Return a ReplicaSpec."""
    from kubeflow.training import KubeflowOrgV1ReplicaSpec

    return KubeflowOrgV1ReplicaSpec(
        replicas=count, restart_policy=spec.pod_restart_policy(), template=template
    )


def run_policy(spec: LaunchSpec) -> Any:
    """Return the RunPolicy: clean-up, time to live, deadline and gang."""
    from kubeflow.training import KubeflowOrgV1RunPolicy, KubeflowOrgV1SchedulingPolicy

    scheduling = None
    if spec.scheduler in ("volcano", "coscheduling"):
        scheduling = KubeflowOrgV1SchedulingPolicy(
            # The default is all pods, which in an MPIJob are one more than nodes.
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
