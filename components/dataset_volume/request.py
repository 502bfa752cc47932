"""What is to be published, and what came of it."""

from dataclasses import dataclass, field

DOMAIN = "kfp-ddp.dev"
MANAGED = {"app.kubernetes.io/managed-by": "kfp-ddp"}


@dataclass
class Request:
    """What is to be published, from which claim, and how."""

    dataset: str
    digest: str
    path: str
    claim: str
    publish: str = "in-place"
    source: str = ""
    storage_class: str = ""
    snapshot_class: str = ""
    keep_claims: int = 3
    wait: float = 600
    populator_account: str = ""

    @property
    def name(self) -> str:
        """Name of the published claim, and of its snapshot or data source."""
        return f"ds-{self.dataset}-{self.digest[:12]}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of what is made for the version."""
        return MANAGED | {
            f"{DOMAIN}/dataset": self.dataset,
            f"{DOMAIN}/digest": self.digest[:12],
        }


@dataclass
class Published:
    """The claim to mount, where the version is in it, and how that came about."""

    claim: str
    path: str
    strategy: str
    notes: list[str] = field(default_factory=list)
