"""Check a complete version as `verify` asks, and mend what is damaged in it."""

from array import array
from pathlib import Path

from kfp_ddp.components.data_sync import checks, manifest
from kfp_ddp.components.data_sync.build import build
from kfp_ddp.components.data_sync.context import Context
from kfp_ddp.components.data_sync.disk import checksum, flush_filesystem
from kfp_ddp.components.data_sync.download import download
from kfp_ddp.components.data_sync.pack import TarStage
from kfp_ddp.components.data_sync.result import Result
from kfp_ddp.components.data_sync.stage import FileStage
from kfp_ddp.components.data_sync.versions import Store


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
    bad = _damaged(result, options.verify, options.pack == "tar", mtimes)
    if not bad:
        result.unchanged = True
        return
    result.repaired = len(bad)
    if options.pack == "tar":  # an archive is made again as a whole
        build(context, store, result)
    else:
        checks.check_lost(result, bad)
        _replace(context, store, result, bad, mtimes)


def _damaged(result: Result, verify: str, packed: bool, mtimes: "array[int]") -> list[int]:
    """Indices of what is not as the manifest says; fills mtimes and checksums of the rest."""
    listing, version = result.names.listing, result.path
    rows = {row.name: row for row in manifest.rows(version / manifest.NAME)}
    unframed = set[int]()
    if packed and verify == "full":
        unframed = TarStage(version, listing).unframed(version)
    bad = []
    for index, name in enumerate(listing.names):
        row = rows.get(name)
        if index in unframed:
            bad.append(index)
        elif name.endswith("/"):
            continue
        elif row is None or not sound(version, row, verify):
            bad.append(index)
        elif row.pack == "":
            mtimes[index] = (version / name).lstat().st_mtime_ns
            listing.crcs[index] = row.crc
    return bad


def sound(version: Path, row: manifest.Row, verify: str) -> bool:
    """Whether a file is what the manifest says.

    "quick" trusts size and mtime, and reads the file if only the mtime differs; "full" reads.
    """
    path = version / (row.pack or row.name)
    if row.pack:
        if verify == "quick":
            return path.is_file() and path.stat().st_size >= row.offset + row.size
        return checksum(path, row.offset, row.size) == row.crc
    try:
        found = path.lstat()
    except OSError:
        return False
    if found.st_size != row.size or path.is_symlink():
        return False
    if verify == "quick" and found.st_mtime_ns == row.mtime_ns:
        return True
    return checksum(path) == row.crc


def _replace(
    context: Context, store: Store, result: Result, bad: list[int], mtimes: "array[int]"
) -> None:
    """Bring these files anew, and only then put them in the place of the damaged ones."""
    listing, version = result.names.listing, result.path
    store.clear_builds(but=result.digest)
    stage = FileStage(store.build_folder(result.digest), listing)
    try:
        done = stage.open()
        rest = [i for i in bad if i not in done]
        checks.check_room(store.root, stage, rest)
        download(context, stage, rest, result)
    finally:
        stage.close()
    flush_filesystem(stage.tree)  # before a file stands in a version that is marked as whole
    for index in bad:
        path = version / listing.names[index]
        path.parent.mkdir(parents=True, exist_ok=True)
        stage.path(index).rename(path)
        mtimes[index] = path.lstat().st_mtime_ns
    head = result.header(context.options.pack)
    manifest.write(version / manifest.NAME, head, listing, mtimes)
    flush_filesystem(version)
    store.clear_builds()
