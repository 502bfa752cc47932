"""The target on disk: complete versions by digest, and `current`.

    <root>/versions/<digest12>/{…, _MANIFEST.jsonl, _SUCCESS}
    <root>/current -> versions/<digest12>
    <root>/.kfsync/{lock, building/<digest12>/, trash/}

A version is built under .kfsync and renamed to its place when it is whole and on disk, so no
reader sees half of one.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.files import atomic_write, fsync
from kfp_ddp.components.data_sync import manifest, names
from kfp_ddp.components.data_sync.options import Watch
from kfp_ddp.components.data_sync.stage import plain_folder, unwritable, writing

MARGIN = 1.02
"""Room asked for beyond the bytes and files themselves, for folders and the journal."""


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
            InputError: no rights, or something else is in the way.
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

    @contextlib.contextmanager
    def lock(self, wait: float, what: str, watch: Watch) -> Iterator[bool]:
        """Hold the target against other runs; the kernel frees it if this one dies.

        Args:
            wait: The most seconds to wait for another run.
            what: What this one syncs, for those that wait for it.
            watch: Called with who holds it, when this one has to wait.

        Yields:
            Whether it had to wait.

        Raises:
            InputError: another run held it for more than `wait` seconds.
        """
        path = self.work / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            waited = self._acquire(descriptor, wait, watch)
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            _note(descriptor, f"{socket.gethostname()} syncs {what} since {since}")
            yield waited
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int, wait: float, watch: Watch) -> bool:
        """Whether it had to wait."""
        deadline = time.monotonic() + wait
        told = None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _noted(descriptor)
                if time.monotonic() >= deadline:
                    raise InputError(
                        f"another sync is writing {self.root} ({holder}) and did not end in "
                        f"{wait:.0f} s; wait for it, or give lock_wait more seconds"
                    ) from None
                if holder != told:
                    watch(f"waiting for another sync of {self.root}: {holder}", None, 0, 0)
                    told = holder
                time.sleep(0.2)
            except OSError as error:
                raise InputError(
                    f"{self.root} does not support locks ({error.strerror}); use a file system "
                    "with flock"
                ) from error
            else:
                return told is not None

    def preflight(self, size: int, files: int) -> None:
        """Refuse before the first byte what cannot fit.

        Raises:
            InputError: too few bytes or inodes are free.
        """
        there = next(path for path in (self.root, *self.root.parents) if path.is_dir())
        free = os.statvfs(there)
        have = free.f_bavail * free.f_frsize
        if size * MARGIN > have:
            raise InputError(
                f"{self.root} has {human(have)} free and {human(size)} are to come; free "
                "some, grow the disk or claim, or keep fewer versions (keep_versions, keep_hours)"
            )
        if free.f_files and files * MARGIN > free.f_favail:
            raise InputError(
                f"{self.root} has {free.f_favail} inodes free and {files} files are to come; use a "
                "file system with more inodes, or pack=tar"
            )

    def building_of(self, digest: str) -> Path:
        """Where the version would be built, whether that is there or not."""
        return self.work / "building" / digest[:12]

    def building(self, digest: str) -> Path:
        """Where the version is built; what other digests left there is removed."""
        mine = self.building_of(digest)
        for folder in (self.work / "building", self.work / "trash"):
            for entry in os.scandir(folder):
                if Path(entry.path) != mine:
                    remove(Path(entry.path))
        return mine

    def publish(self, tree: Path, digest: str) -> Path:
        """Mark the finished tree as complete and rename it to its place."""
        place = self.version(digest)
        sync_filesystem(tree)
        with atomic_write(tree / manifest.SUCCESS) as file:
            file.write(f"{digest}\n".encode())
            os.fchmod(file.fileno(), 0o644)
        fsync(tree)
        if place.is_symlink() or place.exists():  # damaged: it was not complete
            self.discard(place)
        tree.rename(place)
        fsync(self.versions)
        return place

    def flip(self, digest: str) -> None:
        """Point `current` at the version; needs no lock, whoever comes last is right."""
        target = f"versions/{digest[:12]}"
        link = self.root / "current"
        if link.is_symlink() and os.readlink(link) == target:
            return
        if link.is_dir() and not link.is_symlink():
            raise InputError(f"{link} is a folder where a link must be; move it away")
        fresh = self.work / f"current-{secrets.token_hex(8)}"
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


def _note(descriptor: int, holder: str) -> None:
    """Write who holds the lock, for those that wait; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode("utf-8", "replace"), 0)
        os.fsync(descriptor)  # who waits may be on another node


def _noted(descriptor: int) -> str:
    text = os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "it does not say which"


def success(path: Path) -> str:
    """The digest in a version's `_SUCCESS`; '' if it is not complete."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return ""
        return (path / manifest.SUCCESS).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def sync_filesystem(path: Path) -> None:
    """Flush the file system that holds the path: one call, however many files."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        os.sync()
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            code = ctypes.get_errno()
            raise unwritable(path, OSError(code, os.strerror(code)))
    finally:
        os.close(descriptor)


def human(size: float) -> str:
    """Bytes in words: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
