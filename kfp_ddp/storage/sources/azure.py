"""Azure Blob Storage, through azure-storage-blob.

The listing gives no crc32c, so the ETag stands for the content: downloads are pinned to it, each
block is checked with the MD5 that the store gives it, and the whole with the SHA-256 that a
destination of ours left beside the blob, or with the blob's own Content-MD5, where it has one.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.destination.azure import container_client, is_folder, line, refusal
from kfp_ddp.storage.http.origin import Origin
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.sources import Changed, Entry, Transient, check_end
from kfp_ddp.storage.sources.blocking import BlockingReader, Stream

_PAGE = 5_000
"""Blobs of a page of a listing, at most."""


class AzureSource:
    """A prefix of a container; AZURE_STORAGE_ACCOUNT and its kin name the account."""

    resumes = False
    """The whole is checked at its end, so a broken body starts again."""
    max_workers = 64

    def __init__(self, url: str, container: str, prefix: str, timeout: float) -> None:
        self.url, self._prefix = url, prefix
        self._client = container_client(
            f"source {url}", container, connection_timeout=timeout, read_timeout=timeout
        )
        self._root = f"az://{container}"

    @property
    def exposed(self) -> bool:
        """See `Source.exposed`."""
        return Origin.of(self._client.url).exposed

    def listing(self) -> Listing:
        """List the prefix; see `Source.listing`."""
        from azure.core.exceptions import AzureError

        found, start = Listing(), len(self._prefix)
        try:
            blobs = self._client.list_blobs(self._prefix, include="metadata")
            for number, blob in enumerate(blobs):
                name = blob.name[start:]
                if (name or blob.size) and not is_folder(blob):
                    found.add(name, blob.size, 0, tag=str(blob.etag).strip('"'))
                if number % _PAGE == 0:
                    check_end(self.url, number // _PAGE, found)
        except AzureError as error:
            raise refusal(self.url, self._root, "listed", error) from error
        if not found:
            raise InputError(
                f"{self.url} holds no blobs below {self._prefix or '/'!r}; "
                "check the prefix and that the upload is done"
            )
        return found

    def reader(self, threads: Executor) -> BlockingReader:
        """A reader; all share the client's pool of connections."""
        return BlockingReader(self._open, threads)

    def _open(self, entry: Entry, offset: int) -> Stream:
        """Start a download of the listed content."""
        from azure.core import MatchConditions
        from azure.core.exceptions import (
            AzureError,
            ResourceModifiedError,
            ResourceNotFoundError,
        )

        try:
            opened = self._client.download_blob(
                f"{self._prefix}{entry.name}",
                etag=f'"{entry.tag}"',
                match_condition=MatchConditions.IfNotModified,
                validate_content=True,
            )
        except (ResourceModifiedError, ResourceNotFoundError) as error:
            raise Changed(entry.name) from error
        except AzureError as error:
            raise self._failed(entry, error) from error
        if opened.size != entry.size:
            raise Transient(f"length {opened.size} instead of {entry.size}")
        return _AzureStream(opened)

    def _failed(self, entry: Entry, error: Any) -> Exception:
        if getattr(error, "error_code", "") == "BlobArchived":
            return InputError(
                f"{entry.name!r} of {self.url} lies in the archive tier: rehydrate or exclude it"
            )
        if getattr(error, "status_code", None) in (401, 403):
            return InputError(
                f"cannot read {entry.name!r}: {refusal(self.url, self._root, 'read', error)}"
            )
        return Transient(line(error))


class _AzureStream:
    """A stream that ends with the check of its digest, where the blob has one."""

    def __init__(self, opened: Any) -> None:
        about = opened.properties.metadata or {}
        self._state, self._wanted = hashlib.sha256(), about.get("sha256", "")
        if not self._wanted:
            md5 = opened.properties.content_settings.content_md5
            self._state, self._wanted = hashlib.md5(usedforsecurity=False), bytes(md5 or b"").hex()
        self._blocks: Iterator[bytes] = opened.chunks()

    def read(self, size: int = -1, /) -> bytes:
        """A block as the store sends it, whatever `size` is."""
        from azure.core.exceptions import AzureError

        try:
            block = next(self._blocks, b"")
        except (AzureError, ValueError, OSError) as error:
            raise Transient(f"{type(error).__name__}: {line(error)}") from error
        self._state.update(block)
        if not block and self._wanted not in ("", self._state.hexdigest()):
            found = f"{self._state.name.upper()} {self._state.hexdigest()}"
            raise Transient(f"{found} instead of {self._wanted}")
        return block

    def close(self) -> None:
        """Nothing stays open between two blocks."""
