"""Many small files as a few tar archives, each member written in place as it arrives."""

import contextlib
import itertools
import os
from array import array
from collections.abc import Collection
from pathlib import Path

from kfp_ddp.core.files import open_below
from kfp_ddp.datasets.disk import has_content, write_all, writing
from kfp_ddp.datasets.stage import Arrived, FileStage
from kfp_ddp.storage.listing import Listing

SHARD_BYTES = 256 << 20
"""An archive ends with the member that passes this size."""
_BLOCK = 512
_LONG_NAME = 100
_LONG_SIZE = 8**11
"""Of a name and a file for which a header takes more than one block."""


class TarStage(FileStage):
    """Members by name in shard-00000.tar, …, each written at its offset, as sizes are known."""

    def __init__(
        self,
        folder: Path,
        listing: Listing,
        root: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        super().__init__(folder, listing, root)
        self._shards = array("I")
        self._starts = array("Q")
        self._sizes: list[int] = []
        position = shard_bytes
        for index, name in enumerate(listing.names):
            if position >= shard_bytes:
                self._sizes.append(0)
                position = 0
            size = listing.sizes[index]
            short = name.isascii() and len(name) < _LONG_NAME and size < _LONG_SIZE
            position += _BLOCK if short else len(self._header(index))
            self._shards.append(len(self._sizes) - 1)
            self._starts.append(position)
            position += -(-size // _BLOCK) * _BLOCK
            self._sizes[-1] = position
        self._descriptors: list[int] = []

    def open(self) -> set[int]:
        """Create the archives at their full size; see `FileStage.open`."""
        done = super().open()
        with writing(self.tree), self.folders.at("") as tree:
            for shard, size in enumerate(self._sizes):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(_shard(shard), flags, 0o644, dir_fd=tree)
                self._descriptors.append(descriptor)
                os.ftruncate(descriptor, size + 2 * _BLOCK)  # two empty blocks end an archive
                os.fchmod(descriptor, 0o644)
        for index, name in enumerate(self.listing.names):
            if name.endswith("/"):
                self._write_header(index)
        return done

    def close(self) -> None:
        """Close the archives and the journal."""
        super().close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def needed(self) -> set[str]:
        """Return no folders: archives need none."""
        return set()

    def inodes(self, indices: Collection[int]) -> int:
        """Return the most archives that the objects need."""
        return min(len(indices), len(self._sizes))

    def member_offset(self, index: int) -> tuple[str, int]:
        """Return the name of the archive, and the offset of the object's bytes in it."""
        return _shard(self._shards[index]), self._starts[index]

    def put(self, index: int, data: bytes, crc: int) -> None:
        """Write a complete, verified body."""
        descriptor, start = self.begin(index)
        with writing(self.path(index)):
            write_all(descriptor, data, start)
        self.finish(index, descriptor, crc)

    def begin(self, index: int) -> tuple[int, int]:
        """Return the archive and the offset of the body."""
        return self._descriptors[self._shards[index]], self._starts[index]

    def finish(self, index: int, descriptor: int, crc: int) -> None:
        """Write the member's header."""
        with writing(self.path(index)):
            self._write_header(index)
            self.note(index, crc, 0, os.fstat(descriptor).st_ino)

    def drop(self, index: int, descriptor: int) -> None:
        """Keep the archive open for its other members."""

    def intact(self, index: int, noted: Arrived) -> bool:
        """Return whether a member of the journal is unchanged; reads it if it is not `trusted`."""
        shard, start = self.member_offset(index)
        with contextlib.suppress(OSError), self.folders.at("") as tree:
            if os.stat(shard, dir_fd=tree, follow_symlinks=False).st_ino == noted.inode:
                return noted.trusted or has_content(shard, tree, "", noted.crc, start, noted.size)
        return False

    def path(self, index: int) -> Path:
        """Return the path of the object's archive in this stage."""
        return self.tree / self.member_offset(index)[0]

    def retained(self, done: set[int]) -> set[str]:
        """Return the archives that `open` does not remove."""
        return {self.member_offset(index)[0] for index in done}

    def invalid_members(self, version: Path) -> set[int]:
        """Return the members of a version with an invalid header or archive end."""
        bad = set[int]()
        for shard, members in itertools.groupby(range(len(self._shards)), self._shards.__getitem__):
            try:
                file = open_below(version, _shard(shard))
            except OSError:
                bad.update(members)
                continue
            with file:
                for index in members:
                    header = self._header(index)
                    content = os.pread(
                        file.fileno(), len(header), self._starts[index] - len(header)
                    )
                    if content != header:
                        bad.add(index)
                if os.pread(file.fileno(), 3 * _BLOCK, self._sizes[shard]) != bytes(2 * _BLOCK):
                    bad.add(index)
        return bad

    def _header(self, index: int) -> bytes:
        import tarfile  # only archives need it

        name = self.listing.names[index]
        info = tarfile.TarInfo(name.rstrip("/"))
        info.size = self.listing.sizes[index]
        info.mode = 0o644
        if name.endswith("/"):
            info.type = tarfile.DIRTYPE
            info.mode = 0o755
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

    def _write_header(self, index: int) -> None:
        header = self._header(index)
        descriptor = self._descriptors[self._shards[index]]
        write_all(descriptor, header, self._starts[index] - len(header))


def _shard(number: int) -> str:
    return f"shard-{number:05}.tar"
