"""A plain folder as the target: the source's files themselves, as a command line is used.

Everything new is downloaded and verified aside, in `.kfsync`; only then are files renamed into
place, and extras deleted last. Folders are opened one by one without following links, so a link
that was planted in the target leads nowhere.
"""

import os
import stat
from array import array
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import manifest
from kfp_ddp.components.data_sync.build import download, header, preflight, refuse_deletion
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.names import Names
from kfp_ddp.components.data_sync.options import Options, Result, Watch
from kfp_ddp.components.data_sync.sources import Source
from kfp_ddp.components.data_sync.stage import FileStage, checksum, unwritable, writing
from kfp_ddp.components.data_sync.versions import Store, sync_filesystem

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def run(source: Source, root: Path, judged: Names, options: Options, watch: Watch) -> Result | None:
    """Make the folder hold what was listed; None if objects changed under the download.

    Raises:
        InputError: no rights or room, a link or file in the way, or too much to delete.
    """
    result = Result(source.url, judged.listing.digest(), root, judged)
    if options.dry_run:
        plan = _Plan(root, result, options)
        result.planned = True
        try:
            plan.refuse(result)
            preflight(Store(root), result, plan.missing, options)
        except InputError as error:
            result.refusal = str(error)
        return result
    store = Store(root)
    store.prepare(versions=False)
    with store.lock(options.lock_wait, source.url, watch), writing(root):
        return _update(source, store, result, options, watch)


def _update(
    source: Source, store: Store, result: Result, options: Options, watch: Watch
) -> Result | None:
    watch("comparing", None, 0, 0)
    listing, root = result.names.listing, store.root
    plan = _Plan(root, result, options)
    if not plan.missing and not plan.extras and plan.digest == result.digest:
        result.unchanged = True
        return result
    plan.refuse(result)
    stage = FileStage(store.building(result.digest), listing)
    try:
        done = stage.open()
        result.resumed = len(done & set(plan.missing))
        rest = [index for index in plan.missing if index not in done]
        store.preflight(sum(listing.sizes[i] for i in rest), len(rest))
        if not download(source, listing, stage, rest, options, result, watch):
            return None
    finally:
        stage.close()
    watch("publishing", None, 0, 0)
    sync_filesystem(stage.tree)
    plan.remove_files_in_the_way()
    _place(root, stage, plan)
    result.deleted = plan.delete_extras()
    head = header(result, options)
    manifest.write(store.work / "manifest.jsonl", head, listing, plan.mtimes)
    store.building("")
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

    def refuse(self, result: Result) -> None:
        """Refuse what is in the way, and too much to delete.

        Raises:
            InputError: see `refuse_obstacles` and `refuse_deletion`.
        """
        self.refuse_obstacles()
        refuse_deletion(len(self.extras), self.present, result.source, self._options)

    def refuse_obstacles(self) -> None:
        """Find links and files where folders must be, and folders where files must be.

        Raises:
            InputError: naming the first.
        """
        extras = set(self.extras)
        checked: set[str] = set()
        for index in self.missing:
            name = self._listing.names[index]
            parts = name.split("/")
            for depth in range(1, len(parts)):
                parent = "/".join(parts[:depth])
                if parent in checked:
                    continue
                checked.add(parent)
                path = self.root / parent
                removable = parent in extras and not path.is_symlink()
                if (path.is_symlink() or (path.exists() and not path.is_dir())) and not removable:
                    raise InputError(
                        f"{path} is a link or a file where a folder must be; remove it"
                    )
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                raise InputError(f"{path} is a folder where a file must be; remove it")

    def remove_files_in_the_way(self) -> None:
        """Delete those extras that stand where a folder must be."""
        needed = {
            "/".join(self._listing.names[i].split("/")[:depth])
            for i in self.missing
            for depth in range(1, self._listing.names[i].count("/") + 1)
        }
        for name in needed.intersection(self.extras):
            (self.root / name).unlink()

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


def _place(root: Path, stage: FileStage, plan: _Plan) -> None:
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
