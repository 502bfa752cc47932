"""What differs between the kinds of jobs: where they live, their pods, their state."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from kfp_ddp.components.shared.cluster.api import Object, custom
from kfp_ddp.components.shared.launch.manifests import mpijob, pytorchjob, tfjob, trainjob
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec

Phase = Literal["created", "queued", "running", "succeeded", "failed"]
V1_JOB = "training.kubeflow.org/job-name"
V1_TYPE, V1_INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
V2_JOB = "jobset.sigs.k8s.io/jobset-name"
V2_INDEX = "batch.kubernetes.io/job-completion-index"
# The Training Operator has one reason for all failures.
V1_DEADLINE = "active longer than specified deadline"


@dataclass(frozen=True)
class State:
    """Where a job is, and what its controller says about it."""

    phase: Phase
    message: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.phase in ("succeeded", "failed")

    @property
    def past_deadline(self) -> bool:
        """Whether its controller ended it for the time that it took."""
        return self.phase == "failed" and (
            self.reason == "DeadlineExceeded" or V1_DEADLINE in self.message
        )


@dataclass(frozen=True)
class Kind:
    """One kind of job on the cluster."""

    title: str
    group_version: str
    plural: str
    operator: str
    job_label: str
    containers: tuple[str, ...]
    manifest: Callable[[LaunchSpec, Object, str], Object]
    spoiled: Callable[[Object], str] = lambda job: ""
    """What the job has lost of its specification since it was made, and who takes it away."""
    restarts_in_place: bool = False
    """Whether a failed container is started again in its pod, which no setting of ours prevents."""

    def path(self, namespace: str, name: str = "") -> str:
        """Path of the collection, or of one job, on the API server."""
        return custom(self.group_version, namespace, self.plural, name)

    def pod_selector(self, name: str) -> str:
        """Label selector of a job's pods."""
        return f"{self.job_label}={name}"


def pod_title(pod: Object) -> str:
    """What stands before a pod's log lines: its role in the job and its number."""
    labels = pod["metadata"].get("labels", {})
    if V1_TYPE in labels:
        return f"{labels[V1_TYPE]}-{labels.get(V1_INDEX, '0')}"
    if V2_INDEX in labels:
        return f"node-{labels[V2_INDEX]}"
    return str(pod["metadata"]["name"])


def state(job: Object) -> State:
    """The state of a job of any kind, from its conditions."""
    status: dict[str, Any] = job.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c["status"] == "True"}
    for kind, phase in (
        ("Failed", "failed"),
        ("Succeeded", "succeeded"),
        ("Complete", "succeeded"),
    ):
        if found := conditions.get(kind):
            said, why = found.get("message", ""), found.get("reason", "")
            return State(phase, said, why)  # type: ignore[arg-type]
    if "Suspended" in conditions or suspended(job):
        return State("queued", conditions.get("Suspended", {}).get("message", ""))
    if "Running" in conditions:
        return State("running")
    # A TrainJob has no such condition, and counts pods that wait for a node as active too.
    jobs = status.get("jobsStatus") or []
    if any(each.get("ready") or each.get("succeeded") for each in jobs):
        return State("running")
    return State("created")


def started(job: Object) -> float:
    """When a job may last have begun to run, in seconds since 1970.

    That is when it was made, or when its queue let it go: what it waited there, or ran before it
    was preempted, counts for no deadline of its own, and for none of its operator's.
    """
    conditions = (job.get("status") or {}).get("conditions") or []
    resumed = [c for c in conditions if c["type"] == "Suspended" and c["status"] == "False"]
    at = resumed[0].get("lastTransitionTime") if resumed else None
    return datetime.fromisoformat(at or job["metadata"]["creationTimestamp"]).timestamp()


def suspended(job: Object) -> bool:
    """Whether its specification holds the job back, as a queue does."""
    spec = job.get("spec") or {}
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def _of_training_operator(
    title: str, plural: str, container: str, manifest: Callable[[LaunchSpec, Object, str], Object]
) -> Kind:
    return Kind(
        title=title,
        group_version="kubeflow.org/v1",
        plural=plural,
        operator="Kubeflow Training Operator 1.9",
        job_label=V1_JOB,
        containers=(container,),
        manifest=manifest,
    )


KINDS: dict[str, Kind] = {
    "pytorchjob": _of_training_operator(
        "PyTorchJob", "pytorchjobs", "pytorch", pytorchjob.manifest
    ),
    "tfjob": _of_training_operator("TFJob", "tfjobs", "tensorflow", tfjob.manifest),
    "mpijob": _of_training_operator("MPIJob", "mpijobs", "mpi", mpijob.manifest),
    "trainjob": Kind(
        title="TrainJob",
        group_version="trainer.kubeflow.org/v1alpha1",
        plural="trainjobs",
        operator="Kubeflow Trainer 2.2 or later",
        job_label=V2_JOB,
        containers=("node",),
        manifest=trainjob.manifest,
        spoiled=trainjob.spoiled,
        restarts_in_place=True,
    ),
}
