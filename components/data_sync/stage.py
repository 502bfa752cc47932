"""Where verified bodies land before they are published, and what is left of that after a kill."""

import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from kfp_ddp.components.data_sync.disk import checksum, plain_folder, unwritable, write_all
from kfp_ddp.components.data_sync.journal import Arrived, Journal
from kfp_ddp.components.data_sync.listing import Listing, folders_of

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READABLE = 0o444


class Stage(Protocol):
    """Where verified bodies go; called by many threads, once an object."""

    def put(self, index: int, data: bytes, crc: int) -> None:
        """Write a whole, verified body."""

    def begin(self, index: int) -> tuple[int, int]:
        """Open a place for a large body: a file descriptor, and where in it the body starts."""

    def finish(self, index: int, descriptor: int, crc: int) -> None:
        """The body at that place is whole and verified; closes the descriptor."""

    def drop(self, index: int, descriptor: int) -> None:
        """The body failed for good; closes the descriptor."""


class FileStage:
    """One file an object, below `<folder>/tree`.

    A verified file is noted in the journal, under the machine's start that it was written in;
    after a kill the next run keeps what is noted and still there, and reads it again first if
    that was another machine, or it was restarted since.
    """

    def __init__(self, folder: Path, listing: Listing) -> None:
        self.folder, self.tree, self._parts = folder, folder / "tree", folder / "parts"
        self.listing = listing
        self.mtimes = array("q", bytes(8 * len(listing)))
        self._prefix = f"{self.tree}/"
        self._journal = Journal(folder / "journal")

    def open(self) -> set[int]:
        """Make the folders and return the indices that an earlier run has already brought."""
        for path in (self.folder, self.tree, self._parts):
            plain_folder(path)
        for part in os.scandir(self._parts):
            os.unlink(part.path)
        done = set(self.recover())
        self._clear(done)
        for folder in sorted(self.folders()):
            plain_folder(self.tree / folder)
        self._journal.open()
        return done

    def close(self) -> None:
        """Flush and close the journal."""
        self._journal.close()

    def folders(self) -> set[str]:
        """Every folder that the listing needs, markers included."""
        return folders_of(self.listing.names)

    def inodes(self, indices: Collection[int]) -> int:
        """How many files and folders the objects need on the disk, at most."""
        return len(indices) + len(self.folders())

    def files(self, indices: Iterable[int] | None = None) -> list[int]:
        """Those of the indices, or of all, that are files and not folder markers."""
        chosen = range(len(self.listing)) if indices is None else indices
        return [i for i in chosen if not self.listing.names[i].endswith("/")]

    def path(self, index: int) -> Path:
        """Where the object's file is, in this stage."""
        return self.tree / self.listing.names[index]

    def put(self, index: int, data: bytes, crc: int) -> None:
        """Write a whole, verified body; see `Stage.put`."""
        path = self._prefix + self.listing.names[index]
        try:
            descriptor = os.open(path, _FLAGS, 0o644)
            try:
                if data and os.write(descriptor, data) != len(data):
                    write_all(descriptor, data, 0)
                self._seal(index, descriptor, crc)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(Path(path), error) from error

    def begin(self, index: int) -> tuple[int, int]:
        """Open a part file; see `Stage.begin`."""
        part = self._parts / str(index)
        try:
            part.unlink(missing_ok=True)
            return os.open(part, _FLAGS, 0o644), 0
        except OSError as error:
            raise unwritable(part, error) from error

    def finish(self, index: int, descriptor: int, crc: int) -> None:
        """Rename the part file to its name; see `Stage.finish`."""
        try:
            os.rename(self._parts / str(index), self.path(index))
            self._seal(index, descriptor, crc)
        except OSError as error:
            raise unwritable(self.path(index), error) from error
        finally:
            os.close(descriptor)

    def drop(self, index: int, descriptor: int) -> None:
        """Remove the part file; see `Stage.drop`."""
        os.close(descriptor)
        (self._parts / str(index)).unlink(missing_ok=True)

    def link(self, index: int, source: Path, mtime_ns: int, crc: int, read: bool) -> bool:
        """Take an unchanged file of the version before, by hard link or else by copy.

        False when it is not what the manifest says, and has to be downloaded. Its bytes are read
        if its mtime is another, and with `read` in any case.
        """
        path = self.path(index)
        try:
            found = os.lstat(source)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self.listing.sizes[index]:
                return False
            if (read or found.st_mtime_ns != mtime_ns) and checksum(source) != crc:
                return False
            mtime_ns = found.st_mtime_ns
            os.link(source, path, follow_symlinks=False)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError:
            # No hard links here (another file system, or too many): a checked copy instead.
            if not self._copy(index, source, crc):
                return False
            mtime_ns = os.lstat(path).st_mtime_ns
        self.mtimes[index] = mtime_ns
        self.listing.crcs[index] = crc
        return True

    def _copy(self, index: int, source: Path, crc: int) -> bool:
        path = self.path(index)
        import shutil  # most file systems link

        try:
            shutil.copyfile(source, path, follow_symlinks=False)
            os.chmod(path, 0o644)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise unwritable(path, error) from error
        if checksum(path) != crc:
            path.unlink()
            return False
        return True

    def _seal(self, index: int, descriptor: int, crc: int) -> None:
        """Fix the mode, and note the file's identity."""
        found = os.fstat(descriptor)
        if found.st_mode & _READABLE != _READABLE:  # the umask was strict
            os.fchmod(descriptor, 0o644)
        self.note(index, crc, found.st_mtime_ns, found.st_ino)

    def note(self, index: int, crc: int, mtime_ns: int, inode: int) -> None:
        """Write in the journal that this object has arrived."""
        self.mtimes[index] = mtime_ns
        name, size = self.listing.names[index], self.listing.sizes[index]
        self._journal.note(name, size, crc, mtime_ns, inode)

    def recover(self) -> Iterator[int]:
        """Indices whose file is noted in the journal and still what was noted."""
        names, sizes = self.listing.names, self.listing.sizes
        for file in self._journal.read():
            index = bisect_left(names, file.name)
            if index == len(names) or names[index] != file.name or file.size != sizes[index]:
                continue
            if not self.listing.tags and file.crc != self.listing.crcs[index]:
                continue
            if not self.intact(index, file):
                continue
            self.mtimes[index] = file.mtime_ns
            self.listing.crcs[index] = file.crc
            yield index

    def intact(self, index: int, noted: Arrived) -> bool:
        """Whether a file noted in the journal is still that file; read again if not `trusted`."""
        path = self.path(index)
        try:
            found = os.lstat(path)
        except OSError:
            return False
        identity = (noted.size, noted.mtime_ns, noted.inode)
        if (found.st_size, found.st_mtime_ns, found.st_ino) != identity:
            return False
        return stat.S_ISREG(found.st_mode) and (noted.trusted or checksum(path) == noted.crc)

    def kept(self, done: set[int]) -> set[str]:
        """Paths that a new start does not clear away."""
        return {self._prefix + self.listing.names[index] for index in done}

    def _clear(self, done: set[int]) -> None:
        """Remove every file that is not proven, and every link."""
        keep = self.kept(done)
        folders = [str(self.tree)]
        while folders:
            for entry in os.scandir(folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.path not in keep:
                    os.unlink(entry.path)
