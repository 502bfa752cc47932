"""Settings of a distributed job, and of how its step watches it."""

import posixpath
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings
from kfp_ddp.jobs.fields import JobFields
from kfp_ddp.jobs.kinds import KINDS, Kind, pod


class LaunchSpec(JobFields):
    """A distributed job: what runs, on how many nodes, where, and for how long."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_mounts()
        self.job_kind.check(self)
        return self

    def _check_mounts(self) -> None:
        """Raise ValueError for a path that is mounted twice, or a mount without its volume."""
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
