"""Findings about a cluster, and what they are about."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kfp_ddp.core.config import setting
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.resource import Resource

State = Literal["ok", "bad", "warn"]
ASK_ADMIN = "ask an administrator of the cluster, or run it as one"
"""Remedy where the account lacks the right to read."""


class Finding(NamedTuple):
    """Result of a check, also in JSON: `bad` stops a run, `warn` may."""

    state: State
    what: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Requirements:
    """A run to check a cluster for; the names are those of the pipeline's form."""

    namespace: str = ""
    """Namespace of the run; empty for that of the context."""
    context: str = ""
    """Context of the kubeconfig; empty for the current one."""
    service_account: str = setting(
        "", "Check the permissions of this account of the namespace instead of yours."
    )
    host: str = ""
    """URL of the KFP API server; empty for that of the cluster, which may be out of reach."""
    backend: str = "pytorchjob"
    nodes: int = 1
    gpus_per_node: int = setting(-1, "GPUs per node; -1 for all, 0 to train on CPUs.", ge=-1)
    gpu_resource: str = "nvidia.com/gpu"
    scheduler: str = ""
    data_claim: str = setting("kfp-ddp-data", "PVC of the datasets.")
    work_claim: str = "kfp-ddp-work"
    publish: str = "in-place"
    bucket_secret: str = "kfp-ddp-bucket"  # noqa: S105
    service: str = setting("", "InferenceService to roll models out to.")


class CheckContext(NamedTuple):
    """A cluster, and the run that it is checked for."""

    api: Api
    run: Requirements
    nodes: Sequence[Object] | None
    """Schedulable nodes; None without the right to list them."""


def items(api: Api, resource: Resource, selector: str = "") -> list[Object] | None:
    """Return the objects of a resource; None if it is missing or cannot be listed."""
    try:
        return api.list_objects(resource, {"labelSelector": selector} if selector else None)
    except ApiError:
        return None
