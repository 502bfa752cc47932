"""What a person can choose about a sync, and what a sync tells of itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import names
from kfp_ddp.components.data_sync.manifest import Changes
from kfp_ddp.components.data_sync.names import Names
from kfp_ddp.components.data_sync.pace import Meter, Retry

VERIFY = ("list", "quick", "full")
PACKS = ("none", "tar")
SYMLINKS = ("error", "skip", "follow")


@dataclass(frozen=True)
class Options:
    """See the component `data_sync` for what each means.

    `mirror` writes the files straight into the target, as people expect of a command line;
    otherwise the target holds versions.
    """

    dataset: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hostile_names: str = "error"
    symlinks: str = "error"
    verify: str = "list"
    pack: str = "none"
    delete: bool = True
    max_delete: float = 0.5
    concurrency: int = 64
    bandwidth_mb: float = 0.0
    keep_versions: int = 3
    keep_hours: float = 168.0
    lock_wait: int = 86400
    timeout: float = 30.0
    mirror: bool = False
    dry_run: bool = False
    retry: Retry = field(default_factory=Retry)

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            InputError: naming the option and what it may be.
        """
        for option, value, allowed in (
            ("hostile_names", self.hostile_names, names.POLICIES),
            ("symlinks", self.symlinks, SYMLINKS),
            ("verify", self.verify, VERIFY),
            ("pack", self.pack, PACKS),
        ):
            if value not in allowed:
                raise InputError(f"{option} is {value!r}; give one of {', '.join(allowed)}")
        for option, number, least, most in (
            ("concurrency", self.concurrency, 1, 1024),
            ("max_delete", self.max_delete, 0, 1),
            ("bandwidth_mb", self.bandwidth_mb, 0, math.inf),
            ("keep_versions", self.keep_versions, 0, math.inf),
            ("keep_hours", self.keep_hours, 0, math.inf),
            ("lock_wait", self.lock_wait, 0, math.inf),
            ("timeout", self.timeout, 0.01, math.inf),
        ):
            if not least <= number <= most:
                bound = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
                raise InputError(f"{option} is {number:g}; give {bound}")
        if self.mirror and self.pack != "none":
            raise InputError("pack=tar makes versions; leave mirroring off to use it")


@dataclass
class Result:
    """What a run found and did; sizes in bytes."""

    source: str
    digest: str
    path: Path
    names: Names
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
    seconds: float = 0.0

    @property
    def files(self) -> int:
        """How many objects the target holds now."""
        return len(self.names.listing)

    @property
    def bytes(self) -> int:
        """How much they are."""
        return self.names.listing.bytes


Watch = Callable[[str, Meter | None, int, int], None]
"""Called as (phase, meter, files, bytes) when a phase starts."""
