"""Sync a source to a target: list, check names, compare, lock, download, publish."""

import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.datasets import checks, names
from kfp_ddp.datasets.build import build, changes, confirm, repair, stage_of
from kfp_ddp.datasets.context import Context, Watch, source_options
from kfp_ddp.datasets.disk import locked, versions_lock, writing
from kfp_ddp.datasets.options import SyncOptions, below, canonical, dataset_name
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.versions import DatasetVersions, collect
from kfp_ddp.storage import manifest
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.listing import Filter, weakness
from kfp_ddp.storage.source import Changed, Retry

if TYPE_CHECKING:
    from kfp_ddp.pictures.reading import LayoutRule

LISTINGS = 2
"""How often a source is listed if its objects change during the download."""


def sync(
    source_url: str,
    target: Path,
    options: SyncOptions,
    watch: Watch = lambda *_: None,
    retry: Retry | None = None,
    run_id: str = "",
    rule: "LayoutRule | None" = None,
    only: Collection[str] = (),
) -> Result:
    """Make the target folder equal to the source; raise InputError before a byte is written."""
    began = time.monotonic()
    options = replace(options, exclude=below(source_url, options.exclude))
    new = not options.dry_run and not os.path.exists(target / ".kfsync")
    ahead = options.concurrency if new else 0
    select = Filter(options.include, options.exclude)
    copies = _folder_of_copies(target, options.dry_run)
    source = open_source(source_url, source_options(options, select, ahead, copies))
    checks.check_apart(source_url, target)
    checks.check_versioned(target)
    dataset = dataset_name(options.dataset, source_url)
    context = Context(source, options, retry or Retry(), watch, run_id, rule, only)
    if source.exposed:
        where = f"{source.url} comes over plain http://"
        context.phase(f"{where}, so it can be read and changed on the way")
    for _ in range(LISTINGS):
        try:
            result = _attempt(context, target, dataset)
        except Changed as error:
            name = str(error)
            continue
        return replace(result, seconds=time.monotonic() - began)
    raise StorageError(
        f"{source.url} changed during each of two attempts ({name!r} is not as it was listed): "
        "sync when its writer is done"
    )


def _folder_of_copies(target: Path, dry_run: bool) -> str:
    """Return where a listing may copy pictures to: a dry run writes nothing to the target."""
    if not dry_run:
        return str(target / ".kfsync")
    import tempfile  # only dry runs need it

    return tempfile.gettempdir()


def _attempt(context: Context, target: Path, dataset: str) -> Result:
    """List the source once and sync to that listing; raise Changed if objects change meanwhile."""
    options = context.options
    listed = _list(context, target)
    store = DatasetVersions(target)
    result = _plan(context, store, dataset, listed)
    if options.dry_run:
        return _dry_run(context, store, result)
    result = _check(context, store, result)
    no_lock = options.verify == "list" and not result.unconfirmed
    if no_lock and _publish(context, store, result):
        return replace(result, unchanged=True)
    store.prepare()
    lock = locked(target, options.lock_wait, context.source.url, context.watch)
    with lock as waited, writing(target):
        if waited:  # another sync may have published a newer listing
            result = _plan(context, store, dataset, _list(context, target))
            result = _check(context, store, result)
        if result.unconfirmed:
            result = confirm(context, store, result)
        result = collect(store, options, result)  # of a smaller `keep_versions`, to make room
        transfer = repair if store.complete(result.digest) else build
        result = transfer(context, store, result)
        if not _publish(context, store, result):
            raise StorageError(f"{result.path} was removed by another program; sync again")
        return collect(store, options, result)


def _publish(context: Context, store: DatasetVersions, result: Result) -> bool:
    """Lease the version to the run and make it current; return False if it is not complete."""
    with versions_lock(store.root):
        if not store.complete(result.digest) or not store.record_use(result.digest, context.run_id):
            return False
        store.set_current(result.digest)
    return True


def _list(context: Context, target: Path) -> names.Names:
    """List the source, with names that are valid files."""
    source = context.source
    options = context.options
    context.phase("listing")
    listing, markers = names.without_markers(source.listing())
    listing = Filter(options.include, options.exclude).select(listing)
    if listing.weak:
        context.phase(weakness(source.url, listing))
    if not listing:
        raise InputError(f"{source.url}: include and exclude leave nothing to sync; check them")
    checks.check_sizes(listing, options, source.url)
    folds = names.folds_names(target, probe=not options.dry_run)
    judged = names.apply(listing, options.hostile_names, folds, options.exclude)
    if context.only:
        names_of_all = judged.listing.names
        wanted = [index for index, name in enumerate(names_of_all) if name in context.only]
        judged.listing = judged.listing.take(wanted)
    judged.skipped[:0] = markers
    return judged


def _plan(context: Context, store: DatasetVersions, dataset: str, listed: names.Names) -> Result:
    """Return the version that the target should hold; nothing is done for it yet."""
    layout = context.options.layout
    exact = listed.listing.digest(layout)
    url = context.source.url
    result = Result(url, dataset, exact, store.version(exact), listed, exact)
    if store.complete(exact) or not store.complete(older := listed.listing.crc_digest(layout)):
        return result
    # A version of an earlier release keeps its name, if its files are what the store lists.
    known = manifest.compare(listed.listing, manifest.rows(store.version(older) / manifest.NAME))
    if any((known.added, known.changed, known.removed)):
        return result
    unconfirmed = min(known.mtimes) < 0
    return replace(result, digest=older, path=store.version(older), unconfirmed=unconfirmed)


def _dry_run(context: Context, store: DatasetVersions, result: Result) -> Result:
    """Return what a sync would do, and whether it would be refused."""
    listing = result.names.listing
    differences = changes(listing, store.before(result.dataset), result.dataset)
    result = replace(result, planned=True, changes=differences)
    stage = stage_of(store, result, context.options.pack)
    try:
        result = _check(context, store, result)
        if not store.complete(result.digest):
            missing = [*differences.added, *differences.changed]
            checks.check_room_of_plan(store.root, stage, missing)
    except KfpDdpError as error:
        return replace(result, refusal=str(error))
    return result


def _check(context: Context, store: DatasetVersions, result: Result) -> Result:
    """Check the listed images if a layout is given, and the files that a new version lacks."""
    before = None if store.complete(result.digest) else store.before(result.dataset)
    if context.rule is not None:
        from kfp_ddp.datasets import images  # saves 14 ms of a sync without

        own = before if before and manifest.dataset(before) == result.dataset else None
        checked = images.check(context, context.rule, result.names.listing, own)
        result = replace(result, images=checked)
    if before is None:
        return result
    head = manifest.header(before / manifest.NAME)
    same_source = canonical(str(head.get("source", ""))) == canonical(result.source)
    if head.get("dataset") == result.dataset or same_source:
        differences = manifest.compare(result.names.listing, manifest.rows(before / manifest.NAME))
        removed = len(differences.removed)
        files = removed + len(differences.same) + len(differences.changed)
        checks.check_deletion(removed, files, result.source, context.options)
    return result
