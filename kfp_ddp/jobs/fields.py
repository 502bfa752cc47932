"""Fields of a distributed job, of which its kinds make manifests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from kfp_ddp.core.settings import Settings
from kfp_ddp.jobs.requirements import INDEX, PACKAGE, check_packages
from kfp_ddp.jobs.shipping.code import CODE
from kfp_ddp.k8s.objects import (
    CAPABILITY,
    CLAIM,
    DESCRIPTIONS,
    IMAGE,
    KEY,
    LABEL,
    MOUNT,
    NAME,
    QUANTITY,
    RESOURCE,
    VARIABLE,
    parse_quantity,
)

BACKSTOP_SECONDS = 60

ENTRY = r"^$|^[^/\s-]([^\s]*[^/\s])?$"

PATTERN_DESCRIPTIONS = {
    **DESCRIPTIONS,
    CODE: "what as_folder makes, or /path/SHA256.tar.gz or gs://bucket/SHA256.tar.gz",
    ENTRY: "a file of the folder such as train.py, or a module such as package.train",
    PACKAGE: "a pin such as name==1.0, with --hash=sha256:... of a lock",
    INDEX: "the address of a package index",
}

Name = Annotated[str, StringConstraints(pattern=NAME, min_length=1)]
Claim = Annotated[str, StringConstraints(pattern=CLAIM)]
MountPath = Annotated[str, StringConstraints(pattern=MOUNT)]
VariableName = Annotated[str, StringConstraints(pattern=VARIABLE)]
LabelKey = Annotated[str, StringConstraints(pattern=KEY)]
Part = Literal["limits", "requests"]
Quantity = Annotated[str, StringConstraints(pattern=QUANTITY, min_length=1)]
Capability = Annotated[str, StringConstraints(pattern=CAPABILITY)]
Package = Annotated[str, StringConstraints(pattern=PACKAGE)]
Index = Annotated[str, StringConstraints(pattern=INDEX)]
LabelValue = Annotated[str, StringConstraints(pattern=LABEL)]
# The API server refuses a name that is repeated.
Unique = AfterValidator(lambda names: tuple(dict.fromkeys(names)))

KindName = Literal["pytorchjob", "trainjob", "tfjob", "mpijob", "xgboostjob", "rayjob"]


Starter = Literal["torchrun", "mpirun", ""]
"""What starts the ranks of a `script` in a pod; '' for Python itself."""


class Starts(Protocol):
    """How a kind of job starts the program of a pod."""

    script_starter: Starter
    environment: ClassVar[Mapping[str, str]]
    """Environment variables of its containers, unless the user sets them."""


class Program(Settings):
    """What the workers run, in which image, with which environment."""

    secret: ClassVar[frozenset[str]] = frozenset({"env", "env_vars", "code", "pip_index_urls"})

    kind: KindName = "pytorchjob"
    """Kind of job: pytorchjob, tfjob, mpijob and xgboostjob are of the Training Operator, trainjob
    of Kubeflow Trainer, rayjob of KubeRay."""
    image: str = Field(pattern=IMAGE)
    """Container image of the workers."""
    command: tuple[str, ...] = ()
    """Command of each worker as a list of words, which no shell reads; empty for the image's own.
    In an MPIJob the launcher alone runs it, in a RayJob the head."""
    args: tuple[str, ...] = ()
    """Arguments that follow the command, the script or the entry."""
    script: str = ""
    """Text of a Python file that the workers run instead of a command, plain or packed into one
    line."""
    code: str = Field("", pattern=CODE)
    """Folder of code that each worker runs in, as as_folder packs it: in the value itself, or the
    address of its archive on a claim of the workers or in a bucket; '' for the image's own."""
    entry: str = Field("", pattern=ENTRY)
    """File or module of that folder that the workers run, such as train.py or package.train; '' for
    command or script."""
    packages_to_install: tuple[Package, ...] = ()
    """Packages that each pod installs before it runs, in a folder of their own, of what the image
    lacks: pins such as timm==1.0.0 or, where all have hashes, a lock."""
    pip_index_urls: tuple[Index, ...] = ()
    """Package indexes, in place of pip's. A package is taken from the first that has its name."""
    runtime: str = Field("torch-distributed", pattern=NAME)
    """Runtime that a TrainJob is made from: a TrainingRuntime of the namespace, or a
    ClusterTrainingRuntime."""
    env: dict[VariableName, str] = Field(default_factory=dict)
    """Environment variables of the workers, by name."""
    env_from_secrets: tuple[Name, ...] = ()
    """Secrets; all of their keys become environment variables of the workers."""
    env_vars: tuple[dict[str, Any], ...] = ()
    """Environment variables as Kubernetes writes them, for values from a Secret's key and the like;
    env overrides it."""
    init_containers: tuple[dict[str, Any], ...] = ()
    """Containers that run to their end in each pod before its worker, as Kubernetes writes them;
    one has the worker's image, mounts and security where it names none."""
    image_pull_secrets: Annotated[tuple[Name, ...], Unique] = ()
    """Secrets with which the image is pulled from a private registry."""
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    """When the image is pulled again; '' for the cluster's default."""

    @model_validator(mode="after")
    def _consistent_program(self) -> Self:
        ways = [name for name in ("command", "script", "entry") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"give {' or '.join(ways)}, not both")
        if self.entry and not self.code:
            raise ValueError(f"entry={self.entry!r} without code: as_folder gives both")
        if self.pip_index_urls and not self.packages_to_install:
            raise ValueError("pip_index_urls without packages_to_install: nothing is installed")
        if self.prepares() and not ways:
            raise ValueError(
                "code and packages_to_install need a command, a script or an entry: what the "
                "image runs of itself would not find them"
            )
        check_packages(self.packages_to_install)
        _check_keys("env_vars", self.env_vars, "name")
        return self

    def prepares(self) -> bool:
        """Return whether a worker unpacks code or installs packages before it runs."""
        return bool(self.code or self.packages_to_install)


