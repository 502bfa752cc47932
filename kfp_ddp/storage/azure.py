"""Azure Blob Storage, through azure-storage-blob: a store and a source.

A listing gives no crc32c, so the ETag stands for the content. A download is pinned to it, each
block is checked with the MD5 that the server sends, and the complete body with the SHA-256 that
`AzureStore` leaves as metadata, else with the blob's Content-MD5, where it has one.
"""

import hashlib
from collections.abc import Iterator, MutableMapping
from concurrent.futures import Executor
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar
from urllib.parse import urlsplit

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.storage.azure_client import (
    SCOPE,
    authorities,
    container_client,
    first_line,
    problem,
)
from kfp_ddp.storage.http.answer import Answer
from kfp_ddp.storage.http.client import HttpPool
from kfp_ddp.storage.http.origin import Origin, Request, quoted, target_of
from kfp_ddp.storage.http.reader import (
    Checksum,
    HttpReader,
    SdkObjects,
    md5_checksum,
    sha256_checksum,
)
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import (
    Changed,
    Entry,
    SourceOptions,
    Transient,
    bucket_and_prefix,
    check_end,
    check_not_empty,
    etag_of,
)
from kfp_ddp.storage.store import (
    BoundedWriter,
    Bucket,
    ConflictError,
    Page,
    Seen,
)

if TYPE_CHECKING:
    from azure.core.exceptions import HttpResponseError
    from azure.storage.blob import BlobClient, ContainerClient

_PAGE = 5_000
"""Maximum blobs of a page of a listing."""


class AzureStore(Bucket):
    """A prefix of a container, written az://container/prefix.

    The server checks the MD5 of each block of an upload and sends it with each of a download.
    SHA-256 of the complete content is stored as metadata, and compared with what is read.
    """

    scheme = "az"
    many_makes: ClassVar[bool] = True

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._handle: ContainerClient | None = None

    def delete(self, name: str) -> None:
        """Delete the blob; see `Store.delete`."""

        def request() -> None:
            from azure.core.exceptions import ResourceNotFoundError

            try:
                self._blob(name).delete_blob()
            except ResourceNotFoundError as error:
                _raise_without_container(error)

        self._call("delete", request)

    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        start = len(self._key(""))
        limit: dict[str, Any] = {"results_per_page": size} if size else {}
        blobs = self._client().list_blobs(self._key(prefix), include=["metadata"], **limit)
        for page in blobs.by_page():
            yield [(blob.name[start:], blob.size) for blob in page if not _is_folder(blob)]

    def _look(self, name: str) -> Seen | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            blob = self._blob(name).get_blob_properties()
        except ResourceNotFoundError as error:
            _raise_without_container(error)
            return None
        return Seen(blob.size, (blob.metadata or {}).get("sha256", ""), str(blob.etag))

    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Download block by block, each with the MD5 of the server, all of one ETag."""
        from azure.core.exceptions import ResourceModifiedError, ResourceNotFoundError

        bounded = BoundedWriter(into, limit, f"{self.uri}/{name}")
        try:
            download = self._blob(name).download_blob(validate_content=True, **_only(tag))
            state = hashlib.sha256()
            for block in download.chunks():
                bounded.write(block)
                state.update(block)
        except ResourceModifiedError:
            raise ConflictError from None
        except ResourceNotFoundError as error:
            _raise_without_container(error)
            return False
        digest = (download.properties.metadata or {}).get("sha256", "")
        if digest not in ("", state.hexdigest()):
            raise StorageError(
                f"a transfer of {self.uri}/{name} is damaged: sha256 {state.hexdigest()} instead "
                f"of {digest}; run the step again"
            )
        return True

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Send blocks with their MD5, which the server checks, and the last with the condition."""
        from azure.core.exceptions import (
            ResourceExistsError,
            ResourceModifiedError,
            ResourceNotFoundError,
        )

        try:
            self._blob(name).upload_blob(
                content,
                length=size,
                metadata={"sha256": digest},
                validate_content=True,
                overwrite=bool(tag),
                **_only(tag),
            )
        except (ResourceExistsError, ResourceModifiedError):
            raise ConflictError from None
        except ResourceNotFoundError as error:
            _raise_without_container(error)
            raise ConflictError from None

    def _blob(self, name: str) -> "BlobClient":
        return self._client().get_blob_client(self._key(name))

    def _client(self) -> "ContainerClient":
        if self._handle is None:
            self._handle = container_client(self.uri, self.name)
        return self._handle

    def _problem(self, verb: str, error: Exception) -> KfpDdpError | None:
        self._client()  # raises InputError where azure-storage-blob is not installed
        return problem(verb, self.uri, self.root, error)


