"""What a check of `kfp-ddp doctor` has found, and for what kind of run it was asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kfp_ddp.k8s.api import Api, ApiError, Object

ASK_ADMIN = "ask an administrator of the cluster, or run it as one"
"""The remedy where what is looked at may not be read."""


@dataclass(frozen=True)
class Finding:
    """The state of one thing: bad stops a run, warn may; what was found, and the one remedy."""

    state: Literal["ok", "bad", "warn"]
    what: str
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Asked:
    """The run that is to be possible, by the names of the pipeline's form."""

    namespace: str = ""
    """Where it runs; empty for the context's own."""
    context: str = ""
    """Of the kubeconfig; empty for the current one."""
    service_account: str = ""
    """Whose rights are asked for; empty for those of who asks."""
    host: str = ""
    """URL of the KFP API server; empty to not ask it."""
    backend: str = "pytorchjob"
    nodes: int = 1
    gpus_per_node: int = -1
    gpu_resource: str = "nvidia.com/gpu"
    scheduler: str = ""
    data_claim: str = "kfp-ddp-data"
    work_claim: str = "kfp-ddp-work"
    publish: str = "in-place"
    bucket_secret: str = "kfp-ddp-bucket"  # noqa: S105
    service: str = ""
    """InferenceService that a model is rolled out on; empty for none."""
    claims_file: Path = Path("deploy/storage/claims.yaml")
    """The claims that would be made where they are missing."""


def items(api: Api, path: str, selector: str = "") -> list[Object] | None:
    """What a collection holds; None where it may not be listed, or there is none such."""
    query = {"labelSelector": selector} if selector else None
    try:
        found: list[Object] = api.call("GET", path, query=query)["items"]
    except ApiError:
        return None
    return found
