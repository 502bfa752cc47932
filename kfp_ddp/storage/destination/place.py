"""What every place of results can do."""

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

from kfp_ddp.core.errors import InputError

Change = Callable[[bytes | None], bytes | None]
PATIENCE = 60.0
"""Seconds: over all tries of one request, and to wait for a lock."""
TRIES = 6
"""Of one request, where a client counts them."""
BLOCK = 1 << 20
SMALL = 4096
"""Bytes of a file that `update` changes."""
CHANGED = "was changed by another writer meanwhile: run the step again"


class Destination(ABC):
    """Files under relative names with forward slashes.

    All methods raise InputError for an invalid name, missing rights and a bucket that does not
    exist; UnavailableError for a store that does not respond; StorageError for a volume that is
    full or broken, and where another writer came first.
    """

    remote: ClassVar[bool] = False
    """Whether it is the same place on every machine, whatever is mounted there."""
    uri: str
    place: str
    """One text for every way to write this place, without a slash at its end."""

    @abstractmethod
    def prepare(self) -> None:
        """Try whether a file can be written here.

        Raises:
            InputError: the bucket does not exist, or the rights are missing.
            StorageError: see `Destination`.
        """

    @abstractmethod
    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy a file's content to `into`; False if there is none.

        Raises:
            InputError: it has more than `limit` bytes.
        """

    @abstractmethod
    def put(self, file: Path, name: str) -> bool:
        """Store a copy of `file`, verified; False if it was there already."""

    @abstractmethod
    def update(self, name: str, change: Change) -> None:
        """Replace a small file by what `change` makes of it, with no other writer in between.

        Args:
            name: The file.
            change: Given its content, or None if it is not there, says what it shall hold, or None
                to leave it. It is asked again where another writer came first.

        Raises:
            StorageError: other writers always came first, or there are no locks.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names that begin with `prefix`, and their sizes in bytes, in any order."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file, which need not be there."""

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a file, None if there is none; raises as `fetch` does."""
        content = io.BytesIO()
        return content.getvalue() if self.fetch(name, content, limit) else None


class Bounded:
    """A stream to write, which takes no more than `limit` bytes and keeps their crc32c."""

    def __init__(self, into: BinaryIO, limit: int, what: str) -> None:
        self.crc = 0
        self._into = into
        self._limit = limit
        self._what = what
        self._size = 0

    def write(self, block: bytes) -> None:
        """Pass a block on; raises InputError."""
        import google_crc32c

        self._size += len(block)
        if self._size > self._limit:
            raise InputError(
                f"{self._what} has more than {self._limit:,} bytes, so it is not what export "
                "writes: name another one"
            )
        self.crc = google_crc32c.extend(self.crc, block)
        self._into.write(block)

    def seek(self, start: int) -> None:
        """Begin again, as the client asks where a server sends all of it again."""
        self._into.seek(start)
        self._into.truncate()
        self._size = self.crc = 0


def held(blocks: Iterable[bytes], limit: int, peer: str) -> bytes:
    """All that a peer says at once, as a page of a listing, of at most `limit` bytes.

    Raises:
        InputError: it says more.
    """
    said = bytearray()
    for block in blocks:
        said += block
        if len(said) > limit:
            raise InputError(
                f"{peer} says more than {limit:,} bytes at once, which no page of a listing has: "
                "correct its address, or look at the server"
            )
    return bytes(said)


def sha256(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as opened:
        return sha256_of(opened)


def sha256_of(file: BinaryIO) -> str:
    """SHA-256 of what is still to be read of an open file, in hex."""
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()
