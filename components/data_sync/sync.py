"""The protocol: list, judge names, digest, compare, preflight, lock, download, publish."""

import time
from dataclasses import replace
from pathlib import Path

from kfp_ddp.components.data_sync import manifest, mirror, names
from kfp_ddp.components.data_sync.build import build, preflight, refuse_deletion, repair
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.listing import Listing, select
from kfp_ddp.components.data_sync.options import Options, Result, Watch
from kfp_ddp.components.data_sync.sources import Source, open_source
from kfp_ddp.components.data_sync.stage import writing
from kfp_ddp.components.data_sync.versions import Store
from kfp_ddp.training.errors import InputError


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
    watch("listing", None, 0, 0)
    listing, markers = names.without_markers(source.listing())
    listing = select(listing, options.include, options.exclude)
    if not listing:
        raise InputError(f"{source.url}: include and exclude leave nothing to sync; check them")
    folds = names.folds_names(target, probe=not options.dry_run)
    judged = names.apply(listing, options.hostile_names, folds)
    judged.skipped[:0] = markers
    if options.mirror:
        return mirror.run(source, target, judged, options, watch)
    store = Store(target)
    before = store.current()
    if not options.delete and before is not None:
        _keep_extras(judged, before)
    listing = judged.listing
    digest = listing.digest("" if options.pack == "none" else options.pack)
    result = Result(source.url, digest, store.version(digest), judged)
    if options.dry_run:
        return _plan(source, store, result, options)
    if _up_to_date(store, result, options) and store.hand_out(digest):
        result.unchanged = True
        return result
    if not store.complete(digest):
        _guard(before, listing, source.url, options)
    store.prepare()
    with store.lock(options.lock_wait), writing(target):
        if not store.complete(digest):
            finished = build(source, store, options, result, watch)
        else:
            finished = repair(source, store, options, result, watch)
        if not finished:
            return None
        store.flip(digest)
        store.hand_out(digest)
        result.removed_versions = store.collect(
            options.keep_versions, options.keep_hours, options.dataset
        )
    return result


def _up_to_date(store: Store, result: Result, options: Options) -> bool:
    """Whether there is nothing to do, known without a lock or a right to write."""
    there = store.complete(result.digest) and store.current() == result.path
    return there and options.verify == "list"


def _plan(source: Source, store: Store, result: Result, options: Options) -> Result:
    """What a run would do, and whether it would be refused."""
    result.planned = True
    before, listing = store.current(), result.names.listing
    rows = manifest.rows(before / manifest.NAME) if before else iter(())
    result.changes = manifest.compare(listing, rows)
    if store.complete(result.digest):
        return result
    try:
        _guard(before, listing, source.url, options)
        preflight(store, result, [*result.changes.added, *result.changes.changed], options)
    except InputError as error:
        result.refusal = str(error)
    return result


def _keep_extras(judged: names.Names, before: Path) -> None:
    """Add to the listing what the version before has and the source no longer."""
    listing = judged.listing
    judged.kept = set(manifest.compare(listing, manifest.rows(before / manifest.NAME)).removed)
    for row in manifest.rows(before / manifest.NAME) if judged.kept else ():
        if row.name in judged.kept:
            listing.add(row.name, row.size, row.crc, tag=row.token if listing.tags else "")
    judged.listing = listing.sorted()


def _guard(before: Path | None, listing: Listing, source: str, options: Options) -> None:
    """Refuse a listing from which too much of the version before is gone.

    Raises:
        InputError: the share of removed files is over `max_delete`.
    """
    if before is None:
        return
    head = manifest.header(before / manifest.NAME)
    if head.get("source") != source:
        return
    removed = len(manifest.compare(listing, manifest.rows(before / manifest.NAME)).removed)
    refuse_deletion(removed, int(head.get("files") or 0), source, options)
