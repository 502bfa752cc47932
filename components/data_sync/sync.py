"""The protocol: list, judge names, digest, compare, check, lock, download, publish."""

import os
import time
from pathlib import Path

from kfp_ddp.base.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.components.data_sync import checks, manifest, mirror, names
from kfp_ddp.components.data_sync.build import build, changes, stage_of
from kfp_ddp.components.data_sync.context import Context, Watch
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.disk import writing
from kfp_ddp.components.data_sync.listing import Filter
from kfp_ddp.components.data_sync.lock import locked
from kfp_ddp.components.data_sync.options import Options
from kfp_ddp.components.data_sync.repair import repair
from kfp_ddp.components.data_sync.result import Result
from kfp_ddp.components.data_sync.retry import Retry
from kfp_ddp.components.data_sync.sources import Changed, open_source
from kfp_ddp.components.data_sync.versions import Store

LISTINGS = 2
"""How often a source is listed whose objects are replaced under the download."""


def sync(
    source_url: str,
    target: Path,
    options: Options,
    watch: Watch = lambda *_: None,
    retry: Retry | None = None,
) -> Result:
    """Bring the target to what the source holds.

    Raises:
        InputError: what was given cannot be used, before a byte is written.
        StorageError: the source cannot be read, or the target not be written.
    """
    began = time.monotonic()
    new = not options.dry_run and not os.path.exists(target / ".kfsync")
    source = open_source(
        source_url,
        timeout=options.timeout,
        symlinks=options.symlinks,
        ahead=options.concurrency if new else 0,
        wanted=Filter(options.include, options.exclude),
    )
    dataset = dataset_name(options.dataset, source_url)
    context = Context(source, options, retry or Retry(), watch)
    for _ in range(LISTINGS):
        try:
            result = _attempt(context, target, dataset)
        except Changed:
            continue
        result.seconds = time.monotonic() - began
        return result
    raise StorageError(
        f"{source.url} kept changing during two attempts; sync when its writer is done"
    )


def _attempt(context: Context, target: Path, dataset: str) -> Result:
    """One listing and what follows from it."""
    options = context.options
    judged = _listed(context, target)
    if options.mirror:
        digest = judged.listing.digest()
        url = context.source.url
        return mirror.update(context, target, Result(url, dataset, digest, target, judged))
    store = Store(target)
    result = _wanted(context, store, dataset, judged)
    if options.dry_run:
        return _plan(context, store, result)
    if options.verify == "list" and store.complete(result.digest) and store.hand_out(result.digest):
        store.flip(result.digest)  # no other sync has to end for that
        result.unchanged = True
        return result
    _check_deletion(store, result, options)
    store.prepare()
    lock = locked(target, options.lock_wait, context.source.url, context.watch)
    with lock as waited, writing(target):
        if waited:  # for hours, perhaps: what was listed then is not to follow what came since
            result = _wanted(context, store, dataset, _listed(context, target))
            _check_deletion(store, result, options)
        if store.complete(result.digest):
            repair(context, store, result)
        else:
            build(context, store, result)
        store.flip(result.digest)
        store.hand_out(result.digest)
        result.removed_versions = store.collect(
            options.keep_versions, options.keep_hours, dataset, result.digest
        )
    return result


def _listed(context: Context, target: Path) -> names.Names:
    """What the source holds now, under names that can be files."""
    source, options = context.source, context.options
    context.phase("listing")
    listing, markers = names.without_markers(source.listing())
    listing = Filter(options.include, options.exclude).select(listing)
    if not listing:
        raise InputError(f"{source.url}: include and exclude leave nothing to sync; check them")
    checks.check_sizes(listing, options, source.url)
    folds = names.folds_names(target, probe=not options.dry_run)
    judged = names.apply(listing, options.hostile_names, folds)
    judged.skipped[:0] = markers
    return judged


def _wanted(context: Context, store: Store, dataset: str, judged: names.Names) -> Result:
    """The version that the target is to hold, with nothing done for it yet."""
    pack = context.options.pack
    if not context.options.delete:
        _keep_extras(judged, store.before(dataset), dataset)
    digest = judged.listing.digest("" if pack == "none" else pack)
    return Result(context.source.url, dataset, digest, store.version(digest), judged)


def _plan(context: Context, store: Store, result: Result) -> Result:
    """What a run would do, and whether it would be refused."""
    result.planned = True
    listing = result.names.listing
    result.changes = changes(listing, store.before(result.dataset), result.dataset)
    if store.complete(result.digest):
        return result
    stage = stage_of(store.build_folder(result.digest), listing, context.options.pack)
    missing = [*result.changes.added, *result.changes.changed]
    try:
        _check_deletion(store, result, context.options)
        checks.check_room_of_plan(store.root, stage, missing)
    except KfpDdpError as error:
        result.refusal = str(error)
    return result


def _keep_extras(judged: names.Names, before: Path | None, dataset: str) -> None:
    """Add to the listing what the dataset's version before has and the source no longer."""
    if before is None or manifest.dataset(before) != dataset:
        return
    listing = judged.listing
    judged.kept = set(manifest.compare(listing, manifest.rows(before / manifest.NAME)).removed)
    for row in manifest.rows(before / manifest.NAME) if judged.kept else ():
        if row.name in judged.kept:
            listing.add(row.name, row.size, row.crc, tag=row.token if listing.tags else "")
    judged.listing = listing.sorted()


def _check_deletion(store: Store, result: Result, options: Options) -> None:
    """Refuse a new version that lacks too much of the one before, of the same source.

    Raises:
        InputError: the share of removed files is over `max_delete`.
    """
    before = store.before(result.dataset)
    if before is None or store.complete(result.digest):
        return
    head = manifest.header(before / manifest.NAME)
    if head.get("source") != result.source:
        return
    rows = manifest.rows(before / manifest.NAME)
    removed = len(manifest.compare(result.names.listing, rows).removed)
    checks.check_deletion(removed, int(head.get("files") or 0), result.source, options)
