"""Build a version from a listing, or repair files of a complete one."""

import contextlib
import json
import os
import stat
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kfp_ddp.core.files import Folders, atomic_write, folder_below
from kfp_ddp.datasets import checks
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.disk import flush_filesystem, has_content, plain_folder, remove
from kfp_ddp.datasets.pack import TarStage
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.transfer import Transfer
from kfp_ddp.datasets.versions import DatasetVersions
from kfp_ddp.storage import manifest
from kfp_ddp.storage.folder_source import FolderSource
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import Source


@contextlib.contextmanager
def staged(
    store: DatasetVersions, result: Result, pack: str
) -> Iterator[tuple[FileStage, set[int]]]:
    """Yield the stage of a version, and the indices of what an interrupted sync left there."""
    store.clear_builds(but=result.digest)
    with contextlib.closing(stage_of(store, result, pack)) as stage:
        yield stage, stage.open()


def build(context: Context, store: DatasetVersions, result: Result) -> Result:
    """Build and publish the version; raise Changed if objects change during the download."""
    options = context.options
    with staged(store, result, options.pack) as (stage, done):
        before = store.before(result.dataset)
        differences = changes(stage.listing, before, result.dataset)
        result = replace(result, resumed=len(done), changes=differences)
        if isinstance(stage, TarStage) or any(differences.packs):  # they are copied, not linked
            new = [index for index in stage.files() if index not in done]
            checks.check_room(store.root, stage, new)
        if before is not None:
            reused = _reuse(stage, before, store.root, result, done, options.verify == "full")
            result = replace(result, linked=len(reused))
            done |= reused
        missing = [index for index in stage.files() if index not in done]
        result = download(context, store, stage, missing, result)
    context.phase("publishing")
    write_manifest(store, stage, result, stage.tree / manifest.NAME, stage.mtimes)
    store.publish(stage.folder, result.digest)
    store.clear_builds()
    return result


def repair(context: Context, store: DatasetVersions, result: Result) -> Result:
    """Check a complete version as `verify` requests; download damaged files again as `build`."""
    options = context.options
    if options.verify == "list":
        return replace(result, unchanged=True)
    context.phase("verifying")
    mtimes = array("q", bytes(8 * len(result.names.listing)))
    bad = _damaged(store.root, result, options.verify, options.pack == "tar", mtimes)
    if not bad:
        return replace(result, unchanged=True)
    result = replace(result, repaired=len(bad))
    if options.pack == "tar":  # an archive is always written in full
        return build(context, store, result)
    return _replace_files(context, store, result, bad, mtimes)


def confirm(context: Context, store: DatasetVersions, result: Result) -> Result:
    """Read a version of crc32c alone; return it, or the result of the listing if a file differs.

    What the files are is recorded, so that this happens once.
    """
    context.phase("reading the version of an earlier release, which recorded crc32c alone")
    packed = context.options.pack == "tar"
    mtimes = array("q", bytes(8 * len(result.names.listing)))
    if _damaged(store.root, result, "full", packed, mtimes):
        path = store.version(result.exact)
        return replace(result, digest=result.exact, path=path, unconfirmed=False)
    stage = stage_of(store, result, context.options.pack)
    plain_folder(store.root, stage.folder)
    write_manifest(store, stage, result, result.path / manifest.NAME, mtimes)
    store.clear_builds()
    return replace(result, unconfirmed=False)


def download(
    context: Context,
    store: DatasetVersions,
    stage: FileStage,
    missing: Sequence[int],
    result: Result,
) -> Result:
    """Download the missing objects to the stage; raise Changed, and StorageError for no room."""
    checks.check_room(store.root, stage, missing)
    size = sum(stage.listing.sizes[index] for index in missing)
    transfer = Transfer(context, stage)
    context.watch("downloading", transfer.meter, len(missing), size)
    cloned = _cloned(context.source, stage, missing)
    transfer.run([index for index in missing if index not in cloned])
    retries = result.retries + transfer.meter.retries
    return replace(result, retries=retries, downloaded=len(missing), downloaded_bytes=size)


def _cloned(source: Source, stage: FileStage, missing: Sequence[int]) -> set[int]:
    """Share blocks with files of a folder until the file system refuses; return their indices."""
    cloned: set[int] = set()
    possible = sys.platform == "linux" and not isinstance(stage, TarStage)
    if not possible or not isinstance(source, FolderSource):  # elsewhere it has another number
        return cloned
    for index in missing:
        listing = stage.listing
        with source.opened(listing.origin(index), listing.generations[index]) as file:
            if not stage.clone(index, file.fileno()):
                break
        cloned.add(index)
    return cloned


def write_manifest(
    store: DatasetVersions, stage: FileStage, result: Result, path: Path, mtimes: "array[int]"
) -> None:
    """Write the manifest of the target, by way of the stage's folder; `mtimes` in nanoseconds."""
    listing = stage.listing
    header = {
        "format": 1,
        "source": result.source,
        "dataset": result.dataset,
        "digest": result.digest,
        "files": result.files,
        "bytes": result.bytes,
        "pack": "tar" if isinstance(stage, TarStage) else "none",
    }
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with atomic_write(path, stage.folder / manifest.NAME, store.root) as file:
        file.write(f"{json.dumps(header)}\n".encode())
        for index, name in enumerate(listing.names):
            row: list[object] = [
                name,
                listing.sizes[index],
                listing.token(index),
                f"{listing.crcs[index]:08x}",
                mtimes[index],
            ]
            if isinstance(stage, TarStage):
                row += [listing.origin(index), *stage.member_offset(index)]
            elif name in listing.origins:
                row.append(listing.origins[name])
            file.write(encode(row).encode() + b"\n")
        os.fchmod(file.fileno(), 0o644)


