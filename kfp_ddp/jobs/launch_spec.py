"""Settings of a distributed job, and of how its step watches it."""

import posixpath
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings
from kfp_ddp.jobs.fields import JobFields, check_packages
from kfp_ddp.jobs.kinds import KINDS, Kind, pod
from kfp_ddp.k8s.objects import parse_quantity

NEEDED_KEYS = (
    ("volumes", "name"),
    ("volume_mounts", "name"),
    ("env_vars", "name"),
    ("volume_mounts", "mountPath"),
)
"""Lists of the settings, with what each of their items must have."""


class LaunchSpec(JobFields):
    """A distributed job: what runs, on how many nodes, where, and for how long."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_program()
        check_packages(self.packages_to_install)
        self._check_resources()
        self._check_mounts()
        if self.rdma_resource and self.nccl_infiniband != "on":
            raise ValueError(
                f"rdma_resource={self.rdma_resource!r} without nccl_infiniband=on: "
                "NCCL would not use the device"
            )
        if self.queue and not self.scheduler:
            raise ValueError(
                f"queue={self.queue!r} without scheduler: set the scheduler of the queue, "
                "kueue, volcano, coscheduling or runai"
            )
        self.job_kind.check(self)
        return self

    def _check_program(self) -> None:
        """Raise ValueError unless workers have one thing to run, with what it needs."""
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

    def _check_resources(self) -> None:
        """Raise ValueError for a request above its limit, or a part of a GPU."""
        requested = self.requested()
        for name, limit in requested["limits"].items():
            request = requested["requests"].get(name, limit)
            if parse_quantity(request) > parse_quantity(limit):
                raise ValueError(f"{name}: {request} are requested, above the limit of {limit}")
            if self.is_gpu(name) and parse_quantity(limit).denominator > 1:
                raise ValueError(f"{name}={limit} is not a number of GPUs: give a whole one")

    def _check_mounts(self) -> None:
        """Raise ValueError for a volume, mount or variable without a part, and for wrong mounts."""
        for setting, key in NEEDED_KEYS:
            if not all(item.get(key) for item in getattr(self, setting)):
                raise ValueError(f"{setting}: one has no {key}")
        volumes = {volume["name"] for volume in pod.volumes(self, "")}
        paths: set[str] = set()
        for mount in pod.mounts(self, ""):
            path = posixpath.normpath(mount["mountPath"])
            if path in paths:
                raise ValueError(f"{path} is mounted twice: give one mount another path")
            if mount["name"] not in volumes and self.kind != "trainjob":  # a runtime has its own
                raise ValueError(f"volume_mounts name {mount['name']!r}, which volumes do not have")
            paths.add(path)

    @property
    def job_kind(self) -> Kind:
        """The kind of the job."""
        return KINDS[self.kind]


Backend = Literal["pytorchjob", "trainjob", "local"]
SET_BY_STEP = dict.fromkeys(
    ("kind", "command", "args", "script", "code", "entry", "metrics_port"), "the step sets itself"
)
JOB_INTERNAL = SET_BY_STEP | dict.fromkeys(
    ("packages_to_install", "pip_index_urls"),
    "evaluate and export would lack: build an image with them",
)
"""Fields of LaunchSpec that the step sets, with why they cannot be given."""


class Supervision(Settings):
    """How the step watches its job, and how many runs it keeps."""

    heartbeat_minutes: float = Field(15.0, ge=0)
    """Silence of the step, in minutes, after which the job saves a checkpoint and stops itself; 0
    for never."""
    stall_minutes: float = Field(30.0, ge=0)
    """Minutes without progress of any rank. Then the job is retried from its newest checkpoint; a
    node that alone is at fault is avoided. Start, evaluation and save may take four times as long.
    0: no limit."""
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Price of a GPU-hour by instance type, or by label=value of a node, such as
    {"p5.48xlarge": 12.5, "pool=spot": 4.1}, for the costs in reports; of several kinds of nodes
    that the job can run on, the highest one counts."""
    keep_runs: int = Field(0, ge=0)
    """Folders of runs to keep on the work claim: older ones, of runs that are over and that no step
    uses, are deleted at the end of a run; 0 for all."""


def check_backend(backend: str, nodes: int) -> None:
    """Raise InputError for an unknown backend, or several nodes of one machine."""
    known = get_args(Backend)
    if backend not in known:
        raise InputError(f"backend {backend!r} is not known; use one of {', '.join(known)}")
    if backend == "local" and nodes != 1:
        raise InputError(f"nodes={nodes}: backend local has one node; use pytorchjob or trainjob")