class AzureSource:
    """A prefix of a container; see `container_client` for the account."""

    resumes = False
    """The digest is of the complete body, so a download that was cut starts again."""
    max_workers = 64

    def __init__(self, url: str, options: SourceOptions) -> None:
        container, self._prefix = bucket_and_prefix(url)
        self.url, self._root = url, f"az://{container}"
        timeouts = {"connection_timeout": options.timeout, "read_timeout": options.timeout}
        self._client = container_client(f"source {url}", container, **timeouts)
        origin = Origin.of(self._client.url, authorities())
        self.exposed = origin.exposed
        self._pool = HttpPool(origin, options.timeout)
        self._objects = AzureObjects(self._client, origin, url, self._prefix)

    def listing(self) -> Listing:
        """List the prefix; see `Source.listing`."""
        from azure.core.exceptions import AzureError

        listing, start = Listing(), len(self._prefix)
        try:
            blobs = self._client.list_blobs(self._prefix, include="metadata")
            for number, blob in enumerate(blobs):
                name = blob.name[start:]
                if (name or blob.size) and not _is_folder(blob):
                    listing.add(name, blob.size, 0, tag=etag_of(self.url, name, str(blob.etag)))
                if number % _PAGE == 0:
                    check_end(self.url, number // _PAGE, listing)
        except AzureError as error:
            raise problem("list", self.url, self._root, error) or error from error
        check_not_empty(self.url, self._prefix, listing)
        return listing

    def reader(self, threads: Executor) -> HttpReader:
        """Return a reader with a connection of its own."""
        return HttpReader(self._objects, self._pool, threads)


class AzureObjects(SdkObjects):
    """The blobs of one prefix, pinned to their ETags; see `HttpObjects`.

    The SDK takes 490 us of processor to prepare a request, and its policy for keys alone 29.
    """

    part = 4 << 20
    """The server sends no MD5 of a longer range."""

    def __init__(self, client: "ContainerClient", origin: Origin, url: str, prefix: str) -> None:
        super().__init__()
        self._client, self._origin, self._url, self._prefix = client, origin, url, prefix
        self._address, _, sas = client.url.partition("?")
        self._query = f"?{sas}" if sas else ""
        self._headers = dict[str, str]()

    def request(self, entry: Entry, offset: int) -> Request:
        """Pin the request to the ETag; see `HttpObjects.request`."""
        headers: MutableMapping[str, str]
        headers = {**self._headers, "If-Match": f'"{entry.tag}"'}
        if entry.size:
            end = min(offset + self.part, entry.size) - 1
            headers["x-ms-range"] = f"bytes={offset}-{end}"
            headers["x-ms-range-get-content-md5"] = "true"
        url = f"{self._address}/{quoted(self._prefix + entry.name)}{self._query}"
        signer = self._client.credential
        if hasattr(signer, "on_request"):
            from azure.core.pipeline import PipelineContext, PipelineRequest
            from azure.core.pipeline.transport import HttpRequest

            request = HttpRequest("GET", url, headers)
            signer.on_request(PipelineRequest(request, PipelineContext(None)))
            headers = request.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        target = target_of(urlsplit(url))
        return Request(self._origin, target, entry.size, secret=lines.encode())

    def _renew(self, refused: bool) -> None:
        from azure.core.exceptions import AzureError

        self._headers = {
            "x-ms-version": self._client.api_version,
            "x-ms-date": formatdate(usegmt=True),
        }
        identity = self._client.credential
        if hasattr(identity, "get_token"):
            try:
                self._headers["Authorization"] = f"Bearer {identity.get_token(SCOPE).token}"
            except AzureError as error:
                raise Transient(first_line(error)) from error

    def _ask_sdk(self, entry: Entry) -> Exception | None:
        from azure.core import MatchConditions
        from azure.core.exceptions import (
            AzureError,
            ResourceModifiedError,
            ResourceNotFoundError,
        )

        self._trusted_until = 0.0
        name = f"{entry.name!r} of {self._url}"
        try:
            self._client.download_blob(
                f"{self._prefix}{entry.name}",
                offset=0,
                length=1,
                etag=f'"{entry.tag}"',
                match_condition=MatchConditions.IfNotModified,
            )
        except (ResourceModifiedError, ResourceNotFoundError):
            return Changed(entry.name)
        except AzureError as error:
            if getattr(error, "error_code", "") == "BlobArchived":
                return InputError(f"{name} is in the archive tier: rehydrate or exclude it")
            if getattr(error, "status_code", None) in (401, 403):
                return problem("read", name, self._url, error) or error
            return Transient(first_line(error))
        return None

    def checksum(self, entry: Entry, answer: Answer) -> Checksum | None:
        """Return our SHA-256, else the blob's Content-MD5, where it has one."""
        return sha256_checksum(answer.field(b"x-ms-meta-sha256")) or md5_checksum(
            answer.field(b"x-ms-blob-content-md5")
        )

    def part_checksum(self, answer: Answer) -> Checksum | None:
        """Return the MD5 of the range."""
        return md5_checksum(answer.field(b"content-md5"))


def _is_folder(blob: Any) -> bool:
    """Return whether a blob stands for a folder of an account with a hierarchical namespace."""
    return (blob.metadata or {}).get("hdi_isfolder") == "true"


def _only(tag: str) -> dict[str, Any]:
    """Return the condition that a blob has this ETag."""
    from azure.core import MatchConditions

    return {"etag": tag, "match_condition": MatchConditions.IfNotModified} if tag else {}


def _raise_without_container(error: "HttpResponseError") -> None:
    if getattr(error, "error_code", "") == "ContainerNotFound":
        raise error
