"""The one typed description of a distributed job, from which every kind of job is written."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kfp_ddp.base.settings import Settings

Kind = Literal["pytorchjob", "trainjob", "tfjob", "mpijob"]
QUANTITY = r"^$|^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
NAME = r"^$|^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
LABEL = r"^$|^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"

CLAIM = NAME.removeprefix("^$|")[:-1] + "(:ro)?$"
IMAGE = r"^[^\s]+$"
MOUNT = r"^/[^:]+$"
VARIABLE = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
PATTERNS = {
    QUANTITY: "a quantity such as 500m, 4 or 16Gi",
    NAME: "a name of small letters, digits, '-' and '.'",
    LABEL: "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    CLAIM: "the name of a claim, or name:ro",
    IMAGE: "the name of an image, without spaces",
    MOUNT: "an absolute path without ':'",
    VARIABLE: "the name of a variable: letters, digits, '-', '_' and '.'",
    KEY: "the key of a label or resource, such as zone or example.com/zone",
}
# Of what stands in a pod, Kubernetes tells only when the operator makes one.
Name = Annotated[str, StringConstraints(pattern=NAME, min_length=1)]
Claim = Annotated[str, StringConstraints(pattern=CLAIM)]
Mount = Annotated[str, StringConstraints(pattern=MOUNT)]
Variable = Annotated[str, StringConstraints(pattern=VARIABLE)]
Key = Annotated[str, StringConstraints(pattern=KEY)]
Value = Annotated[str, StringConstraints(pattern=LABEL)]

BACKSTOP_SECONDS = 60
# Taints and labels that providers put on their interruptible nodes, from their documentation.
SPOT: dict[str, tuple[str, str]] = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
}


class LaunchSpec(Settings):
    """A distributed job: what runs, on how many nodes, where, and for how long."""

    patterns = PATTERNS

    kind: Kind = Field("pytorchjob", description="Kind of job.")
    image: str = Field(pattern=IMAGE, description="Image of the workers.")
    command: tuple[str, ...] = Field((), description="Command in exec form; no shell.")
    args: tuple[str, ...] = Field((), description="Arguments of the command.")
    script: str = Field("", description="Text of a Python file that the workers run.")

    nodes: int = Field(1, ge=1, le=4096, description="Pods of the job.")
    elastic: str = Field(
        "",
        pattern=r"^$|^[1-9][0-9]*:[1-9][0-9]*$",
        description="Nodes, min:max; '' for a fixed number.",
    )
    nproc_per_node: int = Field(0, ge=0, description="Processes a node; 0 for one for each GPU.")
    runtime: str = Field("torch-distributed", pattern=NAME, description="Runtime of a TrainJob.")

    gpus_per_node: int = Field(0, ge=0, description="GPUs of a node.")
    gpu_resource: Key = Field("nvidia.com/gpu", description="Name of a GPU.")
    cpu: str = Field("", pattern=QUANTITY, description="CPU request and limit of a node.")
    memory: str = Field("", pattern=QUANTITY, description="Memory request and limit of a node.")
    cpu_request: str = Field("", pattern=QUANTITY, description="CPU request, if below the limit.")
    memory_request: str = Field("", pattern=QUANTITY, description="Memory request, if lower.")
    resources: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="Limits and requests in Kubernetes' form."
    )
    shm_size: str = Field(
        "2Gi", pattern=QUANTITY, description="Shared memory of a node; '' for none."
    )

    env: dict[Variable, str] = Field(default_factory=dict, description="Environment variables.")
    env_from_secrets: tuple[Name, ...] = Field((), description="Secrets whose keys become env.")
    env_vars: tuple[dict[str, Any], ...] = Field((), description="Env in Kubernetes' form.")
    claims: dict[Mount, Claim] = Field(
        default_factory=dict, description="Claims by mount path; claim:ro for read-only."
    )
    volumes: tuple[dict[str, Any], ...] = Field((), description="Volumes in Kubernetes' form.")
    volume_mounts: tuple[dict[str, Any], ...] = Field((), description="Mounts, likewise.")

    nccl_debug: Literal["", "VERSION", "WARN", "INFO", "TRACE"] = Field(
        "", description="What NCCL logs."
    )
    nccl_socket_interface: str = Field("", description="Network interface of NCCL and gloo.")
    nccl_infiniband: Literal["", "on", "off"] = Field("", description="InfiniBand or RoCE.")
    nccl_timeout_minutes: float = Field(
        0, ge=0, description="Silence of NCCL's watchdog that ends a rank; 0 for torch's own."
    )
    host_network: bool = Field(False, description="Use the node's network.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of /metrics, for Prometheus' annotations; 0 for none."
    )
    istio: bool = Field(False, description="Let Istio inject its sidecar.")

    node_selector: dict[Key, Value] = Field(default_factory=dict, description="Labels of nodes.")
    tolerations: tuple[dict[str, Any], ...] = Field((), description="Taints to bear.")
    affinity: dict[str, Any] = Field(default_factory=dict, description="Affinity.")
    spot: Literal["", "gke", "aks", "karpenter", "eks"] = Field(
        "", description="Interruptible nodes of a provider."
    )
    priority_class: str = Field("", pattern=NAME, description="PriorityClass of the pods.")
    scheduler: Literal["", "kueue", "volcano", "coscheduling", "runai"] = Field(
        "", description="Who queues and gang-schedules the job; '' for the cluster's default."
    )
    queue: str = Field("", pattern=LABEL, description="Queue of that scheduler.")

    image_pull_secrets: tuple[Name, ...] = Field((), description="Secrets of the registry.")
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = Field(
        "", description="When the image is pulled; '' for the cluster's default."
    )
    service_account: str = Field("", pattern=NAME, description="Service account of the pods.")
    run_as_user: int = Field(-1, ge=-1, description="User id; -1 for the image's.")
    fs_group: int = Field(-1, ge=-1, description="Group that owns the claims; -1 for none.")
    non_root: bool = Field(True, description="Refuse to run as root.")
    grace_seconds: int = Field(120, ge=1, description="From SIGTERM to SIGKILL.")

    restart_policy: Literal["Never", "OnFailure", "ExitCode"] = Field(
        "Never",
        description="What the operator does with a pod that failed; an elastic job takes "
        "ExitCode for Never.",
    )
    backoff_limit: int = Field(-1, ge=-1, description="Restarts that it bears; -1 for any number.")
    clean_pod_policy: Literal["Running", "All", "None"] = Field(
        "Running", description="Pods that are removed when the job is over."
    )
    ttl_seconds: int = Field(
        86400, ge=-1, description="Life of a job that is over; -1 for that of its run's Workflow."
    )
    deadline_minutes: float = Field(
        0, ge=0, description="The job's time, without its wait in a queue; 0 for no end."
    )
    pending_minutes: float = Field(
        0, ge=0, description="Wait for pods that cannot start; 0 for no end."
    )
    retries: int = Field(2, ge=0, le=100, description="Whole-job retries after a lost node.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.command or self.args) and self.script:
            raise ValueError("give command and args, or script, not both")
        if self.elastic:
            low, high = self.node_range()
            if low > high:
                raise ValueError(f"elastic={self.elastic}: the minimum is above the maximum")
            if self.kind != "pytorchjob":
                raise ValueError(f"elastic={self.elastic}: a {self.kind} cannot be elastic")
            if self.nodes != 1 and not low <= self.nodes <= high:
                raise ValueError(
                    f"nodes={self.nodes} lies outside elastic={self.elastic}; leave nodes at 1"
                )
        if self.queue and not self.scheduler:
            raise ValueError(
                f"queue={self.queue!r} without scheduler: say whose queue it is, "
                "kueue, volcano, coscheduling or runai"
            )
        if self.kind == "trainjob":
            self._fits_trainjob()
        elif self.runtime != "torch-distributed":
            raise ValueError(f"runtime={self.runtime!r}: a {self.kind} has none, a trainjob has")
        return self

    def _fits_trainjob(self) -> None:
        """Refuse what a TrainJob has no place for: its runtime holds these settings."""
        unfit = {
            "host_network": self.host_network,
            "priority_class": bool(self.priority_class),
            "image_pull_policy": bool(self.image_pull_policy),
            "restart_policy": self.restart_policy != "Never",
            "backoff_limit": self.backoff_limit >= 0,
            "scheduler": self.scheduler in ("volcano", "coscheduling", "runai"),
            "env_from_secrets": bool(self.env_from_secrets),
            "clean_pod_policy": self.clean_pod_policy != "Running",
            "ttl_seconds": self.ttl_seconds != 86400,
        }
        for name, is_set in unfit.items():
            if is_set:
                raise ValueError(
                    f"{name} cannot be set on a TrainJob: put it into the runtime "
                    f"{self.runtime!r}, or use a PyTorchJob"
                )

    def node_range(self) -> tuple[int, int]:
        """Least and most nodes."""
        if not self.elastic:
            return self.nodes, self.nodes
        low, high = self.elastic.split(":")
        return int(low), int(high)

    def gpus(self) -> int:
        """GPUs of a node, whether they were set here or on the KFP task."""
        limits = self.resources.get("limits", {})
        given = (int(float(n)) for name, n in limits.items() if self.is_gpu(name))
        return self.gpus_per_node or sum(given)

    def is_gpu(self, resource: str) -> bool:
        """Whether a resource of a node is a GPU or a part of one."""
        return resource == self.gpu_resource or is_gpu(resource)

    def processes(self) -> int:
        """Processes of a node: as given, one for each GPU, or one."""
        return self.nproc_per_node or max(1, self.gpus())

    def pod_restart_policy(self) -> str:
        """What the operator does with a pod that failed.

        With Never it ends the job for one pod that was evicted, elastic or not; with ExitCode it
        makes those anew that a signal ended.
        """
        return (
            "ExitCode" if self.elastic and self.restart_policy == "Never" else self.restart_policy
        )

    def restarts(self) -> int:
        """How often the ranks of an elastic job start again: each node that is lost costs once."""
        return max(10, 2 * self.node_range()[1])

    def operator_deadline(self) -> int | None:
        """Seconds after which the operator ends a job whose step has not, as when it is gone."""
        return (
            round(self.deadline_minutes * 60) + BACKSTOP_SECONDS if self.deadline_minutes else None
        )

    def pods(self) -> int:
        """Pods that the job is created with."""
        low, _ = self.node_range()
        return max(low, self.nodes) if self.elastic else self.nodes


def is_gpu(resource: str) -> bool:
    """Whether a resource's name is one that device plugins give to GPUs or to parts of them."""
    return resource.endswith("/gpu") or "/gpu." in resource or "/mig-" in resource
