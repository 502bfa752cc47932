"""The target on disk: complete versions by digest, and `current`.

    <root>/versions/<digest12>/{…, _MANIFEST.jsonl, _SUCCESS}
    <root>/current -> versions/<digest12>
    <root>/.kfsync/{lock, building/<digest12>/, trash/}

A version is built under .kfsync and renamed to its place when it is whole and on disk, so no
reader sees half of one.
"""

import contextlib
import errno
import os
import stat
import time
from pathlib import Path

from kfp_ddp.base.errors import StorageError
from kfp_ddp.base.files import atomic_write, fsync
from kfp_ddp.components.data_sync import manifest, names
from kfp_ddp.components.data_sync.disk import (
    flush_filesystem,
    plain_folder,
    remove,
    unwritable,
    writing,
)


class Store:
    """A target folder, with the work area `.kfsync` below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / ".kfsync"
        self.versions = root / "versions"

    def version(self, digest: str) -> Path:
        """Where the version with this digest lives, whether it is there or not."""
        return self.versions / digest[:12]

    def complete(self, digest: str) -> bool:
        """Whether the version is there, whole, and of this digest and no other."""
        return success(self.version(digest)) == digest

    def current(self) -> Path | None:
        """The version that `current` points to, if it is whole."""
        try:
            target = os.readlink(self.root / "current")
        except OSError:
            return None
        path = self.versions / Path(target).name
        return path if Path(target).parent == Path("versions") and success(path) else None

    def before(self, dataset: str) -> Path | None:
        """What a new version of this dataset is compared with and takes unchanged files from.

        That is the dataset's newest version; `current`, whosever it is, where there is none.
        """
        current, own = self.current(), [path for _, path in self._versions_of(dataset)]
        return current if current in own or not own else own[0]

    def _versions_of(self, dataset: str) -> list[tuple[int, Path]]:
        """When each complete version of a dataset was handed out last, and the version."""
        found = []
        for path in self.versions.glob("*"):
            if success(path) and manifest.dataset(path) == dataset:
                with contextlib.suppress(FileNotFoundError):  # another sync has removed it
                    found.append(((path / manifest.SUCCESS).stat().st_mtime_ns, path))
        return sorted(found, reverse=True)

    def prepare(self, versions: bool = True) -> None:
        """Make the work area, and the folder of the versions if there are to be some.

        Raises:
            StorageError: no rights, or something else is in the way.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from error
        for path in (self.work, self.work / "building", self.work / "trash"):
            plain_folder(path)
        if versions:
            plain_folder(self.versions)
        if not os.access(self.work, os.W_OK | os.X_OK, effective_ids=True):
            raise unwritable(self.work, PermissionError(errno.EACCES, "Permission denied"))
        with writing(self.work):
            (self.work / names.PROBE).touch()

    def build_folder(self, digest: str) -> Path:
        """Where the version is built, whether that is there or not."""
        return self.work / "building" / digest[:12]

    def clear_builds(self, but: str = "") -> None:
        """Remove what removals and builds have left, but for the build of this digest."""
        for folder in (self.work / "building", self.work / "trash"):
            for entry in os.scandir(folder):
                if Path(entry.path) != self.build_folder(but):
                    remove(Path(entry.path))

    def publish(self, tree: Path, digest: str) -> None:
        """Mark the finished tree as complete and rename it to its version."""
        version = self.version(digest)
        flush_filesystem(tree)
        with atomic_write(tree / manifest.SUCCESS) as file:
            file.write(f"{digest}\n".encode())
            os.fchmod(file.fileno(), 0o644)
        fsync(tree)
        if version.is_symlink() or version.exists():  # damaged: it was not complete
            self.discard(version)
        tree.rename(version)
        fsync(self.versions)

    def flip(self, digest: str) -> None:
        """Point `current` at the version; needs no lock, whoever comes last is right."""
        target = f"versions/{digest[:12]}"
        link = self.root / "current"
        if link.is_symlink() and os.readlink(link) == target:
            return
        if link.is_dir() and not link.is_symlink():
            raise StorageError(f"{link} is a folder where a link must be; move it away")
        fresh = self.work / f"current-{os.urandom(8).hex()}"
        try:
            fresh.symlink_to(target)
            fresh.rename(link)
            fsync(self.root)
        except OSError as error:
            raise unwritable(link, error) from error

    def hand_out(self, digest: str) -> bool:
        """Note that a run gets this version now; False if it was removed meanwhile."""
        try:
            os.utime(self.version(digest) / manifest.SUCCESS)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # not ours to write: then it is not ours to remove either
        return True

    def collect(self, keep: int, hours: float, dataset: str, digest: str) -> list[str]:
        """Remove all but the `keep` versions of a dataset that were handed out last.

        Never the current one, nor the one with this digest, nor one that was handed out in the
        last so many hours: a run may read it for long, and from a mount that only reads it can
        leave no trace of that.
        """
        if keep <= 0:
            return []
        new = self.version(digest)
        old = [entry for entry in self._versions_of(dataset) if entry[1] != new]
        before = time.time_ns() - int(hours * 3600e9)
        removed = []
        for when, path in old[keep - 1 :]:
            if when < before and path != self.current():  # which may change meanwhile, see `flip`
                self.discard(path)
                removed.append(path.name)
        return removed

    def discard(self, path: Path) -> None:
        """Take a folder out of sight at once, then remove it."""
        gone = self.work / "trash" / f"{path.name}-{time.time_ns()}"
        path.rename(gone)
        remove(gone)


def leases_of(version: Path) -> Path | None:
    """Where those who use a version leave leases; None for a folder that is no version."""
    if version.parent.name != "versions":
        return None
    return version.parents[1] / ".kfsync" / "leases" / version.name


def success(path: Path) -> str:
    """The digest in a version's `_SUCCESS`; '' if it is not complete."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return ""
        return (path / manifest.SUCCESS).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
