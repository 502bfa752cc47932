"""Results in a container of Azure Blob Storage."""

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.storage.destination import place
from kfp_ddp.storage.destination.bucket import Bucket, Found, Lost
from kfp_ddp.storage.destination.place import BLOCK, CHANGED, Bounded, held
from kfp_ddp.storage.retry import is_temporary

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError, HttpResponseError
    from azure.storage.blob import BlobClient, ContainerClient

R = TypeVar("R")
PART = 32 << 20
"""Bytes of a block; what is longer is sent in several. 50,000 of them are the most."""
MAX_PAGE = 1 << 27
"""Bytes of a page: 5,000 names of 1,024 bytes and as much metadata as there may be, 8 KiB, each
twice as long in XML."""
_SCOPE = "https://storage.azure.com/.default"
_CONNECT, _READ = 10.0, 300.0  # seconds to connect, and between two answers
_FORBIDDEN = frozenset({401, 403})


def container_client(url: str, container: str, **settings: Any) -> "ContainerClient":
    """A client of what the Azure command line's own variables name.

    AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY,
    AZURE_STORAGE_SAS_TOKEN, an identity that azure-identity finds, or none at all.

    Args:
        url: What is to be opened, for messages.
        container: Its name.
        settings: Of azure.core's pipeline.

    Raises:
        InputError: azure-storage-blob is not installed, or the variables cannot be used.
    """
    try:
        from azure.storage.blob import BlobServiceClient, ExponentialRetry
    except ImportError as error:
        raise InputError(f"{url} needs azure-storage-blob; pip install 'kfp-ddp[azure]'") from error
    settings = {"connection_timeout": _CONNECT, "read_timeout": _READ, **settings}
    settings = {
        "transport": _bounded(url, settings),
        "max_single_put_size": PART,
        "max_block_size": PART,
        "retry_policy": ExponentialRetry(
            initial_backoff=1, increment_base=2, retry_total=place.TRIES - 1
        ),
        **settings,
    }
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    try:
        if connection:
            service = BlobServiceClient.from_connection_string(connection, **settings)
        elif account:
            address = f"https://{account}.blob.core.windows.net"
            service = BlobServiceClient(address, credential=_credential(), **settings)
        else:
            raise InputError(
                f"{url} names no account: set AZURE_STORAGE_ACCOUNT, with AZURE_STORAGE_KEY, "
                "AZURE_STORAGE_SAS_TOKEN or an identity, or AZURE_STORAGE_CONNECTION_STRING"
            )
    except ValueError as error:
        raise InputError(
            f"{url} cannot be opened: {line(error)}; correct AZURE_STORAGE_CONNECTION_STRING or "
            "AZURE_STORAGE_ACCOUNT"
        ) from None
    return service.get_container_client(container)


def _bounded(url: str, settings: dict[str, Any]) -> Any:
    """A transport that holds at most a page of what is no body of a blob; azure has no bound."""
    from azure.core.pipeline.transport import RequestsTransport

    def hold(answer: Any, stream: bool = False, **_: Any) -> None:
        if not stream or answer.status_code >= 300:
            try:
                answer._content = held(answer.iter_content(BLOCK), MAX_PAGE, f"the server of {url}")
            except InputError:
                answer.close()
                raise

    transport = RequestsTransport(**settings)
    transport.open()
    transport.session.hooks["response"].append(hold)
    return transport


