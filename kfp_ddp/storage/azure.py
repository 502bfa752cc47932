"""Azure Blob Storage, through azure-storage-blob: a store and a source.

The ETag stands for the content. A body is checked with our SHA-256, else with its Content-MD5.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, MutableMapping
from email.utils import formatdate
from typing import Any, BinaryIO, ClassVar
from urllib.parse import urlsplit

from azure.core import MatchConditions
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.pipeline.transport import HttpRequest, RequestsTransport
from azure.storage.blob import BlobClient, BlobServiceClient, ContainerClient, ExponentialRetry
from requests.certs import where

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import store
from kfp_ddp.storage.http.answer import Response
from kfp_ddp.storage.http.client import Checksum, SdkSource, md5_checksum, sha256_checksum
from kfp_ddp.storage.http.origin import Origin, Request, quoted, target_of
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import (
    Changed,
    Entry,
    Pages,
    SourceOptions,
    Transient,
    bucket_and_prefix,
    is_temporary,
    listing_by_etag,
)
from kfp_ddp.storage.store import BLOCK, Bucket, ConflictError, ObjectState, Page, read_bounded

PART = 32 << 20
"""Bytes of a block of a larger upload; 50,000 blocks at most."""
MAX_PAGE = 1 << 27
"""Bytes of a page: 5,000 names of 1,024 bytes with 8 KiB of metadata, each twice as long in XML."""
SCOPE = "https://storage.azure.com/.default"
"""Of a token for the Storage account."""
_CONNECT = 10.0  # seconds
_IDENTITY = ("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE")


class AzureSource(SdkSource):
    """A prefix of a container, read without the SDK, which takes 490 us to prepare a request."""

    max_workers = 64
    part = 4 << 20
    """The server sends no MD5 of a longer range."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        container, self._prefix = bucket_and_prefix(url)
        self._root = f"az://{container}"
        self.client = container_client(url, container, options.timeout)
        bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
        super().__init__(url, Origin.of(self.client.url, bundle or where()), options.timeout)
        self._address, _, sas = self.client.url.partition("?")
        self._query = f"?{sas}" if sas else ""
        self._headers = dict[str, str]()

    def listing(self) -> Listing:
        """List the prefix; see `Source.listing`."""
        try:
            return listing_by_etag(self.url, self._prefix, self.pages())
        except AzureError as error:
            raise problem("list", self.url, self._root, error) or error from error

    def pages(self, below: str = "", size: int = 0) -> Iterator[list[tuple[str, int, str]]]:
        """Yield name, bytes and ETag of blobs in pages of `size`, without those of folders."""
        limit: dict[str, Any] = {"results_per_page": size} if size else {}
        pages = Pages(self.url, self._prefix, below)
        prefix = f"{self._prefix}{below}"
        blobs: Any = self.client.list_blobs(prefix, include=["metadata"], **limit).by_page()
        for page in blobs:
            # With a hierarchical namespace a folder is a blob too.
            files = [b for b in page if (b.metadata or {}).get("hdi_isfolder") != "true"]
            yield [(*pages.row(blob.name, blob.size), blob.etag) for blob in files]
            pages.following(blobs.continuation_token)

    def request(self, entry: Entry, offset: int) -> Request:
        """Pin the request to the ETag; see `HttpSource.request`."""
        headers: MutableMapping[str, str]
        headers = {**self._headers, "If-Match": f'"{entry.tag}"'}
        if entry.size:
            end = min(offset + self.part, entry.size) - 1
            headers["x-ms-range"] = f"bytes={offset}-{end}"
            headers["x-ms-range-get-content-md5"] = "true"
        url = f"{self._address}/{quoted(self._prefix + entry.name)}{self._query}"
        signer = self.client.credential
        if hasattr(signer, "on_request"):
            request = HttpRequest("GET", url, headers)
            signer.on_request(PipelineRequest(request, PipelineContext(None)))
            headers = request.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        target = target_of(urlsplit(url))
        return Request(self.origin, target, entry.size, secret=lines.encode())

    def _renew(self, refused: bool) -> None:
        self._headers = {
            "x-ms-version": self.client.api_version,
            "x-ms-date": formatdate(usegmt=True),
        }
        identity = self.client.credential
        if hasattr(identity, "get_token"):
            try:
                self._headers["Authorization"] = f"Bearer {identity.get_token(SCOPE).token}"
            except AzureError as error:
                raise Transient(first_line(error)) from error

    def _ask_sdk(self, entry: Entry) -> Exception | None:
        self._trusted_until = 0.0
        name = f"{entry.name!r} of {self.url}"
        try:
            self.client.download_blob(
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
                return problem("read", name, self.url, error) or error
            return Transient(first_line(error))
        return None

    def checksum(self, entry: Entry, answer: Response) -> Checksum | None:
        """Return our SHA-256, else the blob's Content-MD5, where it has one."""
        return sha256_checksum(answer.field(b"x-ms-meta-sha256")) or md5_checksum(
            answer.field(b"x-ms-blob-content-md5")
        )

    def part_checksum(self, answer: Response) -> Checksum | None:
        """Return the MD5 of the range."""
        return md5_checksum(answer.field(b"content-md5"))


class AzureStore(Bucket):
    """A prefix of a container, written az://container/prefix."""

    scheme = "az"
    may_ignore_conditions: ClassVar[bool] = True

    @functools.cached_property
    def _source(self) -> AzureSource:
        return AzureSource(self.uri, SourceOptions(store.READ_TIMEOUT))

    def delete(self, name: str) -> None:
        """Delete the blob; see `Store.delete`."""

        def request() -> None:
            with _ending_if_missing():
                self._blob(name).delete_blob()

        self._call("delete", request)

    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        for page in self._source.pages(prefix, size):
            yield [(name, size) for name, size, _ in page]

    def _stat(self, name: str) -> ObjectState | None:
        with _ending_if_missing():
            blob = self._blob(name).get_blob_properties()
            return ObjectState(blob.size, (blob.metadata or {}).get("sha256", ""), str(blob.etag))
        return None

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Send blocks with their MD5, which the server checks, and the last with the condition."""
        condition: dict[str, Any] = {}
        if tag:
            condition = {"etag": tag, "match_condition": MatchConditions.IfNotModified}
        conflict = contextlib.suppress(ResourceExistsError, ResourceModifiedError)
        with conflict, _ending_if_missing():
            self._blob(name).upload_blob(
                content,
                length=size,
                metadata={"sha256": digest},
                validate_content=True,
                overwrite=bool(tag),
                **condition,
            )
            return
        raise ConflictError

    def _blob(self, name: str) -> BlobClient:
        return self._source.client.get_blob_client(self._key(name))

    def _problem(self, verb: str, error: Exception) -> KfpDdpError | None:
        return problem(verb, self.uri, self.root, error)


def container_client(url: str, container: str, timeout: float) -> ContainerClient:
    """Return a client for the variables of the Azure command line; raise InputError."""
    timeouts = {"connection_timeout": min(_CONNECT, timeout), "read_timeout": timeout}
    retry = ExponentialRetry(initial_backoff=1, increment_base=2, retry_total=store.TRIES - 1)
    sizes = {"max_single_put_size": PART, "max_block_size": PART}
    transport = _bounded_transport(url, timeouts)
    settings: Any = {"transport": transport, "retry_policy": retry, **sizes, **timeouts}
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not connection and not account:
        raise InputError(
            f"{url} names no account: set AZURE_STORAGE_ACCOUNT, with AZURE_STORAGE_KEY, "
            "AZURE_STORAGE_SAS_TOKEN or an identity, or AZURE_STORAGE_CONNECTION_STRING"
        )
    try:
        if connection:
            service = BlobServiceClient.from_connection_string(connection, **settings)
        else:
            address = f"https://{account}.blob.core.windows.net"
            service = BlobServiceClient(address, credential=_credential(), **settings)
    except ValueError as error:
        raise InputError(
            f"{url} cannot be opened: {first_line(error)}; correct "
            "AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT"
        ) from None
    return service.get_container_client(container)


def _bounded_transport(url: str, timeouts: dict[str, float]) -> Any:
    """Return a transport that bounds responses other than bodies; azure has no setting for it."""

    def bound(answer: Any, stream: bool = False, **_: Any) -> None:
        if not stream or answer.status_code >= 300:
            try:
                blocks = answer.iter_content(BLOCK)
                answer._content = read_bounded(blocks, MAX_PAGE, f"the server of {url}")
            except InputError:
                answer.close()
                raise

    transport = RequestsTransport(**timeouts)
    transport.open()
    transport.session.hooks["response"].append(bound)
    return transport


def _credential() -> Any:
    """Return the account's key, a shared access signature, an identity, or None for anonymous."""
    if key := os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return key
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        return None
    identity = DefaultAzureCredential()
    try:
        identity.get_token(SCOPE)
    except ClientAuthenticationError as error:
        if any(os.environ.get(name) for name in _IDENTITY):
            advice = f"check {' and '.join(_IDENTITY)} and the network, then run again"
            why = one_line(error, 400)
            raise store.failed("sign in to", "Azure", why, advice, temporary=True) from None
        return None  # a public container needs none
    return identity


def problem(verb: str, uri: str, root: str, error: Exception) -> KfpDdpError | None:
    """Return the error to raise for one of azure.core, None for any other."""
    if not isinstance(error, AzureError):
        return None
    status = getattr(error, "status_code", None)
    code = str(getattr(error, "error_code", ""))
    if code == "ContainerNotFound":
        return store.NoBucketError(root)
    if status in (401, 403) or code == "ResourceNotFound":  # of anonymous requests
        advice = (
            "grant the step's identity the role Storage Blob Data Contributor on the container, or "
            "correct AZURE_STORAGE_KEY or the SAS"
        )
        return store.no_permission(verb, uri, code or str(status), advice)
    advice = "check AZURE_STORAGE_ACCOUNT and the network, then run again"
    temporary = status is None or is_temporary(status)
    return store.failed(verb, uri, first_line(error), advice, temporary=temporary)


def first_line(error: BaseException) -> str:
    """Return an error's first line; the others identify the request."""
    return one_line(str(error).strip().partition("\n")[0] or error, 200)


@contextlib.contextmanager
def _ending_if_missing() -> Iterator[None]:
    """End the block where the blob is missing; another error 404 is of anonymous requests."""
    try:
        yield
    except ResourceNotFoundError as error:
        if getattr(error, "error_code", "") != "BlobNotFound":
            raise
