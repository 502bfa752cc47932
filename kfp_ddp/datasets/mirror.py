"""Sync to a plain folder with the files themselves, without versions.

All that is new is verified in `.kfsync`, then renamed into place; extras are deleted last. Folders
are opened one by one, so a link that was planted in the target leads nowhere.
"""

import contextlib
import os
import stat
from array import array
from dataclasses import replace
from pathlib import Path

from kfp_ddp.core.errors import KfpDdpError, StorageError
from kfp_ddp.core.files import Folders, folder_below
from kfp_ddp.datasets import checks, names
from kfp_ddp.datasets.build import download, stage_of, staged, write_manifest
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.disk import (
    flush_filesystem,
    has_content,
    locked,
    no_folder,
    unreadable,
    writing,
)
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.versions import DatasetVersions
from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Filter, folders_of

_NEVER = (".kfsync", "lost+found")
"""Folders at the root that are never mirrored."""


def update(context: Context, root: Path, result: Result) -> Result:
    """Make the folder equal to the listing; raises Changed if objects change meanwhile."""
    options = context.options
    if options.dry_run:
        return _dry_run(context, root, result)
    store = DatasetVersions(root)
    store.prepare(versions=False)
    with locked(root, options.lock_wait, context.source.url, context.watch), writing(root):
        return _update(context, store, result)


def _dry_run(context: Context, root: Path, result: Result) -> Result:
    """Return what an update would do, and whether it would be refused."""
    plan = _Plan(root, result.names, context.options)
    result = replace(result, planned=True, changes=plan.changes)
    stage = stage_of(DatasetVersions(root), result, "none")
    try:
        plan.check(result.source)
        checks.check_room_of_plan(root, stage, plan.missing)
    except KfpDdpError as error:
        return replace(result, refusal=str(error))
    return result


def _update(context: Context, store: DatasetVersions, result: Result) -> Result:
    context.phase("comparing")
    plan = _Plan(store.root, result.names, context.options)
    result = replace(result, changes=plan.changes)
    if not plan.missing and not plan.changes.removed and plan.digest == result.digest:
        return replace(result, unchanged=True)
    plan.check(result.source)
    with staged(store, result, "none") as (stage, done):
        stage.mode = 0o644  # of the user's own folder
        result = replace(result, resumed=len(done & set(plan.missing)))
        rest = [index for index in plan.missing if index not in done]
        result = download(context, store, stage, rest, result)
    context.phase("publishing")
    flush_filesystem(stage.tree)
    record = store.work / "manifest.jsonl"
    for index in (*plan.changes.added, *plan.changes.changed):
        plan.mtimes[index] = -1  # so that after a kill each of these is looked at
    write_manifest(store, stage, result, record, plan.mtimes)
    plan.remove_files_in_the_way()
    _rename_into(store.root, stage, plan)
    plan.delete_extras()
    write_manifest(store, stage, result, record, plan.mtimes)
    store.clear_builds()
    return result


