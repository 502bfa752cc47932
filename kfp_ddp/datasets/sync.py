"""The protocol: list, judge names, digest, compare, check, lock, download, publish."""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.datasets import checks, mirror, names
from kfp_ddp.datasets.build import build, changes, stage_of
from kfp_ddp.datasets.context import Context, Watch
from kfp_ddp.datasets.dataset import canonical, dataset_name
from kfp_ddp.datasets.disk import writing
from kfp_ddp.datasets.lock import briefly, locked
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.repair import repair
from kfp_ddp.datasets.result import Result
from kfp_ddp.datasets.retention import collect
from kfp_ddp.datasets.versions import Store
from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Filter
from kfp_ddp.storage.retry import Retry
from kfp_ddp.storage.sources import Changed, open_source

if TYPE_CHECKING:
    from kfp_ddp.training.layout import Rule

LISTINGS = 2
"""How often a source is listed whose objects are replaced under the download."""


def sync(
    source_url: str,
    target: Path,
    options: Options,
    watch: Watch = lambda *_: None,
    retry: Retry | None = None,
    run_id: str = "",
    rule: "Rule | None" = None,
    only: Collection[str] = (),
) -> Result:
    """Bring the target to what the source holds.

    Args:
        source_url: The source; see `open_source`.
        target: The folder.
        options: What a person chose.
        watch: Called when a phase starts.
        retry: How stubbornly to ask; a default without a value.
        run_id: The pipeline run that gets the version, which stays for as long as the run lives.
        rule: How the images of a version are laid out, which is then checked on the listing.
        only: The names to take, as an earlier listing had them; none for all that are there.

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
    checks.check_apart(source_url, target, options.mirror)
    dataset = dataset_name(options.dataset, source_url)
    context = Context(source, options, retry or Retry(), watch, run_id, rule, only)
    if source.exposed:
        where = f"{source.url} comes over plain http://"
        context.phase(f"{where}, so anybody on the way can read and change it")
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
    _check_images(context, result)
    if options.verify == "list" and _give(context, store, result):  # no other sync has to end
        result.unchanged = True
        return result
    _check_deletion(store, result, options)
    store.prepare()
    lock = locked(target, options.lock_wait, context.source.url, context.watch)
    with lock as waited, writing(target):
        if waited:  # for hours, perhaps: what was listed then is not to follow what came since
            result = _wanted(context, store, dataset, _listed(context, target))
            _check_images(context, result)
            _check_deletion(store, result, options)
        if store.complete(result.digest):
            repair(context, store, result)
        else:
            build(context, store, result)
        if not _give(context, store, result):
            raise StorageError(f"{result.path} was removed by another program; sync again")
        collect(store, options, result)
    return result


def _give(context: Context, store: Store, result: Result) -> bool:
    """Hand the version out and make it the current one; False if it is not there whole."""
    with briefly(store.root):
        if not store.complete(result.digest):
            return False
        if not store.hand_out(result.digest, context.run_id):
            return False
        store.flip(result.digest)
    return True


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
    if context.only:
        found = enumerate(judged.listing.names)
        judged.listing = judged.listing.take([i for i, name in found if name in context.only])
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
    stage = stage_of(store, result, context.options.pack)
    missing = [*result.changes.added, *result.changes.changed]
    try:
        _check_images(context, result)
        if store.complete(result.digest):
            return result
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
    removed = manifest.compare(listing, manifest.rows(before / manifest.NAME)).removed
    judged.kept = names.fitting(removed, listing, judged.folds)
    for row in manifest.rows(before / manifest.NAME) if judged.kept else ():
        if row.name in judged.kept:
            listing.add(row.name, row.size, row.crc, tag=row.token if listing.tags else "")
    judged.listing = listing.sorted()


def _check_images(context: Context, result: Result) -> None:
    """Judge the images that are to come, if that was asked for; see `images.check`."""
    if context.rule is not None:
        from kfp_ddp.datasets import images  # a sync without starts 14 ms sooner

        images.check(context, context.rule, result)


def _check_deletion(store: Store, result: Result, options: Options) -> None:
    """Refuse a new version that lacks too much of the one before, of the same dataset.

    Raises:
        InputError: the share of removed files is over `max_delete`.
    """
    before = store.before(result.dataset)
    if before is None or store.complete(result.digest):
        return
    head = manifest.header(before / manifest.NAME)
    same_source = canonical(str(head.get("source", ""))) == canonical(result.source)
    if head.get("dataset") != result.dataset and not same_source:
        return
    found = manifest.compare(result.names.listing, manifest.rows(before / manifest.NAME))
    files = len(found.removed) + len(found.same) + len(found.changed)
    checks.check_deletion(len(found.removed), files, result.source, options)
