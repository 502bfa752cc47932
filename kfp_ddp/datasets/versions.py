"""The target folder: complete versions by digest, and `current`.

    <root>/versions/<digest12>/{…, _MANIFEST.jsonl, _SUCCESS}
    <root>/current -> versions/<digest12>
    <root>/.kfsync/{lock, building/<digest12>/, leases/<digest12>/, trash/}

A version is built under .kfsync and renamed when it is complete and on disk, so no reader sees a
partial one. No link below the root is followed.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from kfp_ddp.core.errors import FULL, StorageError
from kfp_ddp.core.files import atomic_write, folder_below, fsync, read_below
from kfp_ddp.core.version import pinned
from kfp_ddp.datasets import names
from kfp_ddp.datasets.disk import flush_filesystem, plain_folder, remove, versions_lock, writing
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import Result
from kfp_ddp.storage import manifest
from kfp_ddp.storage.leases import folder_holders, write_permanent

_SUCCESS_BYTES = 100


class DatasetVersions:
    """A target folder, with the work area `.kfsync` below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / ".kfsync"
        self.versions = root / "versions"

    def version(self, digest: str) -> Path:
        """Return the folder of the version with this digest; it may be missing."""
        return self.versions / digest[:12]

    def complete(self, digest: str) -> bool:
        """Return whether the version exists, is complete and has this digest."""
        return success(self.version(digest)) == digest

    def current(self) -> Path | None:
        """Return the version that `current` points to, if it is complete."""
        try:
            target = os.readlink(self.root / "current")
        except OSError:
            return None
        path = self.versions / Path(target).name
        if Path(target).parent == Path("versions") and success(path):
            return path
        return None

    def before(self, dataset: str) -> Path | None:
        """Return the version to compare with and to reuse: the dataset's newest, else `current`."""
        current = self.current()
        own = [path for _, path in self.versions_of(dataset)]
        if current in own or not own:
            return current
        return own[0]

    def versions_of(self, dataset: str) -> list[tuple[int, Path]]:
        """Return the complete versions of a dataset by last use, the newest first."""
        versions = []
        for path in self.versions.glob("*"):
            if success(path) and manifest.dataset(path) == dataset:
                with contextlib.suppress(FileNotFoundError):  # another sync has removed it
                    versions.append((self.handed_out(path), path))
        return sorted(versions, reverse=True)

    def handed_out(self, version: Path) -> int:
        """Return the time of the last use, in nanoseconds; raise OSError if it is removed."""
        return os.lstat(version / manifest.SUCCESS).st_mtime_ns

    def prepare(self) -> None:
        """Create the work area, and the folder of the versions; raise StorageError."""
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        for path in (self.work / "building", self.work / "trash", self.versions):
            plain_folder(self.root, path)
        with writing(self.work):
            if not os.access(self.work, os.W_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, "Permission denied")
            names.leave_probe(self.root)

    def build_folder(self, digest: str) -> Path:
        """Return the folder in which the version is built; it may be missing."""
        return self.work / "building" / digest[:12]

    def clear_builds(self, but: str = "") -> None:
        """Remove interrupted builds and removals, except the build of this digest."""
        for name in ("building", "trash"):
            with folder_below(self.root, f".kfsync/{name}") as folder:
                for entry in list(os.scandir(folder)):
                    if name != "building" or entry.name != but[:12]:
                        remove(entry.name, folder)

    def publish(self, build: Path, digest: str) -> None:
        """Mark the finished tree of a build as complete and rename it to its version."""
        version = self.version(digest)
        tree = build / "tree"
        flush_filesystem(tree)
        with atomic_write(tree / manifest.SUCCESS, build / manifest.SUCCESS, self.root) as file:
            file.write(f"{digest}\n".encode())
            os.fchmod(file.fileno(), 0o644)
        fsync(tree)
        gone = self.move_to_trash(version)  # an existing one is damaged, and may be in use
        self._move(tree, version)
        fsync(self.versions)
        self.clear([gone])

    def set_current(self, digest: str) -> None:
        """Point `current` at the version; the last caller wins."""
        target = f"versions/{digest[:12]}"
        link = self.root / "current"
        if link.is_symlink() and os.readlink(link) == target:
            return
        if link.is_dir() and not link.is_symlink():
            raise StorageError(f"{link} is a folder where a link must be; move it away")
        fresh = f"current-{os.urandom(8).hex()}"
        with writing(link):
            with folder_below(self.root, ".kfsync") as work, folder_below(self.root) as root:
                os.symlink(target, fresh, dir_fd=work)
                os.rename(fresh, link.name, src_dir_fd=work, dst_dir_fd=root)
            fsync(self.root)

    def record_use(self, digest: str, run_id: str = "") -> bool:
        """Record the use of this version, with a lease for the run; False if it was removed."""
        version = self.version(digest)
        leases = self.leases(digest)
        try:
            with folder_below(self.root, version.relative_to(self.root)) as folder:
                os.utime(manifest.SUCCESS, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # nothing can be written here, so nothing can be removed either
            return True
        if run_id:
            with writing(leases):
                try:
                    with folder_below(self.root, leases.relative_to(self.root), make=True):
                        write_permanent(leases, run_id)
                except OSError as error:
                    if error.errno not in FULL:
                        raise
        return True

    def leases(self, digest: str) -> Path:
        """Return the folder of the leases on a version."""
        return self.work / "leases" / digest[:12]

    def move_to_trash(self, path: Path) -> str:
        """Move a folder, if it exists, to the trash; return its name there for `clear`."""
        gone = f"{path.name}-{os.urandom(8).hex()}"
        with contextlib.suppress(FileNotFoundError):
            self._move(path, self.work / "trash" / gone)
        return gone

    def clear(self, gone: Iterable[str]) -> None:
        """Delete folders in the trash."""
        with folder_below(self.root, ".kfsync/trash") as trash:
            for name in gone:
                remove(name, trash)

    def _move(self, path: Path, target: Path) -> None:
        with (
            folder_below(self.root, path.parent.relative_to(self.root)) as old,
            folder_below(self.root, target.parent.relative_to(self.root)) as new,
        ):
            os.rename(path.name, target.name, src_dir_fd=old, dst_dir_fd=new)


def leases_of(version: Path) -> Path | None:
    """Return the folder of the leases on a version; None for a folder that is not a version."""
    version = pinned(version)
    if version.parent.name != "versions":
        return None
    return DatasetVersions(version.parents[1]).leases(version.name)


def success(path: Path) -> str:
    """Return the digest in a version's `_SUCCESS`; '' if it is not complete."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        name = Path(path.parent.name, path.name, manifest.SUCCESS)
        return read_below(path.parents[1], name, _SUCCESS_BYTES).decode("ascii").strip()
    return ""


def collect(store: DatasetVersions, options: SyncOptions, result: Result) -> Result:
    """Remove old versions of the dataset that nobody uses; return the result with their names."""
    if options.keep_versions <= 0:
        return result
    latest = time.time_ns() - int(options.keep_hours * 3600e9)
    older = store.versions_of(result.dataset)[options.keep_versions :]
    old = []
    for when, path in older:
        if when < latest and path != result.path:
            old.append((when, path))
    if not old:
        return result
    from kfp_ddp.jobs.live_runs import live_runs  # most syncs remove nothing

    try:
        alive = live_runs()
    except StorageError as error:
        return replace(result, kept_why=str(error))
    removed = []
    for when, path in old:
        with versions_lock(store.root):
            if path == store.current() or _used(store, path, when, alive):
                continue
            gone = [store.move_to_trash(folder) for folder in (path, store.leases(path.name))]
        store.clear(gone)
        removed.append(path.name)
    return replace(result, removed_versions=(*result.removed_versions, *removed))


def _used(store: DatasetVersions, path: Path, when: int, alive: Callable[[str], bool]) -> bool:
    """Return whether a version was used meanwhile, or has a lease."""
    leases = store.leases(path.name)
    try:
        if store.handed_out(path) != when:
            return True
        with folder_below(store.root, leases.relative_to(store.root)):
            return bool(folder_holders(leases, alive))
    except FileNotFoundError:
        return False
    except OSError:
        return True