class _Plan:
    """The difference of the folder and the listing: `changes`, and the `missing` files."""

    def __init__(self, root: Path, listed: names.Names, options: SyncOptions) -> None:
        self.root, self._listing, self._options = root, listed.listing, options
        self._form = names.fold if listed.folds else str
        self.changes = manifest.Changes()
        self._folders, self._absent = Folders(root), set[str]()
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
                self.changes.same.append(index)
                continue
            (self.changes.added if state == "absent" else self.changes.changed).append(index)
            if not name.endswith("/"):
                self.missing.append(index)
        self.present = 0
        if options.delete:
            self._walk(Filter(options.include, options.exclude))
        self._folders.close()

    def _state(self, index: int, trusted: int) -> str:
        """Compare the file on disk with the listing: "same", "differs" or "absent"."""
        if trusted >= 0 and self._options.verify == "list":
            self.mtimes[index] = trusted
            return "same"
        within, _, name = self._listing.names[index].rpartition("/")
        try:
            with self._folder(within) as folder:
                if not name:
                    return "same"
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) or status.st_size != self._listing.sizes[index]:
                    return "differs"
                self.mtimes[index] = status.st_mtime_ns
                if trusted == status.st_mtime_ns and self._options.verify != "full":
                    return "same"
                token, crc = self._listing.token(index), self._listing.crcs[index]
                return "same" if has_content(name, folder, token, crc) else "differs"
        except (FileNotFoundError, NotADirectoryError):
            return "absent"
        except OSError as error:
            raise unreadable(self.root / self._listing.names[index], error) from error

    def _folder(self, name: str) -> contextlib.AbstractContextManager[int]:
        """Return a folder of the target; a missing one is looked up once only."""
        if name in self._absent:
            raise FileNotFoundError
        try:
            return self._folders.at(name)
        except (FileNotFoundError, NotADirectoryError):
            self._absent.add(name)
            raise

    def _walk(self, selected: Filter) -> None:
        """Count the selected files in the target, and find those that the listing lacks."""
        listed = set(map(self._form, self._listing.names))
        folders = [""]
        while folders:
            within = folders.pop()
            try:
                with self._folders.at(within) as folder:
                    entries = list(os.scandir(folder))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise unreadable(self.root / within, error) from error
            for entry in entries:
                name = f"{within}/{entry.name}" if within else entry.name
                if name in _NEVER or selected.excludes_folder(name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif selected.selects(name):
                    self.present += 1
                    if self._form(name) not in listed:
                        self.changes.removed.append(name)
        self.changes.removed.sort()

    def check(self, source: str) -> None:
        """Check the share to delete, and that no folder is in place of a file or the reverse."""
        extras = set(self.changes.removed)
        for folder in sorted(self._needed()):
            path = self.root / folder
            in_the_way = path.exists() and not path.is_dir() and folder not in extras
            if path.is_symlink() or in_the_way:
                raise no_folder(path)
        for index in self.changes.changed:
            path = self.root / self._listing.names[index]
            if path.is_dir() and not path.is_symlink():
                raise StorageError(f"{path} is a folder where a file must be; remove it")
        checks.check_deletion(len(self.changes.removed), self.present, source, self._options)

    def remove_files_in_the_way(self) -> None:
        """Delete the extra files whose names are needed for folders."""
        for name in self._needed().intersection(self.changes.removed):
            self._delete(name)

    def _needed(self) -> set[str]:
        return folders_of(self._listing.names[index] for index in self.missing)

    def delete_extras(self) -> None:
        """Delete extra files and the folders that this leaves empty."""
        for name in self.changes.removed:
            self._delete(name)
            parent = name.rpartition("/")[0]
            with contextlib.suppress(OSError):
                while parent:
                    above, _, folder = parent.rpartition("/")
                    with folder_below(self.root, above) as descriptor:
                        os.rmdir(folder, dir_fd=descriptor)
                    parent = above

    def _delete(self, name: str) -> None:
        within, _, file = name.rpartition("/")
        with (
            writing(self.root / name),
            contextlib.suppress(FileNotFoundError),
            folder_below(self.root, within) as folder,
        ):
            os.unlink(file, dir_fd=folder)


def _rename_into(root: Path, stage: FileStage, plan: _Plan) -> None:
    listing = stage.listing
    markers = [index for index, name in enumerate(listing.names) if name.endswith("/")]
    with contextlib.closing(Folders(root, make=True)) as folders, contextlib.closing(stage.folders):
        for index in sorted([*plan.missing, *markers]):
            within, _, name = listing.names[index].rpartition("/")
            with writing(root / listing.names[index]), folders.at(within) as folder:
                if name:
                    with stage.folders.at(within) as source:
                        os.rename(name, name, src_dir_fd=source, dst_dir_fd=folder)
                    plan.mtimes[index] = stage.mtimes[index]
