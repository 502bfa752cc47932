"""Build a version from a listing, or mend one that is damaged."""

from array import array
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import manifest
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.options import Options, Result, Watch
from kfp_ddp.components.data_sync.pack import TarStage, member_checksum
from kfp_ddp.components.data_sync.sources import Source
from kfp_ddp.components.data_sync.stage import FileStage, checksum
from kfp_ddp.components.data_sync.transfer import Transfer
from kfp_ddp.components.data_sync.versions import Store, sync_filesystem


def build(source: Source, store: Store, options: Options, result: Result, watch: Watch) -> bool:
    """Build and publish the version; False if objects changed under the download."""
    listing = result.names.listing
    stage = stage_of(store.building(result.digest), listing, options)
    try:
        done = stage.open()
        result.resumed = len(done)
        before = store.before(options.dataset)
        result.changes = changes(listing, before, options.dataset)
        if isinstance(stage, TarStage):  # what is taken from the version before is a copy
            _preflight(store, stage, [i for i in stage.files() if i not in done])
        if before is not None:
            done |= _take(stage, before, result, done, options.verify == "full")
        missing = [i for i in stage.files() if i not in done]
        _refuse_lost(result, missing)
        _preflight(store, stage, missing)
        if not download(source, listing, stage, missing, options, result, watch):
            return False
    finally:
        stage.close()
    watch("publishing", None, 0, 0)
    places = stage.place if isinstance(stage, TarStage) else None
    head = header(result, options)
    manifest.write(stage.tree / manifest.NAME, head, listing, stage.mtimes, places)
    store.publish(stage.tree, result.digest)
    store.building("")
    return True


def changes(listing: Listing, before: Path | None, dataset: str) -> manifest.Changes:
    """How the listing differs from a version; another dataset's only lends what is the same."""
    if before is None:
        return manifest.compare(listing, iter(()))
    found = manifest.compare(listing, manifest.rows(before / manifest.NAME))
    if manifest.dataset(before) != dataset:
        found.added = sorted([*found.added, *found.changed])
        found.changed, found.removed = [], []
    return found


def stage_of(folder: Path, listing: Listing, options: Options) -> FileStage:
    """The stage for the layout that was asked for."""
    return (TarStage if options.pack == "tar" else FileStage)(folder, listing)


def repair(source: Source, store: Store, options: Options, result: Result, watch: Watch) -> bool:
    """Check a complete version as `verify` asks, and bring anew what is damaged in it."""
    if options.verify == "list":
        result.unchanged = True
        return True
    watch("verifying", None, 0, 0)
    listing, version = result.names.listing, result.path
    path = version / manifest.NAME
    mtimes = [0] * len(listing)
    bad = []
    rows = {row.name: row for row in manifest.rows(path)}
    unframed = set[int]()
    if options.pack == "tar" and options.verify == "full":
        unframed = TarStage(version, listing).unframed(version)
    for index, name in enumerate(listing.names):
        row = rows.get(name)
        if index in unframed:
            bad.append(index)
            continue
        if name.endswith("/"):
            continue
        if row is None or not sound(version, row, options.verify):
            bad.append(index)
        elif row.pack == "":
            mtimes[index] = (version / name).lstat().st_mtime_ns
            listing.crcs[index] = row.crc
    if not bad:
        result.unchanged = True
        return True
    if options.pack == "tar":  # an archive is made again as a whole
        result.repaired = len(bad)
        return build(source, store, options, result, watch)
    _refuse_lost(result, bad)
    stage = FileStage(store.building(result.digest), listing)
    try:
        done = stage.open()
        store.preflight(sum(listing.sizes[i] for i in bad), len(bad))
        rest = [i for i in bad if i not in done]
        if not download(source, listing, stage, rest, options, result, watch):
            return False
    finally:
        stage.close()
    sync_filesystem(stage.tree)  # before a file stands in a version that is marked as whole
    for index in bad:
        place = version / listing.names[index]
        place.parent.mkdir(parents=True, exist_ok=True)
        stage.path(index).rename(place)
        mtimes[index] = place.lstat().st_mtime_ns
    manifest.write(path, header(result, options), listing, array("q", mtimes))
    sync_filesystem(version)
    store.building("")
    result.repaired = len(bad)
    return True