class Size(Settings):
    """How many nodes a job has, and what each of them gets."""

    nodes: int = Field(1, ge=1, le=4096)
    """Number of worker pods, in a RayJob with its head. An MPIJob has its launcher besides."""
    nproc_per_node: int = Field(0, ge=0)
    """Processes (ranks) in each pod; 0 for one for each GPU, or one."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each pod; 0 for those that are set on the KFP task, or none."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name under which the cluster offers its GPUs."""
    cpu: str = Field("", pattern=QUANTITY)
    """CPUs that each pod requests and may use at most, such as 4 or 500m; '' for a default. With
    GPUs: limit 8 and request 2 for each GPU. Without: limit 4 and request 100m for each process."""
    memory: str = Field("", pattern=QUANTITY)
    """Memory that each pod requests and may use at most, such as 16Gi; '' for a default. With GPUs:
    limit 32Gi and request 8Gi for each GPU. Without: limit 4Gi and request 512Mi for each
    process."""
    cpu_request: str = Field("", pattern=QUANTITY)
    """CPUs that each pod requests, where that is less than its limit; '' for cpu. Without cpu
    the pod has no limit of it."""
    memory_request: str = Field("", pattern=QUANTITY)
    """Memory that each pod requests, where that is less than its limit; '' for memory. Without
    memory the pod has no limit of it."""
    resources: dict[Part, dict[LabelKey, Quantity]] = Field(default_factory=dict)
    """Limits and requests of each pod as Kubernetes writes them, of any resource; cpu, memory and
    gpus_per_node override it."""
    shm_size: str = Field("2Gi", pattern=QUANTITY)
    """Shared memory (/dev/shm) of each pod, which data loaders and NCCL use; train gives more where
    its loaders need it and this is not set. '' for the container runtime's own, mostly 64 MB."""

    @model_validator(mode="after")
    def _consistent_size(self) -> Self:
        requested = self.requested()
        for name, limit in requested["limits"].items():
            request = requested["requests"].get(name, limit)
            if parse_quantity(request) > parse_quantity(limit):
                raise ValueError(f"{name}: {request} are requested, above the limit of {limit}")
            if self.is_gpu(name) and parse_quantity(limit).denominator > 1:
                raise ValueError(f"{name}={limit} is not a number of GPUs: give a whole one")
        return self

    def requested(self) -> dict[str, dict[str, str]]:
        """Return the limits and requests of each pod that are set; cpu and memory come first."""
        limits = dict(self.resources.get("limits", {}))
        requests = dict(self.resources.get("requests", {}))
        for name, limit, request in (
            ("cpu", self.cpu, self.cpu_request),
            ("memory", self.memory, self.memory_request),
        ):
            if limit:
                limits[name] = limit
            if request or limit:
                requests[name] = request or limit
        return {"limits": limits, "requests": requests}

    def gpus(self) -> int:
        """Return the GPUs of a node, set here or on the KFP task."""
        limits = self.resources.get("limits", {})
        counts = (int(parse_quantity(n)) for name, n in limits.items() if self.is_gpu(name))
        return self.gpus_per_node or sum(counts)

    def is_gpu(self, resource: str) -> bool:
        """Return whether a resource is a GPU or a part of one."""
        return resource == self.gpu_resource or is_gpu(resource)

    def processes(self) -> int:
        """Return the processes of a node: as set, one for each GPU, or one."""
        return self.nproc_per_node or max(1, self.gpus())


