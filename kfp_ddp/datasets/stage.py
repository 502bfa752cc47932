"""Stage of verified files before they are published, and the journal to resume from it."""

import contextlib
import fcntl
import json
import os
import stat
import threading
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from kfp_ddp.core.files import Folders, closing_descriptor, folder_below, open_below, open_plain
from kfp_ddp.core.text import from_json
from kfp_ddp.datasets.disk import (
    has_content,
    plain_folder,
    remove,
    write_all,
    writing,
)
from kfp_ddp.storage.listing import Listing, content_hash, expected_digest, folders_of

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READABLE = 0o444
"""Mode of the files: versions share them, so a program that writes in place would change all."""
_WRITABLE = 0o222
FICLONE = 0x40049409
"""ioctl of Linux, from linux/fs.h: Btrfs, XFS, ZFS and others share blocks until one is written."""
_BATCH = 64
_CHUNK = 1 << 20
_KINDS = [str, int, int, int, int]


class Arrived(NamedTuple):
    """A verified file in the journal; `trusted` if it was written since the last boot."""

    name: str
    size: int
    crc: int
    mtime_ns: int
    inode: int
    trusted: bool


class Journal:
    """A line for each verified file, after the boot id: those of another boot are read again."""

    def __init__(self, root: Path, name: Path) -> None:
        self._root = root
        self._name = name
        self._descriptor = -1
        self._lines = list[str]()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the journal to append; raise OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with folder_below(self._root, self._name.parent) as folder:
            self._descriptor = os.open(self._name.name, flags, 0o644, dir_fd=folder)
        # The line feed ends a line that a kill truncated.
        os.write(self._descriptor, f"\n{json.dumps({'boot': _boot()})}\n".encode())

    def close(self) -> None:
        """Flush and close it."""
        if self._descriptor >= 0:
            with self._lock:
                self._flush()
            os.close(self._descriptor)
            self._descriptor = -1

    def note(self, name: str, size: int, crc: int, mtime_ns: int, inode: int) -> None:
        """Add a downloaded file; safe to call from any thread."""
        line = f"[{json.dumps(name)}, {size}, {crc}, {mtime_ns}, {inode}]"
        with self._lock:
            self._lines.append(line)
            if len(self._lines) >= _BATCH:
                self._flush()

    def read(self) -> Iterator[Arrived]:
        """Yield the files in the journal; none if it is missing."""
        try:
            file = open_below(self._root, self._name)
        except OSError:
            return
        trusted = False
        with file:
            for text in file:
                try:
                    line = from_json(text.decode("utf-8", "surrogateescape"))
                except ValueError:
                    continue  # the kill came in the middle of the line
                if isinstance(line, dict):
                    trusted = bool(_boot()) and line.get("boot") == _boot()
                elif isinstance(line, list) and list(map(type, line)) == _KINDS:
                    name, size, crc, mtime_ns, inode = line
                    yield Arrived(name, size, crc, mtime_ns, inode, trusted)

    def _flush(self) -> None:
        if self._lines:
            text = "\n".join(self._lines) + "\n"
            self._lines.clear()
            os.write(self._descriptor, text.encode("utf-8", "surrogateescape"))


