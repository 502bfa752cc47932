"""What a sync found and did."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.datasets.names import Names
from kfp_ddp.storage.manifest import Changes

if TYPE_CHECKING:
    from kfp_ddp.datasets.images import Images


@dataclass
class Result:
    """What a run found and did; sizes in bytes."""

    source: str
    dataset: str
    digest: str
    path: Path
    names: Names
    images: "Images | None" = None
    """Those to train on, where that was asked for."""
    changes: Changes = field(default_factory=Changes)
    unchanged: bool = False
    planned: bool = False
    """A dry run: nothing was written."""
    refusal: str = ""
    """Why a run that is not dry would end before the first byte."""
    downloaded: int = 0
    downloaded_bytes: int = 0
    linked: int = 0
    resumed: int = 0
    repaired: int = 0
    deleted: int = 0
    retries: int = 0
    removed_versions: list[str] = field(default_factory=list)
    kept_why: str = ""
    """Why no old version could be removed, where that is not because they are used."""
    seconds: float = 0.0

    @property
    def files(self) -> int:
        """How many objects the target holds now."""
        return len(self.names.listing)

    @property
    def bytes(self) -> int:
        """How much they are."""
        return self.names.listing.bytes

    def header(self, pack: str) -> dict[str, object]:
        """The first line of the manifest of a version that is packed so."""
        return {
            "format": 1,
            "source": self.source,
            "dataset": self.dataset,
            "digest": self.digest,
            "files": self.files,
            "bytes": self.bytes,
            "pack": pack,
        }
