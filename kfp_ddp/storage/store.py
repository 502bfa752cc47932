"""What every store can do: list, read, write, replace and delete files under relative names."""

import asyncio
import contextlib
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, UnavailableError, writing
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.source import (
    Changed,
    Damaged,
    Entry,
    Reader,
    Retry,
    Source,
    bucket_and_prefix,
    reading_pages,
)

R = TypeVar("R")
Change = Callable[[bytes | None], bytes | None]
Page = list[tuple[str, int]]
"""Names and sizes in bytes."""
PATIENCE = 60.0
"""Seconds for all attempts of one request, and to wait for a lock."""
TRIES = 6
"""Attempts of one request, for clients that count them."""
READ_TIMEOUT = 300.0
"""Read timeout in seconds."""
BLOCK = 1 << 20
SMALL = 4096
"""Maximum bytes of a file that `update` changes."""
CONFLICT = "was changed by another writer: run the step again"
_IDLE_SECONDS = 5.0
"""How long a connection stays open for the next object."""
_UPDATES = 20
"""Attempts to change an object before another writer does."""


class Store(ABC):
    """Files under relative names with forward slashes.

    Methods raise InputError for a wrong name or missing rights, UnavailableError for no response,
    and StorageError for damage, a full volume, and where another writer came first.
    """

    remote: ClassVar[bool] = False
    """Whether the address means the same on every machine."""
    uri: str
    place: str
    """The same text for all spellings of this address, without a slash at its end."""

    @abstractmethod
    def prepare(self) -> None:
        """Check that a file can be written, before there is anything to write."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the names with `prefix` and their bytes, in any order; pages come as needed."""

    def entries(self, prefix: str) -> Iterator[str]:
        """Yield every name that starts with `prefix`, also those that `list` leaves out."""
        return (name for name, _ in self.list(prefix))

    def has_files(self, prefix: str = "") -> bool:
        """Return whether any name starts with `prefix`; asks the store for one name only."""
        return any(True for _ in self.list(prefix))

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file of exactly this name."""

    @abstractmethod
    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy a file to `into`, False if it is missing; raise InputError above `limit` bytes."""

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a file, None if it does not exist; see `fetch`."""
        content = io.BytesIO()
        return content.getvalue() if self.fetch(name, content, limit) else None

    def put(self, file: Path, name: str) -> bool:
        """Store a verified copy of `file`; False if the same content is already there."""
        with file.open("rb") as content:
            return self._put(content, name)

    def write(self, name: str, content: bytes) -> bool:
        """Store `content`, verified; False if the same content is already there."""
        return self._put(io.BytesIO(content), name)

    @abstractmethod
    def _put(self, content: BinaryIO, name: str) -> bool:
        """Store a verified copy of an open file."""

    @abstractmethod
    def update(self, name: str, change: Change) -> None:
        """Replace a small file without losing the change of another writer.

        `change` gets the content, None for none, and returns the new one, None to leave it; it is
        called again where another writer came first.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or an empty folder of `entries`, which may be missing."""


class ConflictError(Exception):
    """The condition of a request is not met: another writer changed the object."""


class ObjectState(NamedTuple):
    """What a store reports of an object without its content."""

    size: int
    digest: str
    tag: str
    """What a condition of a request identifies this content by."""


class Bucket(Store):
    """A prefix of a bucket. A subclass implements requests for one object and for pages."""

    scheme: ClassVar[str]
    may_ignore_conditions: ClassVar[bool] = False
    """Whether there are servers of this protocol that ignore conditions of a write."""
    remote = True

    def __init__(self, uri: str) -> None:
        self.name, prefix = bucket_and_prefix(uri)
        self.prefix = prefix.rstrip("/")
        self.root = f"{self.scheme}://{self.name}"
        self.uri = f"{self.root}/{self.prefix}".rstrip("/")
        self.place = self.uri
        self._idle = defaultdict[asyncio.AbstractEventLoop, list[Reader]](list)

    def prepare(self) -> None:
        """Create an object and delete it; where conditions may be ignored, create it twice."""
        # The name is fixed, as a kill leaves it; where another deletes it, a new one decides.
        for name in (".probe", f".probe-{os.urandom(8).hex()}"):
            self._create(name)
            ignored = self.may_ignore_conditions and self._create(name)
            with contextlib.suppress(KfpDdpError):  # the right to delete is not needed
                self.delete(name)
            if not ignored:
                return
        raise InputError(
            f"{self.root} overwrites an object despite If-None-Match: *, so two runs could "
            "lose each other's champion: use a store that supports conditional writes"
        )

    def _create(self, name: str) -> bool:
        """Create an empty object; return False if it exists."""

        def request() -> bool:
            try:
                self._store(name, io.BytesIO(), 0, self._digest(io.BytesIO()), "")
            except ConflictError:
                return False
            return True

        return self._call("write", request)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Request a page when the page before has been consumed; see `Store.list`."""
        for page in self._listing(prefix, 0):
            yield from page

    def has_files(self, prefix: str = "") -> bool:
        """Request pages of one name; see `Store.has_files`."""
        return any(self._listing(prefix, 1))

    def exists(self, name: str) -> bool:
        """Request the object's properties; see `Store.exists`."""
        return self._call("read", lambda: self._stat(name)) is not None

    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Download the object as it is stored, verified; see `Store.fetch`."""
        for _ in range(_UPDATES):
            seen = self._call("read", lambda: self._stat(name))
            if seen is None:
                self._check_bucket()
                return False
            with contextlib.suppress(Changed):
                event_loop.run(self._download(self._entry(name, seen), into, limit))
                return True
        raise StorageError(f"{self.uri}/{name} {CONFLICT}")

    def _put(self, content: BinaryIO, name: str) -> bool:
        """Upload on the condition that the object is the one that was compared."""
        digest = self._digest(content)
        size = content.tell()

        def same(seen: ObjectState | None) -> bool:
            return seen is not None and (seen.size, seen.digest) == (size, digest)

        def request() -> bool:
            seen = self._stat(name)
            if same(seen):
                return False
            content.seek(0)
            try:
                self._store(name, content, size, digest, seen.tag if seen else "")
            except ConflictError:
                # A write whose response was lost is sent again, and meets its own object.
                if not same(self._stat(name)):
                    raise
            return True

        return self._call("write", request)

    def update(self, name: str, change: Change) -> None:
        """Write on the condition that the object is the one that was read."""

        def attempt() -> bool:
            """Return False if another writer came first."""
            seen = self._stat(name)
            before = io.BytesIO()
            try:
                if seen is not None:
                    event_loop.run(self._download(self._entry(name, seen), before, SMALL))
                content = change(None if seen is None else before.getvalue())
                if content is not None:
                    digest = self._digest(io.BytesIO(content))
                    tag = seen.tag if seen else ""
                    self._store(name, io.BytesIO(content), len(content), digest, tag)
            except (Changed, ConflictError):
                return False
            return True

        if not any(self._call("write", attempt) for _ in range(_UPDATES)):
            raise StorageError(f"{self.uri}/{name} {CONFLICT}")

    def _listing(self, prefix: str, size: int) -> Iterator[Page]:
        """Yield pages of at most `size` names, 0 for as many as the store likes."""
        pages = self._call("list", lambda: self._pages(prefix, size))

        def request() -> Page | None:
            with reading_pages(self.uri):
                return next(pages, None)

        while (page := self._call("list", request)) is not None:
            yield page

    async def _download(self, entry: Entry, into: BinaryIO, limit: int) -> None:
        """Replace the content of `into` by the object; raise Changed if it is another one now."""
        loop = asyncio.get_running_loop()
        what = f"{self.uri}/{entry.name}"
        idle = self._idle[loop]  # a forked process has another loop
        reader = idle.pop() if idle else self._source.reader(None)

        async def attempt() -> None:
            into.seek(0)
            into.truncate()
            try:
                await reader.pour(entry, 0, bounded(into, limit, what))
                if into.tell() != entry.size:
                    raise Damaged(f"{into.tell()} bytes instead of {entry.size}")
            except BaseException:
                reader.close()
                raise

        await Retry(TRIES, pause=3.0).call("read", what, attempt)  # half a minute on average
        idle.append(reader)
        loop.call_later(_IDLE_SECONDS, _close, idle)

    def _check_bucket(self) -> None:
        """Raise InputError if the bucket is missing, and not only this object in it."""
        try:
            self.has_files()
        except NoBucketError:
            raise
        except InputError:
            return

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _entry(self, name: str, seen: ObjectState) -> Entry:
        return Entry(name, 0, seen.tag.strip('"'), seen.size)

    def _digest(self, content: BinaryIO) -> str:
        """Return the digest of an open file, as in `ObjectState`; the file is read to its end."""
        return sha256_of(content)

    def _call(self, verb: str, request: Callable[[], R]) -> R:
        """Send a request that may list, read, write or delete, and translate its errors."""
        try:
            return request()
        except ConflictError:
            raise StorageError(f"{self.uri} {CONFLICT}") from None
        except KfpDdpError:
            raise
        except Exception as error:
            problem = self._problem(verb, error)
            if problem is None:
                raise
            raise problem from None

    @property
    @abstractmethod
    def _source(self) -> Source:
        """The same prefix as a source, whose reader downloads objects."""

    @abstractmethod
    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        """Yield pages as `_listing` does; raises errors of the client."""

    @abstractmethod
    def _stat(self, name: str) -> ObjectState | None:
        """Return what the store reports of an object, None for a missing one."""

    @abstractmethod
    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Write a verified object in place of that of `tag`, '' for a new one; ConflictError."""

    @abstractmethod
    def _problem(self, verb: str, error: Exception) -> KfpDdpError | None:
        """Return the error to raise for one of the client, None for any other."""


