"""Settings of how a step watches its job, shared by several components."""

import typing
from typing import Literal

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings

Backend = Literal["pytorchjob", "trainjob", "local"]
JOB_OWN = dict.fromkeys(
    ("kind", "command", "args", "script", "code", "entry", "metrics_port"), "the step sets itself"
) | dict.fromkeys(
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
    """Minutes in which no rank advances a step, after which the job is retried from its newest
    checkpoint, away from the node of a rank that alone is at fault; the start, an evaluation or a
    save may take four times as long; 0 for never."""
    min_network_gbit_s: float = Field(0.0, ge=0)
    """Gigabits a second that each node must send to each other one: measured before a training
    begins, by pods like its own, and where it is less, or a node is slow, nothing is trained; 0 to
    not measure."""
    keep_runs: int = Field(0, ge=0)
    """Folders of runs to keep on the work claim: older ones, of runs that are over and that no step
    uses, are deleted at the end of a run; 0 for all."""


def check_backend(backend: str, nodes: int) -> None:
    """Refuse what no backend can do.

    Raises:
        InputError: an unknown backend, or several nodes of one machine.
    """
    known = typing.get_args(Backend)
    if backend not in known:
        raise InputError(f"backend {backend!r} is not known; use one of {', '.join(known)}")
    if backend == "local" and nodes != 1:
        raise InputError(f"nodes={nodes}: backend local has one node; use pytorchjob or trainjob")
