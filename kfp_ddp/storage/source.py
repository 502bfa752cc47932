"""What every source can do: a complete listing, and many verified, pinned downloads at once."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage.http.origin import display
from kfp_ddp.storage.listing import Filter, Listing

R = TypeVar("R")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of code that reads a response of a server."""
MAX_OBJECTS = 1 << 25
"""Of one source: a listing of this size takes 5 GB of memory."""
MAX_EMPTY_PAGES = 1000
"""Of a listing, where deleted objects leave some."""
_MAX_SIZE = 1 << 63


class Entry(NamedTuple):
    """One object of a listing: its name below the source's prefix, what pins it, its bytes."""

    name: str
    generation: int
    tag: str
    size: int


@dataclass(frozen=True)
class SourceOptions:
    """How to open a source."""

    timeout: float = 30.0
    """Read timeout in seconds."""
    symlinks: str = "error"
    """Of a folder: error, skip or follow."""
    ahead: int = 0
    """Number of connections to open during the listing, for the transfer after it."""
    select: Filter | None = None
    """Of a folder only these files are looked at."""
    requester_pays: str = ""
    """Who pays where a bucket does not: a project for gs, any text for s3."""
    label_column: str = ""
    """Of a dataset of the hub in Parquet files; see `SyncOptions`."""
    copies: str = ""
    """A folder for copies of its pictures while the source is in use; '' for averages as sizes."""


class Transient(Exception):  # noqa: N818 (it is a state, and is always handled)
    """The download failed; a retry may succeed."""


class Damaged(Transient):
    """The content has not its checksum, size or form: if that lasts, a later run is no help."""


class Changed(Exception):  # noqa: N818
    """The object is no longer the one that was listed."""


def is_temporary(status: int | None) -> bool:
    """Return whether an HTTP status reports a fault that a retry may not meet again."""
    if status is None:
        return False
    return status in (408, 429) or (status >= 500 and status != 501)


@dataclass
class Retry:
    """Number of attempts, and the first and the longest pause in seconds."""

    attempts: int = 8
    pause: float = 0.25
    longest: float = 20.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait before this attempt, from 1 on: exponential back-off with full jitter."""
        import random  # most syncs wait for nothing

        return random.uniform(0, min(self.longest, self.pause * 2 ** (attempt - 1)))

    async def call(self, verb: str, what: str, attempt: Callable[[], Awaitable[R]]) -> R:
        """Return what `attempt` does, repeated after Transient and OSError; raise StorageError."""
        for number in range(self.attempts):
            await asyncio.sleep(self.delay(number) if number else 0)
            try:
                return await attempt()
            except Transient as error:
                problem: Exception | str = error
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        raise self.exhausted(verb, what, problem)

    def exhausted(self, verb: str, what: str, problem: object) -> StorageError:
        """Return the error for the last attempt to read or list; not retryable where Damaged."""
        text = f"cannot {verb} {what}: {problem}, {self.attempts} times"
        if isinstance(problem, Damaged):
            return StorageError(f"{text}; it is damaged: store it again, or look at its server")
        return UnavailableError(f"{text}; try again later")


class Reader(Protocol):
    """Reads the objects of a source for one worker of a transfer, one after the other."""

    def prefetch(self, entry: Entry) -> None:
        """Send the request for the next object early, where the protocol supports that."""

    async def read(self, entry: Entry) -> bytes:
        """Return a small object; raise Transient for a retry, Changed, and KfpDdpError."""

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """Pass the bytes from `offset` on to `take`, in a thread; raise as `read` and `take`."""

    def close(self) -> None:
        """Close the connection; the next object opens another."""


class Source(Protocol):
    """A prefix of a bucket, a dataset of the hub, a manifest on a web server, or a folder."""

    url: str
    """As it is stored and printed: without secrets, see `http.origin.display`."""
    resumes: bool
    """Whether a download can be resumed at an offset."""
    max_workers: int
    """Maximum connections that the server accepts; known after `listing`."""

    @property
    def exposed(self) -> bool:
        """Whether it is read over plain http:// from another machine."""

    def listing(self) -> Listing:
        """Return every object below the prefix; InputError, also for none, UnavailableError."""

    def reader(self, threads: Executor | None) -> Reader:
        """Return a reader for one worker; blocking calls run in `threads`."""


def is_text(name: str) -> bool:
    """Return whether a name can be written in UTF-8."""
    return name.isascii() or name.encode("utf-8", "replace").decode() == name


class Pages:
    """Checks the pages of one listing, of any store."""

    def __init__(self, url: str, root: str, below: str = "") -> None:
        """All keys must begin with `root` and `below`; names are without `root`."""
        self._url = url
        self._start = len(root)
        self._prefix = root + below
        self._tokens = set[int]()
        self._pages = self._objects = 0

    def row(self, key: Any, size: Any) -> tuple[str, int]:
        """Return the name and the bytes of an object; raise ValueError."""
        if not isinstance(key, str) or not key.startswith(self._prefix):
            raise ValueError(f"{key!r} does not begin with {self._prefix!r}")
        if type(size) is not int or not 0 <= size < _MAX_SIZE:
            raise ValueError(f"{key!r} has {size!r} bytes")
        self._objects += 1
        return key[self._start :], size

    def following(self, token: str | None, more: bool | None = None) -> str:
        """Return the token of the next page, '' after the last; raise ValueError, InputError."""
        more = bool(token) if more is None else more
        if not more:
            return ""
        if not token or hash(token) in self._tokens:
            raise ValueError(f"page {self._pages + 1:,} has no new token for the next")
        self._tokens.add(hash(token))
        self._pages += 1
        if self._objects > MAX_OBJECTS or self._pages > MAX_EMPTY_PAGES + self._objects:
            raise InputError(
                f"the listing of {self._url} does not end: {self._objects:,} objects in "
                f"{self._pages:,} pages; the maximum is {MAX_OBJECTS:,} objects: sync parts of it, "
                "or look at its server"
            )
        return token


@contextlib.contextmanager
def reading_pages(url: str) -> Iterator[None]:
    """Raise InputError for an error of the block that reads a listing."""
    try:
        yield
    except KfpDdpError:
        raise
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(
            f"cannot list {url}: the response is invalid ({reason}); correct its address, or look "
            "at the server"
        ) from error


def listing_by_etag(url: str, prefix: str, pages: Iterable[list[tuple[str, int, str]]]) -> Listing:
    """Return the listing of a store whose ETags identify the content; raise InputError."""
    listing = Listing(lists_crc=False)
    with reading_pages(url):
        for name, size, etag in itertools.chain.from_iterable(pages):
            if not (name or size):  # the marker of the prefix itself
                continue
            tag = (etag or "").strip('"')
            if not tag or not tag.isprintable():
                raise InputError(
                    f"{url} lists {name!r} without an ETag, which identifies its content: upload "
                    "it again through the store's own API"
                )
            listing.add(name, size, 0, tag=tag)
    check_not_empty(url, prefix, listing)
    return listing


def check_not_empty(url: str, prefix: str, listing: Listing) -> None:
    """Refuse an empty listing of a prefix; raise InputError."""
    if not listing:
        raise InputError(
            f"{url} holds no objects below {prefix or '/'!r}; "
            "check the prefix and that the upload is done"
        )


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Split gs://bucket/prefix into its bucket and 'prefix/', or ''; raise InputError."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise InputError(f"{display(url)!r} names no bucket: write {scheme}://bucket/prefix")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""
