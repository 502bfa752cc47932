"""Check a complete version as `verify` asks, and mend what is damaged in it."""

import os
import stat
from array import array
from collections.abc import Callable
from pathlib import Path

from kfp_ddp.core.files import Folders, folder_below
from kfp_ddp.datasets import checks
from kfp_ddp.datasets.build import build
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.disk import checksum, flush_filesystem, remove
from kfp_ddp.datasets.download import download
from kfp_ddp.datasets.pack import TarStage
from kfp_ddp.datasets.result import Result
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.versions import Store
from kfp_ddp.storage import manifest


def repair(context: Context, store: Store, result: Result) -> None:
    """Bring anew what is damaged in the version.

    Raises:
        Changed: objects changed under the download.
        KfpDdpError: the source cannot be read, or the target not be written.
    """
    options = context.options
    if options.verify == "list":
        result.unchanged = True
        return
    context.phase("verifying")
    mtimes = array("q", bytes(8 * len(result.names.listing)))
    bad = _damaged(store.root, result, options.verify, options.pack == "tar", mtimes)
    if not bad:
        result.unchanged = True
        return
    result.repaired = len(bad)
    if options.pack == "tar":  # an archive is made again as a whole
        build(context, store, result)
    else:
        checks.check_lost(result, bad)
        _replace(context, store, result, bad, mtimes)


def _damaged(
    root: Path, result: Result, verify: str, packed: bool, mtimes: "array[int]"
) -> list[int]:
    """Indices of what is not as the manifest says; fills mtimes and checksums of the rest."""
    listing, version = result.names.listing, result.path
    rows = {row.name: row for row in manifest.rows(version / manifest.NAME)}
    folders = Folders(root, version.relative_to(root))
    unframed = set[int]()
    if packed and verify == "full":
        unframed = TarStage(version, listing).unframed(version)
    bad = []
    for index, name in enumerate(listing.names):
        row = rows.get(name)
        if row and (row.size, row.token) != (listing.sizes[index], listing.token(index)):
            row = None
        if index in unframed:
            bad.append(index)
        elif name.endswith("/"):
            continue
        elif row is None or (mtime := _sound(folders, row, verify)) is None:
            bad.append(index)
        elif row.pack == "":
            mtimes[index] = mtime
            listing.crcs[index] = row.crc
    folders.close()
    return bad


def _sound(folders: Folders, row: manifest.Row, verify: str) -> int | None:
    """The mtime of a file that is what the manifest says; None for one that is not.

    "quick" trusts size and mtime, and reads the file if only the mtime differs; "full" reads. A
    link on the way to it is damage.
    """
    within, _, name = (row.pack or row.name).rpartition("/")
    try:
        with folders.at(within) as folder:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            end = row.offset + row.size
            if not stat.S_ISREG(found.st_mode) or found.st_size < end:
                return None
            if not row.pack and found.st_size > end:
                return None
            trusted = verify == "quick" and (row.pack or found.st_mtime_ns == row.mtime_ns)
            if not trusted and checksum(name, folder, row.offset, row.size) != row.crc:
                return None
            return found.st_mtime_ns
    except (OSError, ValueError):
        return None


def _replace(
    context: Context, store: Store, result: Result, bad: list[int], mtimes: "array[int]"
) -> None:
    """Bring these files anew, and only then put them in the place of the damaged ones."""
    listing, version = result.names.listing, result.path
    store.clear_builds(but=result.digest)
    stage = FileStage(store.build_folder(result.digest), listing, store.root)
    try:
        done = stage.open()
        rest = [i for i in bad if i not in done]
        checks.check_room(store.root, stage, rest)
        download(context, stage, rest, result)
    finally:
        stage.close()
    flush_filesystem(stage.tree)  # before a file stands in a version that is marked as whole
    for index in bad:
        _put_back(store, version, stage, index)
        mtimes[index] = stage.mtimes[index]
    stage.close()
    head = result.header(context.options.pack)
    aside = stage.folder / manifest.NAME
    manifest.write(version / manifest.NAME, aside, store.root, head, listing, mtimes)
    flush_filesystem(version)
    store.clear_builds()


def _put_back(store: Store, version: Path, stage: FileStage, index: int) -> None:
    """Rename a file of the stage to its place in a version; what is damaged there goes first."""
    within, _, name = stage.listing.names[index].rpartition("/")
    parts = within.split("/") if within else []
    place = version.relative_to(store.root)
    for at, part in enumerate(parts):  # neither a link nor a file may stand for a folder
        with folder_below(store.root, place.joinpath(*parts[:at]), make=True) as above:
            if not _is(stat.S_ISDIR, part, above):
                remove(part, above)
    with (
        folder_below(store.root, place / within, make=True) as folder,
        stage.folders.at(within) as source,
    ):
        if _is(stat.S_ISDIR, name, folder):
            remove(name, folder)
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=folder)


def _is(kind: Callable[[int], bool], name: str, folder: int) -> bool:
    try:
        return kind(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
