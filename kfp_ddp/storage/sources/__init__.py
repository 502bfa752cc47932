"""Where data comes from: one interface, one rule of integrity.

Every object has a size and a content token in the listing, a download is pinned to what was
listed, and its whole body is checked before the file counts.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.origin import display
from kfp_ddp.storage.listing import Filter, Listing

MAX_OBJECTS = 1 << 25
"""Of one source: a listing of so many takes 5 GB of memory."""
MAX_EMPTY_PAGES = 1000
"""Of a listing, where objects that are gone leave some."""


class Entry(NamedTuple):
    """One object of a listing: its name below the source's prefix, what pins it, its bytes."""

    name: str
    generation: int
    tag: str
    size: int


class Transient(Exception):  # noqa: N818 (it is a state, and is always handled)
    """The download failed in a way that another attempt can mend."""


class Changed(Exception):  # noqa: N818
    """The object is no longer the one that was listed."""


class Reader(Protocol):
    """The objects of a source, for one worker of a transfer: one after the other."""

    def ask(self, entry: Entry) -> None:
        """What comes next, from its start: a hint, so that it can be sent."""

    async def whole(self, entry: Entry) -> bytes:
        """A small object; at most one that is longer than listed.

        Raises:
            Transient: worth another attempt.
            Changed: the pinned content is gone.
            KfpDdpError: it cannot be read.
        """

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """Hand the bytes from `offset` on to `take`, in a thread.

        Raises:
            Transient: worth another attempt; the body ended early, or failed the store's checksum.
            Changed, KfpDdpError: see `whole`; and what `take` raises.
        """

    def close(self) -> None:
        """Give up the connection; the next object opens another."""


class Source(Protocol):
    """A prefix of a bucket, or a folder."""

    url: str
    """As it is stored and printed: without what may be secret, see `http.origin.display`."""
    resumes: bool
    """Whether a broken body can be continued at an offset."""
    max_workers: int
    """The most connections the peer bears; known after `listing`."""

    @property
    def exposed(self) -> bool:
        """Whether it is read over plain http://, from another machine."""

    def listing(self) -> Listing:
        """Every object below the prefix.

        Raises:
            InputError: no such place, no rights, or nothing in it.
        """

    def reader(self, threads: Executor) -> Reader:
        """A reader for one worker; what would keep it waiting may run in `threads`."""


def open_source(
    url: str,
    *,
    timeout: float = 30.0,
    symlinks: str = "error",
    ahead: int = 0,
    wanted: Filter | None = None,
) -> Source:
    """The source that a URL names.

    gs://, s3:// or az://bucket/prefix, hf://datasets/owner/name, file:///folder, a path, or a
    manifest's https:// address.
    `timeout` is the longest silence of a peer in seconds, `ahead` how many connections to open
    while the listing runs, for a transfer that is sure to follow. Of a folder only what is
    `wanted` is looked at.

    Raises:
        InputError: unknown scheme, no bucket in the URL, or a password.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("", "file") and "@" in url.partition("://")[2].partition("/")[0]:
        raise InputError(
            f"source {display(url)!r} has a user or a password in its address, which is kept with "
            "the run; give them in a netrc file (machine HOST login USER password PASSWORD) that "
            "the environment variable NETRC names"
        )
    if "\0" in url or not is_text(url):
        raise InputError(f"source {display(url)!r} is no text; give it in UTF-8")
    if scheme == "gs":
        from kfp_ddp.storage.sources.gcs import GcsSource

        return GcsSource(url, *bucket_and_prefix(url), timeout=timeout, ahead=ahead)
    if scheme == "s3":
        from kfp_ddp.storage.sources.s3 import S3Source

        return S3Source(url, *bucket_and_prefix(url), timeout=timeout)
    if scheme == "az":
        from kfp_ddp.storage.sources.azure import AzureSource

        return AzureSource(url, *bucket_and_prefix(url), timeout=timeout)
    if scheme == "hf":
        from kfp_ddp.storage.sources.huggingface import HuggingFaceSource

        return HuggingFaceSource(url, timeout)
    if scheme in ("http", "https"):
        from kfp_ddp.storage.sources.web import WebSource

        return WebSource(url, timeout)
    if scheme in ("", "file"):
        from kfp_ddp.storage.sources.files import FolderSource

        if not url.removeprefix("file://"):
            raise InputError("source is empty; give gs://bucket/prefix or a folder")
        return FolderSource(url, symlinks, wanted)
    raise InputError(
        f"source {display(url)!r} has the unknown scheme {scheme}://; use "
        "gs://, s3://, az://, hf://, https:// or file://"
    )


def is_text(name: str) -> bool:
    """Whether a name can be written in UTF-8."""
    return name.isascii() or name.encode("utf-8", "replace").decode() == name


def check_end(url: str, page: int, found: Listing) -> None:
    """Refuse a listing that does not end.

    Args:
        url: Of the source, as it may be shown.
        page: How many pages there were before this one.
        found: All objects of all pages.

    Raises:
        InputError: too many objects, or pages without any.
    """
    if len(found) > MAX_OBJECTS or page > MAX_EMPTY_PAGES + len(found):
        raise InputError(
            f"the listing of {url} does not end: {len(found):,} objects in {page + 1:,} pages, and "
            f"{MAX_OBJECTS:,} objects at most are taken; sync parts of it, or look at its server"
        )


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Split gs://bucket/some/prefix into its bucket and 'some/prefix/' ('' for the whole bucket).

    Raises:
        InputError: there is no bucket.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise InputError(
            f"source {display(url)!r} names no bucket; give it as {scheme}://bucket/prefix"
        )
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""