class Volumes(Settings):
    """What the workers mount."""

    claims: dict[MountPath, Claim] = Field(default_factory=dict)
    """PersistentVolumeClaims of the workers by the path where they are mounted; name:ro mounts one
    read-only."""
    volumes: tuple[dict[str, Any], ...] = ()
    """Further volumes of the workers as Kubernetes writes them."""
    volume_mounts: tuple[dict[str, Any], ...] = ()
    """Where the workers mount those volumes, as Kubernetes writes it."""

    @model_validator(mode="after")
    def _consistent_volumes(self) -> Self:
        _check_keys("volumes", self.volumes, "name")
        _check_keys("volume_mounts", self.volume_mounts, "name")
        _check_keys("volume_mounts", self.volume_mounts, "mountPath")
        return self


class Network(Settings):
    """How the workers reach one another, and who reaches them."""

    nccl_debug: Literal["", "VERSION", "WARN", "INFO", "TRACE"] = ""
    """How much NCCL logs (NCCL_DEBUG); '' for its own default."""
    nccl_socket_interface: str = ""
    """Network interface that NCCL and gloo use, such as eth0; '' for their own choice."""
    nccl_infiniband: Literal["", "on", "off"] = ""
    """Whether NCCL uses InfiniBand or RoCE; '' for wherever it finds one. With on the workers get
    the capability IPC_LOCK, which has effect for root; others need an unlimited memlock of the
    node."""
    rdma_resource: str = Field("", pattern=RESOURCE)
    """Resource name under which the cluster offers its RDMA devices, such as
    rdma/hca_shared_devices_a, of which each pod asks for one; '' for none. It needs
    nccl_infiniband=on."""
    nccl_timeout_minutes: float = Field(0, ge=0)
    """Minutes that a collective may take before the ranks fail; 0 for torch's own. train hands it
    to its ranks; a command or script finds the seconds in KFP_DDP_TIMEOUT_SECONDS, for
    init_process_group(timeout=...): torch takes it from no variable itself."""
    host_network: bool = False
    """Whether the pods use the network of their node instead of their own."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port at which the workers serve /metrics, announced to Prometheus; 0 for none."""
    istio: bool = False
    """Whether Istio adds its sidecar to the pods; with one a job may never end."""

    @model_validator(mode="after")
    def _consistent_network(self) -> Self:
        if self.rdma_resource and self.nccl_infiniband != "on":
            raise ValueError(
                f"rdma_resource={self.rdma_resource!r} without nccl_infiniband=on: "
                "NCCL would not use the device"
            )
        return self


