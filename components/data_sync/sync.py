"""The protocol: list, judge names, digest, compare, preflight, lock, download, publish."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kfp_ddp.components.data_sync import manifest, names
from kfp_ddp.components.data_sync.listing import Listing, select
from kfp_ddp.components.data_sync.manifest import Changes
from kfp_ddp.components.data_sync.names import Names
from kfp_ddp.components.data_sync.sources import Source, open_source
from kfp_ddp.components.data_sync.stage import FileStage
from kfp_ddp.components.data_sync.transfer import Meter, Retry, Transfer
from kfp_ddp.components.data_sync.versions import Store
from kfp_ddp.training.errors import InputError


@dataclass(frozen=True)
class Options:
    """What a person can choose; see the component's documentation for each."""

    dataset: str = "dataset"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hostile_names: str = "error"
    symlinks: str = "error"
    concurrency: int = 64
    bandwidth: float = 0
    keep_versions: int = 3
    lock_wait: float = 600
    timeout: float = 30
    retry: Retry = field(default_factory=Retry)

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            InputError: naming the option and what it may be.
        """
        from kfp_ddp.components.data_sync.sources.files import SYMLINKS

        for option, value, allowed in (
            ("hostile_names", self.hostile_names, names.POLICIES),
            ("symlinks", self.symlinks, SYMLINKS),
        ):
            if value not in allowed:
                raise InputError(f"{option} is {value!r}; give one of {', '.join(allowed)}")
        if not 1 <= self.concurrency <= 1024:
            raise InputError(f"concurrency is {self.concurrency}; give 1 to 1024")
        for option, number in (
            ("bandwidth", self.bandwidth),
            ("keep_versions", self.keep_versions),
            ("lock_wait", self.lock_wait),
        ):
            if number < 0:
                raise InputError(f"{option} is {number}; give 0 or more")


@dataclass
class Result:
    """What a run found and did."""

    source: str
    digest: str
    path: Path
    files: int
    bytes: int
    changes: Changes
    names: Names
    unchanged: bool = False
    downloaded: int = 0
    downloaded_bytes: int = 0
    linked: int = 0
    resumed: int = 0
    retries: int = 0
    removed_versions: list[str] = field(default_factory=list)
    seconds: float = 0.0


Watch = Callable[[str, Meter | None, int, int], None]
"""Called as (phase, meter, files, bytes) when a phase starts."""


def sync(source_url: str, target: Path, options: Options, watch: Watch = lambda *_: None) -> Result:
    """Bring the target to what the source holds, as a version named by its content.

    Raises:
        InputError: one line, before a byte is written wherever that can be known.
    """
    options.check()
    began = time.monotonic()
    source = open_source(source_url, timeout=options.timeout, symlinks=options.symlinks)
    result = _attempt(source, target, options, watch)
    if result is None:  # objects were replaced under us: what holds now is the new listing
        result = _attempt(source, target, options, watch)
    if result is None:
        raise InputError(
            f"{source_url} kept changing during two attempts; sync when its writer is done"
        )
    result.seconds = time.monotonic() - began
    return result


def _attempt(source: Source, target: Path, options: Options, watch: Watch) -> Result | None:
    """One listing and what follows from it; None if objects changed meanwhile."""
    watch("listing", None, 0, 0)
    listing = select(source.listing(), options.include, options.exclude)
    if not listing:
        raise InputError(f"{source.url}: include and exclude leave nothing to sync; check them")
    store = Store(target)
    judged = names.apply(listing, options.hostile_names)
    listing = judged.listing
    digest = listing.digest()
    result = Result(
        source.url, digest, store.version(digest), len(listing), listing.bytes, Changes(), judged
    )
    if store.complete(digest) and store.current() == store.version(digest):
        result.unchanged = True
        return result
    store.prepare()
    with store.lock(options.lock_wait):
        if store.complete(digest):
            result.unchanged = True
        elif not _build(source, store, listing, options, result, watch):
            return None
        store.flip(digest)
        result.removed_versions = store.collect(options.keep_versions, options.dataset)
    return result


def _build(
    source: Source, store: Store, listing: Listing, options: Options, result: Result, watch: Watch
) -> bool:
    """Build and publish the version; False if objects changed under the download."""
    if names.folds_names(store.work):
        result.names = names.apply(listing, options.hostile_names, folds=True)
        if result.names.skipped or result.names.encoded:
            raise InputError(
                f"{store.root} holds names that differ by case as one, and this listing has such "
                "names; use another file system, or exclude them"
            )
    stage = FileStage(store.building(result.digest), listing)
    done = stage.open()
    try:
        result.resumed = len(done)
        before = store.current()
        result.changes = manifest.compare(
            listing, manifest.rows(before / manifest.NAME) if before else iter(())
        )
        done |= _link(stage, before, result, done)
        missing = [i for i in stage.files(range(len(listing))) if i not in done]
        size = sum(listing.sizes[i] for i in missing)
        store.preflight(size, len(missing) + len(stage.folders()))
        transfer = Transfer(
            source,
            listing,
            stage,
            concurrency=options.concurrency,
            bandwidth=options.bandwidth,
            retry=options.retry,
        )
        watch("downloading", transfer.meter, len(missing), size)
        transfer.run(missing)
    finally:
        stage.close()
    if transfer.changed:
        return False
    result.downloaded, result.downloaded_bytes = len(missing), size
    result.retries = transfer.meter.retries
    watch("publishing", None, 0, 0)
    header = {
        "format": 1,
        "source": result.source,
        "dataset": options.dataset,
        "digest": result.digest,
        "files": result.files,
        "bytes": result.bytes,
    }
    manifest.write(stage.tree / manifest.NAME, header, listing, stage.mtimes)
    store.publish(stage.tree, result.digest)
    store.building("")
    return True


def _link(stage: FileStage, before: Path | None, result: Result, done: set[int]) -> set[int]:
    """Take what is unchanged from the version before; the indices taken."""
    taken = set()
    if before is not None:
        for at, index in enumerate(result.changes.same):
            name = stage.listing.names[index]
            if index in done or name.endswith("/"):
                continue
            changes = result.changes
            if stage.link(index, before / name, changes.mtimes[at], changes.crcs[at]):
                taken.add(index)
    result.linked = len(taken)
    return taken
