"""Requests for the objects of Google Cloud Storage: endpoint, credentials, addresses, errors."""

import json
import math
import os
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import one_line, printable
from kfp_ddp.storage import store
from kfp_ddp.storage.http.origin import Origin, Request, credentials, quoted
from kfp_ddp.storage.http.reader import HttpObjects
from kfp_ddp.storage.retry import is_temporary
from kfp_ddp.storage.source import Changed, Entry, Transient

SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"


class GcsObjects(HttpObjects):
    """The objects of one prefix, stored bytes as they were listed; see `HttpObjects`.

    STORAGE_EMULATOR_HOST, the application default credentials, or anonymous access.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._base = f"/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(prefix, safe='')}"
        self._credentials: Any = None
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator:
            endpoint = emulator if "://" in emulator else f"http://{emulator}"
        else:
            endpoint = self._find_credentials()
        self.origin = Origin.of(endpoint)
        if self._credentials is None:
            self.secret = credentials(urlsplit(endpoint))
            self._trusted_until = math.inf

    def _find_credentials(self) -> str:
        """Use the application default credentials, if any; return the endpoint for them."""
        import google.auth
        from google.cloud import storage

        try:
            self._credentials, _ = google.auth.default(scopes=[SCOPE])
        except google.auth.exceptions.DefaultCredentialsError:
            client = storage.Client.create_anonymous_client()  # public buckets need none
        else:
            client = storage.Client(project="none", credentials=self._credentials)
        return str(client.api_endpoint)

    @property
    def account(self) -> str:
        """The account of the credentials, for messages."""
        if self._credentials is None:
            return "anonymous (no credentials were found)"
        return (
            getattr(self._credentials, "service_account_email", None) or "the default credentials"
        )

    def _renew(self, refused: bool) -> None:
        if self._credentials is None:
            return
        if refused or not self._credentials.valid:
            self._refresh()
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        self.secret = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items())

    def _refresh(self) -> None:
        import google.auth.exceptions
        from google.auth.transport.requests import Request

        try:
            self._credentials.refresh(Request())
        except google.auth.exceptions.TransportError as error:
            raise Transient(f"token: {error}") from error
        except google.auth.exceptions.GoogleAuthError as error:
            if error.retryable:
                raise Transient(f"token: {one_line(error)}") from error
            raise InputError(
                f"the credentials of {self.account} give no token: {one_line(error)}; "
                "check GOOGLE_APPLICATION_CREDENTIALS or Workload Identity"
            ) from error

    def request(self, entry: Entry, offset: int) -> Request:
        """Pin the request to the generation; see `HttpObjects.request`."""
        target = f"{self._base}{quoted(entry.name).replace('/', '%2F')}?alt=media"
        if entry.generation:
            target += f"&generation={entry.generation}"
        headers = b"Accept-Encoding: gzip\r\n"
        if offset:
            headers += b"Range: bytes=%d-\r\n" % offset
        return Request(self.origin, target, entry.size, headers, self.secret)

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """See `HttpObjects.refusal`; a token that is refused is renewed."""
        reason = f"HTTP {status} {message_of(body)}"
        if status == HTTPStatus.UNAUTHORIZED:
            await self.authorise(secret)
            return Transient(reason)
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED):
            return Changed(entry.name)
        if is_temporary(status) or status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return Transient(reason)
        root = f"gs://{self._bucket}"
        reason += f" as {self.account}"
        return problem("read", f"{entry.name!r} of {root}", root, status, reason)


def problem(verb: str, uri: str, root: str, status: int | None, reason: str) -> KfpDdpError:
    """Return the error for a response with an error status, None for a fault of the network."""
    if status == HTTPStatus.NOT_FOUND:
        return store.no_bucket(root)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        role = "objectViewer" if verb in ("list", "read") else "objectUser"
        advice = f"grant the step's service account roles/storage.{role} on the bucket"
        return store.no_permission(verb, uri, reason, advice)
    temporary = status is None or is_temporary(status)
    return store.failed(verb, uri, reason, "check the network, then run again", temporary=temporary)


def message_of(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace")
    return printable(one_line(message, 200))
