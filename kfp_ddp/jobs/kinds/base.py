"""The interface of a kind of job."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal, NamedTuple

from kfp_ddp.jobs.fields import JobFields, Starter
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import condition, conditions, part
from kfp_ddp.k8s.resource import Resource

Phase = Literal["created", "queued", "running", "succeeded", "failed"]
# The Training Operator has one reason for all failures.
V1_DEADLINE = "active longer than specified deadline"
FINAL: dict[str, Phase] = {"Failed": "failed", "Succeeded": "succeeded", "Complete": "succeeded"}


@dataclass(frozen=True)
class State:
    """The phase of a job, and its controller's message and reason."""

    phase: Phase
    message: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.phase in ("succeeded", "failed")

    @property
    def past_deadline(self) -> bool:
        """Whether the controller ended the job at its deadline."""
        return self.phase == "failed" and (
            self.reason == "DeadlineExceeded" or V1_DEADLINE in self.message
        )


class PodRole(NamedTuple):
    """The role of a pod in its job."""

    title: str
    """Role and number, such as worker-0."""
    number: int = sys.maxsize
    leads: bool = False
    """Whether its role comes before the workers, as that of a master or launcher."""

    @property
    def order(self) -> tuple[bool, int, str]:
        """The sort key of a pod in its job; rank 0 is in the leading pod, or in number 0."""
        return not self.leads, self.number, self.title


class Runtime(NamedTuple):
    """The runtime in the cluster that a job is made from."""

    kind: str = "ClusterTrainingRuntime"
    has_resources: bool = False
    """Whether the runtime sets resources of its nodes, so that our defaults must not."""
    starter: Starter = "torchrun"
    """What starts the ranks, by the runtime's policy."""
    replicas: tuple[str, ...] = ("node",)
    """Its parts whose pods run ranks, or start them."""


class Unsupported(NamedTuple):
    """A setting that a kind of job does not support."""

    setting: str
    refusal: str
    """Error message, with {setting}, {value}, {kind} and {runtime}."""
    allowed: tuple[str, ...] = ()
    """Supported values besides the default."""


class Kind(ABC):
    """One kind of job on the cluster: how it is written, read and checked."""

    name: str
    title: str
    group_version: str
    resource: Resource
    operator: str
    """What an administrator installs."""
    operator_selector: str
    """Label selector of the operator's Deployment."""
    newest_field: tuple[str, ...] = ()
    """The path of a field of the job's spec that only the required version of the operator has."""
    job_label: str
    """The label of a pod with the name of its job."""
    containers: tuple[str, ...]
    script_starter: Starter
    unsupported: tuple[Unsupported, ...]
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of its containers, unless the user sets them."""
    extra_pods = 0
    """Pods besides the workers."""
    restarts_in_place = False
    """Whether the operator restarts a failed container in its pod whatever we set."""
    replaces_pods = False
    """Whether the operator replaces failed pods without limit whatever we set."""
    waits_silently = False
    """Whether ranks wait silently for a rank that was lost before they met, as in torch."""
    rendezvous_port = 0
    """TCP port at which the ranks meet, which the operator sets; 0 for an ephemeral one."""

    def __init_subclass__(cls) -> None:
        cls.title = cls.__name__
        cls.name = cls.__name__.lower()
        cls.resource = Resource(cls.group_version, f"{cls.name}s")

    def pod_selector(self, name: str) -> str:
        """Return the label selector of a job's pods."""
        return f"{self.job_label}={name}"

    @abstractmethod
    def manifest(
        self, spec: JobFields, metadata: Object, script_map: str, runtime: Runtime | None = None
    ) -> Object:
        """Return the job as the API server takes it.

        `script_map` is the ConfigMap with the script, '' for a script in the environment;
        `runtime` is what `find_runtime` returned, None for defaults.
        """

    @abstractmethod
    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""

    def state(self, job: Object) -> State:
        """Return the state of a job by its conditions."""
        true = {item["type"]: item for item in conditions(job) if item["status"] == "True"}
        for name, phase in FINAL.items():
            if final := true.get(name):
                return State(phase, final.get("message", ""), final.get("reason", ""))
        if "Suspended" in true or self.suspended(job):
            return State("queued", true.get("Suspended", {}).get("message", ""))
        return State("running" if self.runs(job) else "created")

    def runs(self, job: Object) -> bool:
        """Return whether a job that has not ended and is not suspended runs."""
        return condition(job, "Running") is not None

    def suspended(self, job: Object) -> bool:
        """Return whether the job's spec suspends it, as a queue does."""
        return bool(part(job, "spec").get("suspend"))

    def started(self, job: Object) -> float:
        """Return when a job was created, or last admitted by its queue, as `started` does."""
        return started(job)

    def creators(self, job: Object) -> tuple[str, ...]:
        """Return the names of the objects whose events show why a pod is not created."""
        name = str(job["metadata"]["name"])
        return name, f"{name}-node-0"  # the Job that creates the pods of a TrainJob

    def lost(self, job: Object, sent: Object) -> str:
        """Return the error of a job that lacks a field which was sent; '' for one that has all."""
        return ""

    def check(self, spec: JobFields) -> None:
        """Raise ValueError for the first setting that this kind does not support."""
        for name, refusal, allowed in self.unsupported:
            value = getattr(spec, name)
            if value not in (type(spec).model_fields[name].default, *allowed):
                raise ValueError(
                    refusal.format(setting=name, value=value, kind=self.name, runtime=spec.runtime)
                )

    def find_runtime(self, api: Api, spec: JobFields) -> Runtime | None:
        """Return the runtime of a job, None for a kind without; InputError if it is missing."""
        return None


def started(job: Object) -> float:
    """Return when a job was created, or last admitted by its queue, in seconds since 1970.

    Time in the queue, or before a preemption, does not count for any deadline.
    """
    resumed = condition(job, "Suspended", "False")
    at = resumed.get("lastTransitionTime") if resumed else None
    return datetime.fromisoformat(at or job["metadata"]["creationTimestamp"]).timestamp()


NO_RUNTIME = Unsupported("runtime", "runtime={value!r}: a {kind} has none, a trainjob has")
ONE_PROCESS = Unsupported(
    "nproc_per_node", "nproc_per_node={value}: a {kind} runs one process in each pod; leave it at 0"
)
# Without this, a followed log shows its lines only at the end.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