class AzureBucket(Bucket):
    """A prefix of a container, written az://container/prefix.

    The store checks MD5 of each block that it is sent and gives it with each that is read. SHA-256
    of the whole content is kept beside each blob, and compared with what is read.
    """

    scheme = "az"
    many_makes: ClassVar[bool] = True

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._handle: ContainerClient | None = None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """5,000 blobs a page, all of which one call reads."""
        start = len(self._key(""))

        def ask() -> list[tuple[str, int]]:
            found = self._client().list_blobs(self._key(prefix), include=["metadata"])
            return [(blob.name[start:], blob.size) for blob in found if not is_folder(blob)]

        yield from self._call("listed", ask)

    def delete(self, name: str) -> None:
        """Delete the blob; one that is not there is what was asked for."""

        def ask() -> None:
            from azure.core.exceptions import ResourceNotFoundError

            try:
                self._blob(name).delete_blob()
            except ResourceNotFoundError as error:
                _raise_without_container(error)

        self._call("deleted", ask)

    def _look(self, name: str) -> Found | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            seen = self._blob(name).get_blob_properties()
        except ResourceNotFoundError as error:
            _raise_without_container(error)
            return None
        return Found(seen.size, (seen.metadata or {}).get("sha256", ""), str(seen.etag))

    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Block by block, each with the MD5 that the store gives it, all of one ETag."""
        from azure.core.exceptions import ResourceModifiedError, ResourceNotFoundError

        bounded = Bounded(into, limit, f"{self.uri}/{name}")
        try:
            opened = self._blob(name).download_blob(validate_content=True, **_only(tag))
            state = hashlib.sha256()
            for block in opened.chunks():
                bounded.write(block)
                state.update(block)
        except ResourceModifiedError:
            raise Lost from None
        except ResourceNotFoundError as error:
            _raise_without_container(error)
            return False
        wanted = (opened.properties.metadata or {}).get("sha256", "")
        if wanted not in ("", state.hexdigest()):
            raise StorageError(
                f"a transfer of {self.uri}/{name} is damaged: sha256 {state.hexdigest()} instead "
                f"of {wanted}; run the step again"
            )
        return True

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Give each block's MD5, which the store compares; the last request has the condition."""
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
            raise Lost from None
        except ResourceNotFoundError as error:
            _raise_without_container(error)
            raise Lost from None

    def _blob(self, name: str) -> "BlobClient":
        return self._client().get_blob_client(self._key(name))

    def _client(self) -> "ContainerClient":
        if self._handle is None:
            self._handle = container_client(self.uri, self.name)
        return self._handle

    def _call(self, what: str, ask: Callable[[], R]) -> R:
        self._client()
        from azure.core.exceptions import AzureError

        try:
            return ask()
        except Lost:
            raise StorageError(f"{self.uri} {CHANGED}") from None
        except AzureError as error:
            raise refusal(self.uri, self.root, what, error) from None


def refusal(uri: str, root: str, what: str, error: "AzureError") -> KfpDdpError:
    """Return the error for a request that failed.

    Args:
        uri: What was asked for.
        root: Its container.
        what: What was to be done: listed, read, written.
        error: The answer.
    """
    from azure.core.exceptions import HttpResponseError

    status, code = getattr(error, "status_code", None), str(getattr(error, "error_code", ""))
    if code == "ContainerNotFound":
        return InputError(f"the container {root} is not there: make it or correct its name")
    if status in _FORBIDDEN:
        return InputError(
            f"{uri} may not be {what}: {code or status}; give the step's identity the role Storage "
            "Blob Data Contributor on the container, or correct AZURE_STORAGE_KEY or the SAS"
        )
    temporary = status is None or is_temporary(status) or not isinstance(error, HttpResponseError)
    return (UnavailableError if temporary else InputError)(
        f"{uri} cannot be {what}: {line(error)}; check AZURE_STORAGE_ACCOUNT and the network, then "
        "run again"
    )


def is_folder(blob: Any) -> bool:
    """Whether a blob, listed with its metadata, stands for a folder of a hierarchical account."""
    return (blob.metadata or {}).get("hdi_isfolder") == "true"


def line(error: BaseException) -> str:
    """An error's first line, whose further ones are identifiers of the request."""
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())[:200]


def _credential() -> Any:
    """The account's key, a shared access signature, an identity, or None for nobody."""
    if key := os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return key
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import DefaultAzureCredential
    except ImportError:
        return None
    identity = DefaultAzureCredential()
    try:
        identity.get_token(_SCOPE)
    except ClientAuthenticationError:
        return None  # what is public needs none
    return identity


def _only(tag: str) -> dict[str, Any]:
    """The condition that a blob is still the one of this ETag."""
    from azure.core import MatchConditions

    return {"etag": tag, "match_condition": MatchConditions.IfNotModified} if tag else {}


def _raise_without_container(error: "HttpResponseError") -> None:
    if getattr(error, "error_code", "") == "ContainerNotFound":
        raise error
