"""Input and result of publishing a version."""

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings
from kfp_ddp.datasets.options import NAME, NAME_DESCRIPTION

DOMAIN = "kfp-ddp.dev"
LEASE = f"{DOMAIN}/run-"
"""Prefix of the annotations with the runs that have a lease on a published PVC."""
MANAGED = {"app.kubernetes.io/managed-by": "kfp-ddp"}
Strategy = Literal["auto", "in-place", "clone", "snapshot", "each-node", "none"]
_DIGEST = "^[0-9a-f]{64}$"


class VolumeOptions(Settings):
    """Options of the step `dataset_volume`."""

    storage_class: str = ""
    """Class of the published claim; empty for that of the staging claim."""
    snapshot_class: str = ""
    """VolumeSnapshotClass; empty for the cluster's default."""
    keep_claims: int = Field(3, ge=0)
    """Published claims of the dataset to keep; older ones that no pod uses, and no run that lives,
    are deleted with their snapshots. 0 for all."""
    wait_seconds: float = Field(600.0, ge=0)
    """The longest wait for writers to end, for a snapshot and for binding."""


class VolumeRequest(VolumeOptions):
    """A version to publish, its PVC, and the strategy."""

    patterns: ClassVar[dict[str, str]] = {
        NAME: NAME_DESCRIPTION,
        _DIGEST: "the digest that data_sync returned",
    }

    dataset: str = Field(description="Name of the dataset, from data_sync.", pattern=NAME)
    digest: str = Field(description="Digest of the version, from data_sync.", pattern=_DIGEST)
    path: str = Field(description="Folder of the version, from data_sync.")
    claim: str = Field(description="Claim that data_sync wrote to.")
    publish: Strategy = Field("in-place", description="How workers get the version.")
    source: str = Field("", description="Source of the data, as given to data_sync.")
    run_id: str = Field("", description="Id of the pipeline run.")
    sync: dict[str, Any] = Field(
        default_factory=dict, description="Options of the sync, for each-node."
    )

    @model_validator(mode="after")
    def _has_something_to_copy_from(self) -> Self:
        check_strategy(self.publish, self.source)
        return self

    @property
    def name(self) -> str:
        """Return the name of the published PVC, and of its snapshot."""
        return f"ds-{self.dataset}-{self.digest[:12]}"

    @property
    def lease(self) -> dict[str, str]:
        """Return the annotation that is the lease of the run."""
        if not self.run_id:
            return {}
        digest = hashlib.sha256(self.run_id.encode()).hexdigest()[:12]
        return {f"{LEASE}{digest}": self.run_id}

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of all objects of the version."""
        return MANAGED | {f"{DOMAIN}/dataset": self.dataset, f"{DOMAIN}/digest": self.digest[:12]}


def check_strategy(publish: str, source: str) -> None:
    """Raise InputError if a strategy has no source to copy from."""
    if publish == "each-node" and not source:
        raise InputError("publish=each-node needs the source, which each node downloads")


@dataclass
class Published:
    """The PVC to mount, the folder of the version in it, and notes for the report."""

    claim: str
    path: str
    strategy: str
    notes: list[str]