class Placement(Settings):
    """On which nodes the pods run, and who starts them."""

    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Further labels of the pods, such as a team or a cost center."""
    annotations: dict[LabelKey, str] = Field(default_factory=dict)
    """Further annotations of the pods, such as those of a network or of a queue's topology."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels that a node must have to run a pod of the job."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints of nodes that the pods tolerate, as Kubernetes writes them."""
    affinity: dict[str, Any] = Field(default_factory=dict)
    """Affinity of the pods to nodes and to one another, as Kubernetes writes it."""
    topology_spread: tuple[dict[str, Any], ...] = ()
    """How the pods spread over zones, racks or nodes, as Kubernetes writes
    topologySpreadConstraints; one without labelSelector counts the pods of the job."""
    spot: Literal["", "gke", "aks", "karpenter", "eks"] = ""
    """Provider of the interruptible (spot) nodes that the pods run on; '' for other nodes."""
    runtime_class: str = Field("", pattern=NAME)
    """RuntimeClass of the pods, such as nvidia where NVIDIA's runtime is not the nodes' default, as
    on k3s and RKE2; '' for the cluster's default."""
    priority_class: str = Field("", pattern=NAME)
    """PriorityClass of the pods; '' for the cluster's default."""
    scheduler: Literal["", "kueue", "volcano", "coscheduling", "runai", "kai"] = ""
    """Scheduler that queues the job and starts its pods together; '' for the cluster's default."""
    queue: str = Field("", pattern=LABEL)
    """Queue of that scheduler that the job waits in; '' for none."""

    @model_validator(mode="after")
    def _consistent_placement(self) -> Self:
        if self.queue and not self.scheduler:
            raise ValueError(
                f"queue={self.queue!r} without scheduler: set the scheduler of the queue, "
                "kueue, volcano, coscheduling, runai or kai"
            )
        return self


class Security(Settings):
    """As whom the workers run, and what they may do."""

    service_account: str = Field("", pattern=NAME)
    """Service account of the pods; '' for the namespace's default."""
    run_as_user: int = Field(-1, ge=-1)
    """User id under which the workers run; -1 for the image's own."""
    fs_group: int = Field(-1, ge=-1)
    """Group id that owns the files of mounted claims; -1 to leave them as they are."""
    non_root: bool = True
    """Whether a worker that would run as root is refused."""
    capabilities: tuple[Capability, ...] = ()
    """Capabilities of Linux that the workers get, such as IPC_LOCK; PodSecurity baseline and
    restricted refuse most."""


class Lifetime(Settings):
    """When a job, or a pod of it, is ended, restarted and deleted."""

    grace_seconds: int = Field(120, ge=1)
    """Seconds that a pod has from SIGTERM to SIGKILL, as for a last checkpoint."""
    restart_policy: Literal["Never", "OnFailure", "ExitCode"] = "Never"
    """Never: the job fails. OnFailure: the container restarts. ExitCode: a pod that a signal ended
    is recreated."""
    backoff_limit: int = Field(-1, ge=-1)
    """Restarts of pods after which the operator ends the job; -1 for no limit."""
    clean_pod_policy: Literal["Running", "All", "None"] = "Running"
    """Pods that the operator removes when the job is over: those that still run, all or none."""
    ttl_seconds: int = Field(86400, ge=-1)
    """Seconds after which a job that is over is deleted; -1 to leave it until the run's Workflow,
    which owns it, is deleted."""
    deadline_minutes: float = Field(0, ge=0)
    """Minutes that the job may take, without its wait in a queue; 0 for no limit."""
    pending_minutes: float = Field(0, ge=0)
    """Minutes that pods may wait for a node or an image before the job is given up; 0 for no
    end."""
    retries: int = Field(2, ge=0, le=100)
    """How often the job is retried after it lost a node or was preempted."""

    def operator_deadline(self) -> int | None:
        """Return the seconds after which the operator ends a job that its step has not ended."""
        if not self.deadline_minutes:
            return None
        return round(self.deadline_minutes * 60) + BACKSTOP_SECONDS


class JobFields(Lifetime, Security, Placement, Network, Volumes, Size, Program):
    """A distributed job: what runs, on how many nodes, where, and for how long.

    Fields and checks come in the order of the parts from the last to the first. Each check has a
    name of its own, as one of the same name would replace it.
    """

    patterns = PATTERN_DESCRIPTIONS

    @property
    def job_kind(self) -> Starts:
        """The kind of the job."""
        raise NotImplementedError


def _check_keys(setting: str, items: Sequence[Mapping[str, Any]], key: str) -> None:
    """Raise ValueError if an item of a setting, as Kubernetes writes it, lacks a key."""
    if not all(item.get(key) for item in items):
        raise ValueError(f"{setting}: one has no {key}")


def is_gpu(resource: str) -> bool:
    """Return whether device plugins use this name for GPUs or parts of them."""
    return resource.endswith("/gpu") or "/gpu." in resource or "/mig-" in resource
