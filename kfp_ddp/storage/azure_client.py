"""Clients of azure-storage-blob, and translation of their errors."""

import os
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import store
from kfp_ddp.storage.retry import is_temporary
from kfp_ddp.storage.store import BLOCK, read_bounded

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient

PART = 32 << 20
"""Bytes of a block of a larger upload; 50,000 blocks at most."""
MAX_PAGE = 1 << 27
"""Bytes of a page: 5,000 names of 1,024 bytes with 8 KiB of metadata, each twice as long in XML."""
SCOPE = "https://storage.azure.com/.default"
"""Of a token for the Storage account."""
_CONNECT, _READ = 10.0, 300.0  # seconds to connect, and between two responses


def container_client(url: str, container: str, **settings: Any) -> "ContainerClient":
    """Return a client for the environment variables of the Azure command line.

    AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY,
    AZURE_STORAGE_SAS_TOKEN, an identity that azure-identity finds, or no credentials. `settings`
    are of azure.core's pipeline. Raises InputError.
    """
    try:
        from azure.storage.blob import BlobServiceClient, ExponentialRetry
    except ImportError as error:
        raise InputError(f"{url} needs azure-storage-blob; pip install 'kfp-ddp[azure]'") from error
    settings = {"connection_timeout": _CONNECT, "read_timeout": _READ, **settings}
    settings = {
        "transport": _bounded_transport(url, settings),
        "max_single_put_size": PART,
        "max_block_size": PART,
        "retry_policy": ExponentialRetry(
            initial_backoff=1, increment_base=2, retry_total=store.TRIES - 1
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
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{url} cannot be opened: {first_line(error)}; correct "
            "AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT"
        ) from None
    return service.get_container_client(container)


def _bounded_transport(url: str, settings: dict[str, Any]) -> Any:
    """Return a transport that bounds responses other than bodies; azure has no setting for it."""
    from azure.core.pipeline.transport import RequestsTransport

    def bound(answer: Any, stream: bool = False, **_: Any) -> None:
        if not stream or answer.status_code >= 300:
            try:
                blocks = answer.iter_content(BLOCK)
                answer._content = read_bounded(blocks, MAX_PAGE, f"the server of {url}")
            except InputError:
                answer.close()
                raise

    transport = RequestsTransport(**settings)
    transport.open()
    transport.session.hooks["response"].append(bound)
    return transport


def _credential() -> Any:
    """Return the account's key, a shared access signature, an identity, or None for anonymous."""
    if key := os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return key
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import DefaultAzureCredential
    except ImportError:
        return None
    identity = DefaultAzureCredential()
    try:
        identity.get_token(SCOPE)
    except ClientAuthenticationError:
        return None  # a public container needs none
    return identity


def problem(verb: str, uri: str, root: str, error: Exception) -> KfpDdpError | None:
    """Return the error to raise for one of azure.core, None for any other."""
    from azure.core.exceptions import AzureError

    if not isinstance(error, AzureError):
        return None
    status, code = getattr(error, "status_code", None), str(getattr(error, "error_code", ""))
    if code == "ContainerNotFound":
        return store.no_bucket(root)
    if status in (401, 403):
        advice = (
            "grant the step's identity the role Storage Blob Data Contributor on the container, or "
            "correct AZURE_STORAGE_KEY or the SAS"
        )
        return store.no_permission(verb, uri, code or str(status), advice)
    advice = "check AZURE_STORAGE_ACCOUNT and the network, then run again"
    temporary = status is None or is_temporary(status)
    return store.failed(verb, uri, first_line(error), advice, temporary=temporary)


def authorities() -> str:
    """Return the file or folder of certificates that the SDK trusts."""
    from requests.certs import where

    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or where()


def first_line(error: BaseException) -> str:
    """Return an error's first line; the others identify the request."""
    return one_line(str(error).strip().partition("\n")[0] or error, 200)
