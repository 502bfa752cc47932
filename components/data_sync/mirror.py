"""A plain folder as the target: the source's files themselves, as a command line is used.

Everything new is downloaded and verified aside, in `.kfsync`; only then are files renamed into
place, and extras deleted last. Folders are opened one by one without following links, so a link
that was planted in the target leads nowhere.
"""

import os
import stat
from array import array
from pathlib import Path

from kfp_ddp.base.errors import KfpDdpError, StorageError
from kfp_ddp.components.data_sync import checks, manifest
from kfp_ddp.components.data_sync.context import Context
from kfp_ddp.components.data_sync.disk import (
    checksum,
    flush_filesystem,
    no_folder,
    unwritable,
    writing,
)
from kfp_ddp.components.data_sync.download import download
from kfp_ddp.components.data_sync.listing import Listing, folders_of
from kfp_ddp.components.data_sync.lock import locked
from kfp_ddp.components.data_sync.options import Options
from kfp_ddp.components.data_sync.result import Result
from kfp_ddp.components.data_sync.stage import FileStage
from kfp_ddp.components.data_sync.versions import Store

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def update(context: Context, root: Path, result: Result) -> Result:
    """Make the folder hold what was listed.

    Raises:
        Changed: objects changed under the download.
        StorageError: no rights or room, or a link or file is in the way.
        InputError: too much to delete.
    """
    options = context.options
    if options.dry_run:
        return _plan(context, root, result)
    store = Store(root)
    store.prepare(versions=False)
    with locked(root, options.lock_wait, context.source.url, context.watch), writing(root):
        return _update(context, store, result)


def _plan(context: Context, root: Path, result: Result) -> Result:
    """What an update would do, and whether it would be refused."""
    plan = _Plan(root, result, context.options)
    result.planned = True
    stage = FileStage(Store(root).build_folder(result.digest), result.names.listing)
    try:
        plan.check(result)
        checks.check_room_of_plan(root, stage, plan.missing)
    except KfpDdpError as error:
        result.refusal = str(error)
    return result


def _update(context: Context, store: Store, result: Result) -> Result:
    context.phase("comparing")
    listing, root = result.names.listing, store.root
    plan = _Plan(root, result, context.options)
    if not plan.missing and not plan.extras and plan.digest == result.digest:
        result.unchanged = True
        return result
    plan.check(result)
    store.clear_builds(but=result.digest)
    stage = FileStage(store.build_folder(result.digest), listing)
    try:
        done = stage.open()
        result.resumed = len(done & set(plan.missing))
        rest = [index for index in plan.missing if index not in done]
        checks.check_room(root, stage, rest)
        download(context, stage, rest, result)
    finally:
        stage.close()
    context.phase("publishing")
    flush_filesystem(stage.tree)
    plan.remove_files_in_the_way()
    _rename_into(root, stage, plan)
    result.deleted = plan.delete_extras()
    head = result.header(context.options.pack)
    manifest.write(store.work / "manifest.jsonl", head, listing, plan.mtimes)
    store.clear_builds()
    return result