def sound(version: Path, row: manifest.Row, verify: str) -> bool:
    """Whether a file is what the manifest says.

    "quick" trusts size and mtime, and reads the file if only the mtime differs; "full" reads.
    """
    path = version / (row.pack or row.name)
    if row.pack:
        if verify == "quick":
            return path.is_file() and path.stat().st_size >= row.offset + row.size
        return member_checksum(path, row.offset, row.size) == row.crc
    try:
        found = path.lstat()
    except OSError:
        return False
    if found.st_size != row.size or path.is_symlink():
        return False
    if verify == "quick" and found.st_mtime_ns == row.mtime_ns:
        return True
    return checksum(path) == row.crc


def download(
    source: Source,
    listing: Listing,
    stage: FileStage,
    missing: Sequence[int],
    options: Options,
    result: Result,
    watch: Watch,
) -> bool:
    """Bring the missing objects to the stage; False if some are no longer as listed."""
    size = sum(listing.sizes[i] for i in missing)
    transfer = Transfer(
        source,
        listing,
        stage,
        concurrency=options.concurrency,
        bandwidth=options.bandwidth_mb * 1e6,
        retry=options.retry,
    )
    watch("downloading", transfer.meter, len(missing), size)
    transfer.run(missing)
    result.retries += transfer.meter.retries
    result.downloaded, result.downloaded_bytes = len(missing), size
    return not transfer.changed


def header(result: Result, options: Options) -> dict[str, object]:
    """The first line of the manifest."""
    return {
        "format": 1,
        "source": result.source,
        "dataset": options.dataset,
        "digest": result.digest,
        "files": result.files,
        "bytes": result.bytes,
        "pack": options.pack,
    }


def preflight(store: Store, result: Result, missing: Sequence[int], options: Options) -> None:
    """Refuse what would not fit, less what an interrupted run has brought; changes nothing.

    Raises:
        InputError: too few bytes or inodes are free.
    """
    listing = result.names.listing
    stage = stage_of(store.building_of(result.digest), listing, options)
    done = set(stage.recover())
    wanted = stage.files(None if isinstance(stage, TarStage) else missing)
    _preflight(store, stage, [i for i in wanted if i not in done])


def _preflight(store: Store, stage: FileStage, indices: Sequence[int]) -> None:
    store.preflight(sum(stage.listing.sizes[i] for i in indices), stage.inodes(indices))


def refuse_deletion(removed: int, files: int, source: str, options: Options) -> None:
    """The guard against a bucket that was emptied, or is still being filled.

    Raises:
        InputError: the share of files that would go is over `max_delete`.
    """
    if files and removed > options.max_delete * files:
        raise InputError(
            f"{source} lacks {removed:,} of the {files:,} files that the target has, over the "
            f"max_delete of {options.max_delete:g}; if that is meant, set max_delete to 1"
        )


def _refuse_lost(result: Result, missing: Sequence[int]) -> None:
    """Refuse what neither the source nor the version before can give.

    Raises:
        InputError: a file that only the version before had is damaged or gone there.
    """
    names = result.names
    lost = [names.listing.names[i] for i in missing if names.listing.names[i] in names.kept]
    if lost:
        raise InputError(
            f"{len(lost)} files that {result.source} no longer has are damaged or gone in the "
            f"version before, {lost[0]!r} first; put them back there, or sync with delete on"
        )


def _take(stage: FileStage, before: Path, result: Result, done: set[int], read: bool) -> set[int]:
    """Take what is unchanged from the version before; the indices taken.

    `read` files that are only linked, too; what is copied is always checked.
    """
    taken = set()
    same = result.changes
    for at, index in enumerate(same.same):
        name = stage.listing.names[index]
        if index in done or name.endswith("/"):
            continue
        if isinstance(stage, TarStage):
            source = before / (same.packs[at] or name)
            good = stage.copy(index, source, same.offsets[at], same.crcs[at])
        elif same.packs[at]:
            good = False
        else:
            good = stage.link(index, before / name, same.mtimes[at], same.crcs[at], read)
        if good:
            taken.add(index)
    result.linked = len(taken)
    return taken
