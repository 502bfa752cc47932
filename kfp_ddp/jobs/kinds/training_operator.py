"""What the jobs of the Training Operator (kubeflow.org/v1) have in common."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.kinds.base import Kind, PodRole, Runtime
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

    def manifest(
        self,
        spec: LaunchSpec,
        metadata: Object,
        script_map: str = "",
        runtime: Runtime | None = None,
    ) -> Object:
        """Return the job as JSON, by the models of kubeflow-training."""
        from kubeflow import training

        template = pod.template(spec, metadata["labels"], self.containers[0], script_map)
        fields = self.fields(spec, metadata["name"], template)
        model = f"KubeflowOrgV1{self.title}"
        body = getattr(training, f"{model}Spec")(**fields, run_policy=_run_policy(spec))
        job = getattr(training, model)(
            api_version=self.group_version, kind=self.title, metadata=metadata, spec=body
        )
        manifest: Object = training.ApiClient().sanitize_for_serialization(job)
        return manifest

    @abstractmethod
    def fields(self, spec: LaunchSpec, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of the job's spec without its run policy, by the names of the model."""


def replica(spec: LaunchSpec, count: int, template: Object) -> Any:
    """Return a ReplicaSpec."""
    from kubeflow.training import KubeflowOrgV1ReplicaSpec

    return KubeflowOrgV1ReplicaSpec(
        replicas=count, restart_policy=spec.pod_restart_policy(), template=template
    )


def _run_policy(spec: LaunchSpec) -> Any:
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