def stage_of(store: DatasetVersions, result: Result, pack: str) -> FileStage:
    """Return the stage for a packing."""
    kind = TarStage if pack == "tar" else FileStage
    return kind(store.build_folder(result.digest), result.names.listing, store.root)


def changes(listing: Listing, before: Path | None, dataset: str) -> manifest.Changes:
    """Return how the listing differs from a version; another dataset's only has unchanged files."""
    if before is None:
        return manifest.compare(listing, iter(()))
    differences = manifest.compare(listing, manifest.rows(before / manifest.NAME))
    if manifest.dataset(before) != dataset:
        differences.added = sorted([*differences.added, *differences.changed])
        differences.changed = []
        differences.removed = []
    return differences


def _reuse(
    stage: FileStage, before: Path, root: Path, result: Result, done: set[int], read: bool
) -> set[int]:
    """Link (verified if `read`), or copy and verify, unchanged files; return their indices."""
    reused = set()
    same = result.changes
    folders = Folders(root, before.relative_to(root))
    for row, index in enumerate(same.same):
        name = stage.listing.names[index]
        if index in done or name.endswith("/"):
            continue
        pack = same.packs[row]
        file = pack or name
        crc = same.crcs[row]
        # A member of an archive is no file that could be linked.
        both_plain = not pack and not isinstance(stage, TarStage)
        linked = both_plain and stage.link(index, folders, same.mtimes[row], crc, read)
        if linked or stage.copy(index, before, file, same.offsets[row], crc):
            reused.add(index)
    folders.close()
    return reused


def _damaged(
    root: Path, result: Result, verify: str, packed: bool, mtimes: "array[int]"
) -> list[int]:
    """Return the indices of damaged files; set mtimes and checksums of the others."""
    listing = result.names.listing
    version = result.path
    rows = {row.name: row for row in manifest.rows(version / manifest.NAME)}
    folders = Folders(root, version.relative_to(root))
    invalid_members = set[int]()
    if packed and verify == "full":
        invalid_members = TarStage(version, listing).invalid_members(version)
    bad = []
    for index, name in enumerate(listing.names):
        if index in invalid_members:
            bad.append(index)
            continue
        if name.endswith("/"):
            continue
        row = _listed_row(rows.get(name), listing, index)
        if row is None:
            bad.append(index)
            continue
        mtime = _intact_mtime(folders, row, verify)
        if mtime is None:
            bad.append(index)
        elif row.pack == "":
            mtimes[index] = mtime
            listing.crcs[index] = row.crc
    folders.close()
    return bad


def _listed_row(
    row: manifest.ManifestRow | None, listing: Listing, index: int
) -> manifest.ManifestRow | None:
    """Return a row of the manifest with the checksum that the source lists; None if it differs."""
    if row is None or row.size != listing.sizes[index]:
        return None
    token = listing.token(index)
    if row.token == token:
        return row
    # An earlier release recorded crc32c alone: the file is compared with the listed hash.
    if manifest.may_equal(row, listing, index):
        return row._replace(token=token)
    return None


def _intact_mtime(folders: Folders, row: manifest.ManifestRow, verify: str) -> int | None:
    """Return the mtime of a file that matches its row; None for damage, also a link in its path."""
    within, _, name = (row.pack or row.name).rpartition("/")
    with contextlib.suppress(OSError, ValueError), folders.at(within) as folder:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        end = row.offset + row.size
        complete = status.st_size >= end if row.pack else status.st_size == end
        if not stat.S_ISREG(status.st_mode) or not complete:
            return None
        trusted = verify == "quick" and (row.pack or status.st_mtime_ns == row.mtime_ns)
        if trusted or has_content(name, folder, row.token, row.crc, row.offset, row.size):
            return status.st_mtime_ns
    return None


def _replace_files(
    context: Context, store: DatasetVersions, result: Result, bad: list[int], mtimes: "array[int]"
) -> Result:
    version = result.path
    with staged(store, result, "none") as (stage, done):
        rest = [index for index in bad if index not in done]
        result = download(context, store, stage, rest, result)
    flush_filesystem(stage.tree)  # before a file is renamed into a complete version
    for index in bad:
        _restore(store, version, stage, index)
        mtimes[index] = stage.mtimes[index]
    stage.close()
    write_manifest(store, stage, result, version / manifest.NAME, mtimes)
    flush_filesystem(version)
    store.clear_builds()
    return result


def _restore(store: DatasetVersions, version: Path, stage: FileStage, index: int) -> None:
    """Replace a damaged file of a version by that of the stage."""
    within, _, name = stage.listing.names[index].rpartition("/")
    parts = within.split("/") if within else []
    place = version.relative_to(store.root)
    for depth, part in enumerate(parts):  # a link or a file in place of a folder is removed
        with folder_below(store.root, place.joinpath(*parts[:depth]), make=True) as above:
            if not _is_folder(part, above):
                remove(part, above)
    with (
        folder_below(store.root, place / within, make=True) as folder,
        stage.folders.at(within) as source,
    ):
        if _is_folder(name, folder):
            remove(name, folder)
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=folder)


def _is_folder(name: str, folder: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False
