"""Build a version from a listing."""

from pathlib import Path

from kfp_ddp.core.files import Folders
from kfp_ddp.datasets import checks
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.download import download
from kfp_ddp.datasets.pack import TarStage
from kfp_ddp.datasets.result import Result
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.versions import Store
from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Listing


def build(context: Context, store: Store, result: Result) -> None:
    """Build and publish the version.

    Raises:
        Changed: objects changed under the download.
        KfpDdpError: the source cannot be read, or the target not be written.
    """
    options, listing = context.options, result.names.listing
    store.clear_builds(but=result.digest)
    stage = stage_of(store, result, options.pack)
    try:
        done = stage.open()
        result.resumed = len(done)
        before = store.before(result.dataset)
        result.changes = changes(listing, before, result.dataset)
        if isinstance(stage, TarStage):  # what is taken from the version before is a copy
            checks.check_room(store.root, stage, [i for i in stage.files() if i not in done])
        if before is not None:
            done |= _take(stage, before, store.root, result, done, options.verify == "full")
        missing = [i for i in stage.files() if i not in done]
        checks.check_lost(result, missing)
        checks.check_room(store.root, stage, missing)
        download(context, stage, missing, result)
    finally:
        stage.close()
    context.phase("publishing")
    offsets = stage.member_offset if isinstance(stage, TarStage) else None
    head = result.header(options.pack)
    aside = stage.folder / manifest.NAME
    manifest.write(
        stage.tree / manifest.NAME, aside, store.root, head, listing, stage.mtimes, offsets
    )
    store.publish(stage.folder, result.digest)
    store.clear_builds()


def stage_of(store: Store, result: Result, pack: str) -> FileStage:
    """The stage for the layout that was asked for."""
    kind = TarStage if pack == "tar" else FileStage
    return kind(store.build_folder(result.digest), result.names.listing, store.root)


def changes(listing: Listing, before: Path | None, dataset: str) -> manifest.Changes:
    """How the listing differs from a version; another dataset's only lends what is the same."""
    if before is None:
        return manifest.compare(listing, iter(()))
    found = manifest.compare(listing, manifest.rows(before / manifest.NAME))
    if manifest.dataset(before) != dataset:
        found.added = sorted([*found.added, *found.changed])
        found.changed, found.removed = [], []
    return found


def _take(
    stage: FileStage, before: Path, root: Path, result: Result, done: set[int], read: bool
) -> set[int]:
    """Take what is unchanged from the version before; the indices taken.

    `read` files that are only linked, too; what is copied is always checked.
    """
    taken = set()
    same, folders = result.changes, Folders(root, before.relative_to(root))
    for at, index in enumerate(same.same):
        name = stage.listing.names[index]
        if index in done or name.endswith("/"):
            continue
        if isinstance(stage, TarStage):
            source = same.packs[at] or name
            good = stage.copy(index, before, source, same.offsets[at], same.crcs[at])
        elif same.packs[at]:
            good = False
        else:
            good = stage.link(index, folders, same.mtimes[at], same.crcs[at], read)
        if good:
            taken.add(index)
    folders.close()
    result.linked = len(taken)
    return taken
