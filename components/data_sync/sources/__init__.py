"""Where data comes from: one interface, one rule of integrity.

Every object has a size and a content token in the listing, a download is pinned to what was
listed, and its whole body is checked before the file counts.
"""

from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.listing import Listing

if TYPE_CHECKING:
    from kfp_ddp.components.data_sync.sources.over_http import HttpObjects


class Transient(Exception):  # noqa: N818 (it is a state, and is always handled)
    """The download failed in a way that another attempt can mend."""


class Changed(Exception):  # noqa: N818
    """The object is no longer the one that was listed."""


class Body(Protocol):
    """The bytes of one object."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, all when negative; b'' at the end.

        Raises:
            Transient: the body ended early, or failed the store's own checksum.
        """

    def close(self) -> None:
        """Give the body up, read or not."""


class Reader(Protocol):
    """Downloads for one thread, over a connection that it keeps."""

    def open(self, name: str, generation: int, tag: str, size: int, offset: int) -> Body:
        """Start reading an object at `offset`; `name` is relative to the source's prefix.

        Raises:
            Transient: worth another attempt.
            Changed: the pinned content is gone.
            InputError: no right to read it.
        """

    def close(self) -> None:
        """Close the connection."""


class Source(Protocol):
    """A prefix of a bucket, or a folder."""

    url: str
    resumes: bool
    """Whether a broken body can be continued at an offset."""
    max_workers: int
    """The most connections the peer bears; known after `listing`."""

    @property
    def objects(self) -> "HttpObjects | None":
        """Of a source that speaks HTTP: its small objects share one thread, see `Swarm`."""

    def listing(self) -> Listing:
        """Every object below the prefix.

        Raises:
            InputError: no such place, no rights, or nothing in it.
        """

    def reader(self) -> Reader:
        """A reader for one thread."""


def open_source(url: str, *, timeout: float = 30.0, symlinks: str = "error") -> Source:
    """The source that a URL names.

    gs:// or s3://bucket/prefix, file:///folder, a path, or a manifest's https:// address.
    `timeout` is the longest silence of a peer in seconds.

    Raises:
        InputError: unknown scheme, or no bucket in the URL.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme == "gs":
        from kfp_ddp.components.data_sync.sources.gcs import GcsSource

        return GcsSource(url, *bucket_and_prefix(url), timeout=timeout)
    if scheme == "s3":
        from kfp_ddp.components.data_sync.sources.s3 import S3Source

        return S3Source(url, *bucket_and_prefix(url), timeout=timeout)
    if scheme in ("http", "https"):
        from kfp_ddp.components.data_sync.sources.web import WebSource

        return WebSource(url, timeout)
    if scheme in ("", "file"):
        from kfp_ddp.components.data_sync.sources.files import FolderSource

        if not url.removeprefix("file://"):
            raise InputError("source is empty; give gs://bucket/prefix or a folder")
        return FolderSource(url, symlinks=symlinks)
    raise InputError(
        f"source {url!r} has the unknown scheme {scheme}://; use gs://, s3://, https:// or file://"
    )


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Split gs://bucket/some/prefix into its bucket and 'some/prefix/' ('' for the whole bucket).

    Raises:
        InputError: there is no bucket.
    """
    bucket = urlsplit(url).netloc
    if not bucket:
        raise InputError(
            f"source {url!r} names no bucket; give it as {url.partition(':')[0]}://bucket/prefix"
        )
    prefix = url.partition("://")[2][len(bucket) :].strip("/")
    return bucket, f"{prefix}/" if prefix else ""