class _Plan:
    """What is there already, what is missing, and what is too many; fills `result.changes`."""

    def __init__(self, root: Path, result: Result, options: Options) -> None:
        self.root, self._listing, self._options = root, result.names.listing, options
        path = root / ".kfsync" / "manifest.jsonl"
        self.digest = manifest.header(path).get("digest", "")
        known = manifest.compare(self._listing, manifest.rows(path))
        self.mtimes = array("q", bytes(8 * len(self._listing)))
        trusted = array("q", [-1]) * len(self._listing)
        for at, index in enumerate(known.same):
            trusted[index] = known.mtimes[at]
            self._listing.crcs[index] = known.crcs[at]
        self.missing: list[int] = []
        for index, name in enumerate(self._listing.names):
            state = self._state(index, trusted[index])
            if state == "same":
                result.changes.same.append(index)
                continue
            (result.changes.added if state == "absent" else result.changes.changed).append(index)
            if not name.endswith("/"):
                self.missing.append(index)
        self.extras: list[str] = []
        self.present = 0
        self._walk()
        if not options.delete:
            self.extras = []
        result.changes.removed = self.extras

    def _state(self, index: int, trusted: int) -> str:
        """The file on disk against the listing: "same", "differs" or "absent"."""
        path = self.root / self._listing.names[index]
        if trusted >= 0 and self._options.verify == "list":
            self.mtimes[index] = trusted
            return "same"
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return "absent"
        if self._listing.names[index].endswith("/"):
            return "same"
        if not stat.S_ISREG(found.st_mode) or found.st_size != self._listing.sizes[index]:
            return "differs"
        self.mtimes[index] = found.st_mtime_ns
        if trusted == found.st_mtime_ns and self._options.verify != "full":
            return "same"
        return "same" if checksum(path) == self._listing.crcs[index] else "differs"

    def _walk(self) -> None:
        """Count what is in the target, and note what the listing does not have."""
        names = set(self._listing.names)
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                entries = list(os.scandir(self.root / folder))
            except FileNotFoundError:
                return
            for entry in entries:
                name = f"{folder}{entry.name}"
                if name == ".kfsync":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                    continue
                self.present += 1
                if name not in names:
                    self.extras.append(name)
        self.extras.sort()

    def check(self, result: Result) -> None:
        """Refuse what is in the way, and too much to delete.

        Raises:
            StorageError: something is in the way.
            InputError: the share of files that would go is over `max_delete`.
        """
        self.check_obstacles()
        checks.check_deletion(len(self.extras), self.present, result.source, self._options)

    def check_obstacles(self) -> None:
        """Find links and files where folders must be, and folders where files must be.

        Raises:
            StorageError: naming the first.
        """
        extras = set(self.extras)
        for folder in sorted(self._needed()):
            path = self.root / folder
            in_the_way = path.exists() and not path.is_dir() and folder not in extras
            if path.is_symlink() or in_the_way:
                raise no_folder(path)
        for index in self.missing:
            path = self.root / self._listing.names[index]
            if path.is_dir() and not path.is_symlink():
                raise StorageError(f"{path} is a folder where a file must be; remove it")

    def remove_files_in_the_way(self) -> None:
        """Delete those extras that stand where a folder must be."""
        for name in self._needed().intersection(self.extras):
            (self.root / name).unlink()

    def _needed(self) -> set[str]:
        """The folders that what is missing needs."""
        return folders_of(self._listing.names[index] for index in self.missing)

    def delete_extras(self) -> int:
        """Delete what the source does not have, and the folders that this leaves empty."""
        for name in self.extras:
            (self.root / name).unlink(missing_ok=True)
            parent = (self.root / name).parent
            while parent != self.root:
                try:
                    parent.rmdir()
                except OSError:
                    break
                parent = parent.parent
        return len(self.extras)


def _rename_into(root: Path, stage: FileStage, plan: _Plan) -> None:
    """Rename every new file from the stage to its name in the target."""
    listing: Listing = stage.listing
    descriptor, opened = -1, None
    try:
        for index in sorted([*plan.missing, *_markers(listing)]):
            folder, _, name = listing.names[index].rpartition("/")
            if folder != opened:
                if descriptor >= 0:
                    os.close(descriptor)
                    descriptor = -1
                descriptor, opened = _open_folder(root, folder), folder
            if name:
                os.rename(stage.path(index), name, dst_dir_fd=descriptor)
                plan.mtimes[index] = stage.mtimes[index]
    except OSError as error:
        raise unwritable(root / listing.names[index], error) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _markers(listing: Listing) -> list[int]:
    return [index for index, name in enumerate(listing.names) if name.endswith("/")]


def _open_folder(root: Path, folder: str) -> int:
    """Open a folder below the root, making what is missing, through no link."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in folder.split("/") if folder else ():
        try:
            try:
                below = os.open(part, _FOLDER, dir_fd=descriptor)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=descriptor)
                below = os.open(part, _FOLDER, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor
