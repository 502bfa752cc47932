"""Inputs that all phases of a sync share, and its result."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kfp_ddp.datasets.names import Names
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.progress import Meter
from kfp_ddp.storage.manifest import Changes
from kfp_ddp.storage.source import Retry, Source

if TYPE_CHECKING:
    from kfp_ddp.datasets.images import Images
    from kfp_ddp.training.layout import Rule

Watch = Callable[[str, Meter | None, int, int], None]
"""Called as (phase, meter, files, bytes) when a phase starts."""


class Context(NamedTuple):
    """Source, options and progress callback of a sync."""

    source: Source
    options: Options
    retry: Retry
    watch: Watch
    run_id: str = ""
    """Id of the pipeline run that gets the version; '' for none."""
    rule: "Rule | None" = None
    """The layout of the images to check; None to check no images."""
    only: Collection[str] = ()
    """The names to take from the listing; empty for all."""

    def phase(self, name: str) -> None:
        """Report that a phase starts that counts nothing."""
        self.watch(name, None, 0, 0)


@dataclass(frozen=True)
class Result:
    """What a sync downloads to and what it did; each phase returns a new one. Sizes in bytes."""

    source: str
    dataset: str
    digest: str
    path: Path
    names: Names
    images: "Images | None" = None
    """The images to train on, if they were checked."""
    changes: Changes = field(default_factory=Changes)
    unchanged: bool = False
    planned: bool = False
    """A dry run: nothing was written."""
    refusal: str = ""
    """Of a dry run: why the sync would fail before the first byte."""
    downloaded: int = 0
    downloaded_bytes: int = 0
    linked: int = 0
    resumed: int = 0
    repaired: int = 0
    deleted: int = 0
    retries: int = 0
    removed_versions: tuple[str, ...] = ()
    kept_why: str = ""
    """Why no old version could be removed, other than that they are in use."""
    seconds: float = 0.0

    @property
    def files(self) -> int:
        """Return the number of objects in the target."""
        return len(self.names.listing)

    @property
    def bytes(self) -> int:
        """Return the size of all objects in the target."""
        return self.names.listing.bytes
