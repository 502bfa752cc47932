"""Checks of a sync before the first byte is written."""

import os
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.text import human
from kfp_ddp.datasets.options import SyncOptions, canonical
from kfp_ddp.datasets.pack import TarStage
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.storage.listing import Listing

MARGIN = 1.02
"""Factor of the free space, for folders and the journal."""


def check_apart(source: str, target: Path) -> None:
    """Raise InputError if source or target contains the other, also by way of links."""
    address = canonical(source)
    if "://" in address:
        return
    read = Path(os.path.realpath(address))
    written_folders = (target / "versions", target / ".kfsync")
    for written in written_folders:
        real = Path(os.path.realpath(written))
        if _inside(read, real) or _inside(real, read):
            raise InputError(
                f"source {address} and target {target} contain one another; "
                "give a target beside the source"
            )


def check_versioned(target: Path) -> None:
    """Raise InputError for a folder that an earlier release filled with the files themselves."""
    without_versions = os.path.lexists(target / ".kfsync" / "manifest.jsonl")
    if without_versions and not (target / "versions").exists():
        raise InputError(
            f"{target} has files without versions, by a sync of an earlier release: give another "
            "folder, or go on there with rclone, gcloud storage rsync or aws s3 sync"
        )


def _inside(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or below it, also by another mount."""
    if path.is_relative_to(folder):
        return True
    try:
        existing = filter(Path.exists, (path, *path.parents))
        return any(map(folder.samefile, existing))
    except OSError:
        return False


def check_room(target: Path, stage: FileStage, indices: Sequence[int]) -> None:
    """Raise StorageError if the volume has too few bytes or inodes for the objects."""
    size = sum(stage.listing.sizes[index] for index in indices)
    files = stage.inodes(indices)
    existing = next(path for path in (target, *target.parents) if path.is_dir())
    free = os.statvfs(existing)
    free_bytes = free.f_bavail * free.f_frsize
    if size * MARGIN > free_bytes:
        raise StorageError(
            f"{target} has {human(free_bytes)} free, but {human(size)} will be written; free "
            "some, grow the disk or claim, or keep fewer versions (keep_versions, keep_hours)"
        )
    # A file system that makes inodes as it needs them counts none.
    if free.f_files and files * MARGIN > free.f_favail:
        raise StorageError(
            f"{target} has {free.f_favail} inodes free, but {files} files will be written; use a "
            "file system with more inodes, or pack=tar"
        )


def check_room_of_plan(target: Path, stage: FileStage, missing: Sequence[int]) -> None:
    """Check the room for a dry run; files of an interrupted run are not counted."""
    arrived = set(stage.recover())
    planned = stage.files(missing)
    if isinstance(stage, TarStage):  # an archive is always written in full
        planned = stage.files()
    check_room(target, stage, [index for index in planned if index not in arrived])


def check_deletion(removed: int, files: int, source: str, options: SyncOptions) -> None:
    """Raise InputError if the share of the files to delete is over `max_delete`."""
    most = options.max_delete * files
    if removed > most:
        raise InputError(
            f"{source} lacks {removed:,} of the {files:,} files that the target has, over the "
            f"max_delete of {options.max_delete:g}; if that is meant, set max_delete to 1"
        )


def check_sizes(listing: Listing, options: SyncOptions, source: str) -> None:
    """Raise InputError for an object over `max_object_mb`, such as a backup."""
    largest = max(listing.sizes)
    most = options.max_object_mb * 1e6  # 0 for no limit
    if most and largest > most:
        name = listing.names[listing.sizes.index(largest)]
        raise InputError(
            f"{source} holds {name!r} of {human(largest)}, over "
            f"the max_object_mb of {options.max_object_mb:g}; exclude it, or raise max_object_mb"
        )
