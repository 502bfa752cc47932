"""Inputs of the phases of a sync, and what they count."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.storage.listing import Filter
from kfp_ddp.storage.source import Retry, Source, SourceOptions

if TYPE_CHECKING:
    from kfp_ddp.pictures.reading import LayoutRule


@dataclass
class SyncCounters:
    """Files and bytes that have arrived, and attempts that failed; one thread writes them."""

    files: int = 0
    bytes: int = 0
    retries: int = 0


class Throttle:
    """A bandwidth limit in bytes a second over all connections; 0 for none."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    def delay(self, count: int) -> float:
        """Count `count` bytes and return the seconds to wait before they may pass."""
        if not self.rate:
            return 0
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + count / self.rate
        return self._free_at - now


Watch = Callable[[str, SyncCounters | None, int, int], None]
"""Called as (phase, meter, files, bytes) when a phase starts."""


def source_options(
    options: SyncOptions, select: Filter, ahead: int = 0, copies: str = ""
) -> SourceOptions:
    """Return how a sync with these options opens its source; see `SourceOptions`."""
    return SourceOptions(
        timeout=options.timeout,
        symlinks=options.symlinks,
        ahead=ahead,
        select=select,
        requester_pays=options.requester_pays,
        label_column=options.label_column,
        copies=copies,
    )


class Context(NamedTuple):
    """Source, options and progress callback of a sync."""

    source: Source
    options: SyncOptions
    retry: Retry
    watch: Watch
    run_id: str = ""
    """Id of the pipeline run that gets the version with a lease on it; '' for none."""
    rule: "LayoutRule | None" = None
    """The layout of the images to check; None to check no images."""
    only: Collection[str] = ()
    """The names to take, from an earlier listing; empty for all."""

    def phase(self, name: str) -> None:
        """Report that a phase starts that counts nothing."""
        self.watch(name, None, 0, 0)