def _boot() -> str:
    """Return an id of the current boot of the machine; '' if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class FileStage:
    """One file per object, below `<folder>/tree`, and a journal of the verified ones."""

    def __init__(self, folder: Path, listing: Listing, root: Path | None = None) -> None:
        """Create a stage in `folder`; no link is followed below `root` (default: its parent)."""
        self.folder = folder
        self.tree = folder / "tree"
        self.listing = listing
        self.mtimes = array("q", bytes(8 * len(listing)))
        self.root = root or folder.parent
        below = folder.relative_to(self.root)
        self.folders = Folders(self.root, below / "tree")
        self._parts = Folders(self.root, below / "parts")
        self._journal = Journal(self.root, below / "journal")

    def open(self) -> set[int]:
        """Create the folders; return the indices that an earlier sync downloaded."""
        for path in (self.tree, self.folder / "parts"):
            plain_folder(self.root, path)
        with self._parts.at("") as parts:
            for part in list(os.scandir(parts)):
                remove(part.name, parts)
        done = set(self.recover())
        self._clear(done)
        for folder in sorted(self.needed()):
            plain_folder(self.root, self.tree / folder)
        with writing(self.folder / "journal"):
            self._journal.open()
        return done

    def close(self) -> None:
        """Flush and close the journal, and close the folders."""
        self._journal.close()
        self.folders.close()
        self._parts.close()

    def needed(self) -> set[str]:
        """Return every folder that the listing needs, markers included."""
        return folders_of(self.listing.names)

    def inodes(self, indices: Collection[int]) -> int:
        """Return the most files and folders that the objects need on the disk."""
        return len(indices) + len(self.needed())

    def files(self, indices: Iterable[int] | None = None) -> list[int]:
        """Return the indices, or all, without those of folder markers."""
        chosen = range(len(self.listing)) if indices is None else indices
        return [index for index in chosen if not self.listing.names[index].endswith("/")]

    def path(self, index: int) -> Path:
        """Return the path of the object's file in this stage."""
        return self.tree / self.listing.names[index]

    def put(self, index: int, data: bytes, crc: int) -> None:
        """Write a complete, verified body; safe to call from any thread, as are the next three."""
        within, _, name = self.listing.names[index].rpartition("/")
        with writing(self.path(index)), self.folders.at(within) as folder:
            descriptor = os.open(name, _FLAGS, _READABLE, dir_fd=folder)
            with closing_descriptor(descriptor):
                try:
                    if data and os.write(descriptor, data) != len(data):
                        write_all(descriptor, data, 0)
                    self._seal(index, descriptor, crc)
                except BaseException:
                    os.unlink(name, dir_fd=folder)
                    raise

    def clone(self, index: int, source: int) -> bool:
        """Share the blocks of an open file, and verify them; return whether that was possible."""
        within, _, name = self.listing.names[index].rpartition("/")
        crc = self.listing.crcs[index]
        with self.folders.at(within) as folder:
            descriptor = os.open(name, _FLAGS, _READABLE, dir_fd=folder)
            try:
                fcntl.ioctl(descriptor, FICLONE, source)
                good = has_content(name, folder, self.listing.token(index), crc)
            except OSError:  # another file system, or one that cannot share
                good = False
            if good:
                self._seal(index, descriptor, crc)
            else:
                os.unlink(name, dir_fd=folder)
            os.close(descriptor)
        return good

    def begin(self, index: int) -> tuple[int, int]:
        """Open a file for a large body; return its descriptor and the offset of the body in it."""
        with writing(self.folder / "parts" / str(index)), self._parts.at("") as parts:
            remove(str(index), parts)
            return os.open(str(index), _FLAGS, _READABLE, dir_fd=parts), 0

    def finish(self, index: int, descriptor: int, crc: int) -> None:
        """Publish a verified large body in the stage; closes the descriptor."""
        within, _, name = self.listing.names[index].rpartition("/")
        with closing_descriptor(descriptor), writing(self.path(index)):
            with self._parts.at("") as parts, self.folders.at(within) as folder:
                os.rename(str(index), name, src_dir_fd=parts, dst_dir_fd=folder)
            self._seal(index, descriptor, crc)

    def drop(self, index: int, descriptor: int) -> None:
        """Discard a large body after an error; closes the descriptor."""
        os.close(descriptor)
        with self._parts.at("") as parts:
            remove(str(index), parts)

    def link(self, index: int, before: Folders, mtime_ns: int, crc: int, read: bool) -> bool:
        """Link an unchanged file of the version before, verified; False if it cannot be linked."""
        within, _, name = self.listing.names[index].rpartition("/")
        token = self.listing.token(index)
        try:
            with before.at(within) as source, self.folders.at(within) as folder:
                status = os.stat(name, dir_fd=source, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) or status.st_size != self.listing.sizes[index]:
                    return False
                trusted = status.st_mtime_ns == mtime_ns and not read
                if not trusted and not has_content(name, source, token, crc):
                    return False
                os.link(name, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
                if status.st_mode & _WRITABLE:  # by fsGroup, or an earlier release
                    with contextlib.suppress(OSError), open(open_plain(name, folder)) as file:
                        os.fchmod(file.fileno(), _READABLE)
        except OSError:  # also on a file system without hard links, or with too many of a file
            return False
        self.mtimes[index] = status.st_mtime_ns
        self.listing.crcs[index] = crc
        return True

    def copy(self, index: int, before: Path, name: str, offset: int, crc: int) -> bool:
        """Copy a file from the version before, or an archive of it; False if its bytes differ."""
        size = self.listing.sizes[index]
        token = self.listing.token(index)
        state = content_hash(token)
        computed = 0
        position = 0
        try:
            source = open_below(before, name)
        except OSError:
            return False
        descriptor, start = self.begin(index)
        with writing(self.path(index)), source as file:
            file.seek(offset)
            while position < size and (data := file.read(min(_CHUNK, size - position))):
                computed = google_crc32c.extend(computed, data)
                state.update(data)
                write_all(descriptor, data, start + position)
                position += len(data)
        same = position == size and computed == crc
        if not same or state.digest() != expected_digest(token, crc):
            self.drop(index, descriptor)
            return False
        self.listing.crcs[index] = crc
        self.finish(index, descriptor, crc)
        return True

    def _seal(self, index: int, descriptor: int, crc: int) -> None:
        """Fix the mode, and write the file to the journal."""
        status = os.fstat(descriptor)
        if status.st_mode & _READABLE != _READABLE:  # the umask was strict
            os.fchmod(descriptor, _READABLE)
        self.note(index, crc, status.st_mtime_ns, status.st_ino)

    def note(self, index: int, crc: int, mtime_ns: int, inode: int) -> None:
        """Add the object to the journal."""
        self.mtimes[index] = mtime_ns
        name = self.listing.names[index]
        size = self.listing.sizes[index]
        self._journal.note(name, size, crc, mtime_ns, inode)

    def recover(self) -> Iterator[int]:
        """Yield the indices of files that still match the journal."""
        names = self.listing.names
        sizes = self.listing.sizes
        for file in self._journal.read():
            index = bisect_left(names, file.name)
            same = index < len(names) and (names[index], sizes[index]) == (file.name, file.size)
            known = same and (not self.listing.lists_crc or file.crc == self.listing.crcs[index])
            if known and self.intact(index, file):
                self.mtimes[index] = file.mtime_ns
                self.listing.crcs[index] = file.crc
                yield index

    def intact(self, index: int, noted: Arrived) -> bool:
        """Return whether a file of the journal is unchanged; reads it if it is not `trusted`."""
        within, _, name = self.listing.names[index].rpartition("/")
        with contextlib.suppress(OSError), self.folders.at(within) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            seen = (status.st_size, status.st_mtime_ns, status.st_ino)
            if stat.S_ISREG(status.st_mode) and seen == (noted.size, noted.mtime_ns, noted.inode):
                return noted.trusted or has_content(name, folder, "", noted.crc)
        return False

    def retained(self, done: set[int]) -> set[str]:
        """Return the names in the tree that `open` does not remove."""
        return {self.listing.names[index] for index in done}

    def _clear(self, done: set[int]) -> None:
        """Remove every file that is not verified, and every link."""
        keep = self.retained(done)
        within = [""]
        while within:
            name = within.pop()
            with self.folders.at(name) as folder:
                for entry in list(os.scandir(folder)):
                    path = f"{name}/{entry.name}" if name else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        within.append(path)
                    elif path not in keep:
                        os.unlink(entry.name, dir_fd=folder)
