"""The kinds of jobs: where each lives, what it has no place for, and what its pods are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kfp_ddp.k8s.api import Object, custom

KindName = Literal["pytorchjob", "trainjob", "tfjob", "mpijob"]
V1_JOB = "training.kubeflow.org/job-name"
V1_TYPE, V1_INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
V2_JOB = "jobset.sigs.k8s.io/jobset-name"
V2_INDEX = "batch.kubernetes.io/job-completion-index"
PATCHES_MANAGER = "kfp-ddp/launcher"


class Unsupported(NamedTuple):
    """A setting that a kind of job has no place for."""

    setting: str
    refusal: str
    """What is said of it in one line, with {setting}, {value}, {kind} and {runtime}."""
    allowed: tuple[str, ...] = ()
    """Values that it may have all the same, besides its default."""


@dataclass(frozen=True)
class Kind:
    """One kind of job on the cluster."""

    title: str
    group_version: str
    plural: str
    operator: str
    job_label: str
    containers: tuple[str, ...]
    script_starter: Literal["torchrun", "mpirun", ""]
    """What starts the ranks of a `script` in a pod; '' for Python itself."""
    unsupported: tuple[Unsupported, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its containers get, unless a user sets them otherwise."""
    stripped_fields: Callable[[Object], str] = lambda job: ""
    """What the job has lost of its specification since it was made, and who takes it away."""
    restarts_in_place: bool = False
    """Whether a failed container is started again in its pod, which no setting of ours prevents."""
    waits_in_silence: bool = False
    """Whether ranks wait without a word for one that was lost before they met, as torch's do."""

    def path(self, namespace: str, name: str = "") -> str:
        """Path of the collection, or of one job, on the API server."""
        return custom(self.group_version, namespace, self.plural, name)

    def pod_selector(self, name: str) -> str:
        """Label selector of a job's pods."""
        return f"{self.job_label}={name}"


def lost_patches(job: Object) -> str:
    """What is said of a TrainJob that has lost our patches; '' while it has them.

    Kueue before 0.17 writes back a TrainJob as Trainer 2.0 knew it, without runtimePatches, when
    it admits one; Trainer cannot make its pods after that.
    """
    patches = job["spec"].get("runtimePatches") or []
    if any(patch["manager"] == PATCHES_MANAGER for patch in patches):
        return ""
    return (
        "has lost its runtimePatches, with volumes and settings, and was deleted; Kueue before "
        "0.17 takes them away: use a newer one, or backend pytorchjob in this queue"
    )


NOT_ELASTIC = Unsupported(
    "elastic", "elastic={value}: a {kind} cannot be elastic; use a pytorchjob"
)
NO_RUNTIME = Unsupported("runtime", "runtime={value!r}: a {kind} has none, a trainjob has")
IN_THE_RUNTIME = (
    "{setting} cannot be set on a TrainJob: put it into the runtime {runtime!r}, "
    "or use a PyTorchJob"
)
# Or a log that is followed shows its lines at the end; of the operators one sets it itself.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
# torchrun gives up after ten minutes, less than a big image may take to be pulled on another node.
PATIENT = {"PET_RDZV_CONF": "timeout=3600,join_timeout=3600"}
TRAINING_OPERATOR: dict[str, Any] = {
    "group_version": "kubeflow.org/v1",
    "operator": "Kubeflow Training Operator 1.9",
    "job_label": V1_JOB,
}

KINDS: dict[str, Kind] = {
    "pytorchjob": Kind(
        **TRAINING_OPERATOR,
        title="PyTorchJob",
        plural="pytorchjobs",
        containers=("pytorch",),
        script_starter="torchrun",
        unsupported=(NO_RUNTIME,),
        environment=PATIENT,
        waits_in_silence=True,
    ),
    "tfjob": Kind(
        **TRAINING_OPERATOR,
        title="TFJob",
        plural="tfjobs",
        containers=("tensorflow",),
        script_starter="",
        unsupported=(
            NOT_ELASTIC,
            NO_RUNTIME,
            Unsupported(
                "nproc_per_node",
                "nproc_per_node={value}: a {kind} runs one process in each pod; leave it at 0",
            ),
            Unsupported(
                "nccl_timeout_minutes",
                "nccl_timeout_minutes={value}: the time-out is torch's, which a {kind} does not "
                "run; leave it at 0",
            ),
        ),
        environment=UNBUFFERED,
    ),
    "mpijob": Kind(
        **TRAINING_OPERATOR,
        title="MPIJob",
        plural="mpijobs",
        containers=("mpi",),
        script_starter="mpirun",
        unsupported=(NOT_ELASTIC, NO_RUNTIME),
        # Open MPI ties each of two ranks to one core, which starves a rank that has threads.
        environment={**UNBUFFERED, "OMPI_MCA_hwloc_base_binding_policy": "none"},
    ),
    "trainjob": Kind(
        title="TrainJob",
        group_version="trainer.kubeflow.org/v1alpha1",
        plural="trainjobs",
        operator="Kubeflow Trainer 2.2 or later",
        job_label=V2_JOB,
        containers=("node",),
        script_starter="torchrun",
        unsupported=(
            NOT_ELASTIC,
            Unsupported("host_network", IN_THE_RUNTIME),
            Unsupported("init_containers", IN_THE_RUNTIME),
            Unsupported("topology_spread", IN_THE_RUNTIME),
            Unsupported("priority_class", IN_THE_RUNTIME),
            Unsupported("image_pull_policy", IN_THE_RUNTIME),
            Unsupported("restart_policy", IN_THE_RUNTIME),
            Unsupported("backoff_limit", IN_THE_RUNTIME),
            Unsupported("scheduler", IN_THE_RUNTIME, allowed=("kueue",)),
            Unsupported("env_from_secrets", IN_THE_RUNTIME),
            Unsupported("clean_pod_policy", IN_THE_RUNTIME),
            Unsupported("ttl_seconds", IN_THE_RUNTIME),
        ),
        environment={**UNBUFFERED, **PATIENT},
        stripped_fields=lost_patches,
        restarts_in_place=True,
        waits_in_silence=True,
    ),
}


def pod_title(pod: Object) -> str:
    """What stands before a pod's log lines: its role in the job and its number."""
    labels = pod["metadata"].get("labels", {})
    if V1_TYPE in labels:
        return f"{labels[V1_TYPE]}-{labels.get(V1_INDEX, '0')}"
    if V2_INDEX in labels:
        return f"node-{labels[V2_INDEX]}"
    return str(pod["metadata"]["name"])