def _close(readers: list[Reader]) -> None:
    while readers:
        readers.pop().close()


def bounded(into: BinaryIO, limit: int, what: str) -> Callable[[bytes], None]:
    """Return a function that writes at most `limit` bytes to a stream; InputError, StorageError."""
    size = 0

    def write(block: bytes) -> None:
        nonlocal size
        size += len(block)
        if size > limit:
            raise InputError(
                f"{what} has more than {limit:,} bytes, more than such a file may have: "
                "name another one"
            )
        with writing("the copy of " + what):
            into.write(block)

    return write


def read_bounded(blocks: Iterable[bytes], limit: int, peer: str) -> bytes:
    """Return a response such as a page of a listing; raise InputError above `limit` bytes."""
    body = bytearray()
    for block in blocks:
        body += block
        if len(body) > limit:
            raise InputError(
                f"{peer} sends more than {limit:,} bytes in one response, which no page of a "
                "listing has: correct its address, or look at the server"
            )
    return bytes(body)


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256, in hex, of an open file from its position to its end."""
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


class NoBucketError(InputError):
    """The bucket does not exist."""

    def __init__(self, root: str) -> None:
        super().__init__(f"the bucket {root} does not exist: create it or correct its name")


def no_permission(verb: str, uri: str, reason: str, advice: str) -> InputError:
    """Return the error for credentials without the right to `verb`."""
    return InputError(f"no permission to {verb} {uri}: {reason}; {advice}")


def failed(verb: str, uri: str, reason: str, advice: str, *, temporary: bool) -> KfpDdpError:
    """Return the error for a request that failed otherwise; UnavailableError if temporary."""
    kind = UnavailableError if temporary else InputError
    return kind(f"cannot {verb} {uri}: {reason}; {advice}")
