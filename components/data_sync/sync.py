"""The protocol: list, judge names, digest, compare, preflight, lock, download, publish."""

import time
from dataclasses import replace
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import manifest, mirror, names
from kfp_ddp.components.data_sync.build import (
    build,
    changes,
    preflight,
    refuse_deletion,
    repair,
)
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.listing import select
from kfp_ddp.components.data_sync.options import Options, Result, Watch
from kfp_ddp.components.data_sync.sources import Source, open_source
from kfp_ddp.components.data_sync.stage import writing
from kfp_ddp.components.data_sync.versions import Store


def sync(source_url: str, target: Path, options: Options, watch: Watch = lambda *_: None) -> Result:
    """Bring the target to what the source holds.

    Raises:
        InputError: one line, before a byte is written wherever that can be known.
    """
    options.check()
    began = time.monotonic()
    source = open_source(source_url, timeout=options.timeout, symlinks=options.symlinks)
    options = replace(options, dataset=dataset_name(options.dataset, source_url))
    # Objects replaced under the download: what holds then is a new listing, once.
    result = _attempt(source, target, options, watch) or _attempt(source, target, options, watch)
    if result is None:
        raise InputError(
            f"{source_url} kept changing during two attempts; sync when its writer is done"
        )
    result.seconds = time.monotonic() - began
    return result


def _attempt(source: Source, target: Path, options: Options, watch: Watch) -> Result | None:
    """One listing and what follows from it; None if objects changed meanwhile."""
    judged = _listed(source, target, options, watch)
    if options.mirror:
        return mirror.run(source, target, judged, options, watch)
    store = Store(target)
    result = _wanted(source, store, judged, options)
    if options.dry_run:
        return _plan(source, store, result, options)
    digest = result.digest
    if options.verify == "list" and store.complete(digest) and store.hand_out(digest):
        store.flip(digest)  # no other sync has to end for that
        result.unchanged = True
        return result
    _guard(store, result, options)
    store.prepare()
    with store.lock(options.lock_wait, source.url, watch) as waited, writing(target):
        if waited:  # for hours, perhaps: what was listed then is not to follow what came since
            result = _wanted(source, store, _listed(source, target, options, watch), options)
            digest = result.digest
            _guard(store, result, options)
        if not store.complete(digest):
            finished = build(source, store, options, result, watch)
        else:
            finished = repair(source, store, options, result, watch)
        if not finished:
            return None
        store.flip(digest)
        store.hand_out(digest)
        result.removed_versions = store.collect(
            options.keep_versions, options.keep_hours, options.dataset, digest
        )
    return result


def _listed(source: Source, target: Path, options: Options, watch: Watch) -> names.Names:
    """What the source holds now, under names that can be files."""
    watch("listing", None, 0, 0)
    listing, markers = names.without_markers(source.listing())
    listing = select(listing, options.include, options.exclude)
    if not listing:
        raise InputError(f"{source.url}: include and exclude leave nothing to sync; check them")
    folds = names.folds_names(target, probe=not options.dry_run)
    judged = names.apply(listing, options.hostile_names, folds)
    judged.skipped[:0] = markers
    return judged


def _wanted(source: Source, store: Store, judged: names.Names, options: Options) -> Result:
    """The version that the target is to hold, with nothing done for it yet."""
    if not options.delete:
        _keep_extras(judged, store.before(options.dataset), options.dataset)
    digest = judged.listing.digest("" if options.pack == "none" else options.pack)
    return Result(source.url, digest, store.version(digest), judged)


def _plan(source: Source, store: Store, result: Result, options: Options) -> Result:
    """What a run would do, and whether it would be refused."""
    result.planned = True
    listing = result.names.listing
    result.changes = changes(listing, store.before(options.dataset), options.dataset)
    if store.complete(result.digest):
        return result
    try:
        _guard(store, result, options)
        preflight(store, result, [*result.changes.added, *result.changes.changed], options)
    except InputError as error:
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


def _guard(store: Store, result: Result, options: Options) -> None:
    """Refuse a new version that lacks too much of the one before, of the same source.

    Raises:
        InputError: the share of removed files is over `max_delete`.
    """
    before = store.before(options.dataset)
    if before is None or store.complete(result.digest):
        return
    head = manifest.header(before / manifest.NAME)
    if head.get("source") != result.source:
        return
    rows = manifest.rows(before / manifest.NAME)
    removed = len(manifest.compare(result.names.listing, rows).removed)
    refuse_deletion(removed, int(head.get("files") or 0), result.source, options)
