"""Endpoint and credentials for Google Cloud Storage, as headers of the fast HTTP client."""

import asyncio
import json
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.origin import Origin, credentials
from kfp_ddp.storage.source import Transient

SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_TRUSTED_SECONDS = 10


class GcsAccess:
    """STORAGE_EMULATOR_HOST, the application default credentials, or anonymous access.

    `headers` are complete lines that authorise a request, valid while they are `fresh`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.headers, self._fresh_until = b"", 0.0
        self._credentials: Any = None
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator:
            endpoint = emulator if "://" in emulator else f"http://{emulator}"
        else:
            endpoint = self._find_credentials()
        self.origin = Origin.of(endpoint)
        if self._credentials is None:
            self.headers = credentials(urlsplit(endpoint))

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

    @property
    def fresh(self) -> bool:
        """Whether the headers can be used as they are."""
        return self._credentials is None or time.monotonic() < self._fresh_until

    async def freshen(self) -> None:
        """Make the headers fresh.

        Raises:
            Transient, InputError: the credentials give no token.
        """
        if not self.fresh:
            await asyncio.to_thread(self._renew, None)

    async def renew(self, stale: bytes) -> None:
        """Get a new token, unless that of the `stale` headers has been replaced already.

        Raises:
            Transient, InputError: the credentials give none.
        """
        if self._credentials is not None:
            await asyncio.to_thread(self._renew, stale)

    def _renew(self, stale: bytes | None) -> None:
        with self._lock:
            if stale is None and self.fresh:
                return
            if stale is not None and stale != self.headers:
                return
            if stale is not None:
                self._refresh()
            self._build()

    def _build(self) -> None:
        """Write the headers from a valid token."""
        if not self._credentials.valid:
            self._refresh()
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        self.headers = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items())
        self._fresh_until = time.monotonic() + _TRUSTED_SECONDS

    def _refresh(self) -> None:
        import google.auth.exceptions
        from google.auth.transport.requests import Request

        try:
            self._credentials.refresh(Request())
        except google.auth.exceptions.TransportError as error:
            raise Transient(f"token: {error}") from error
        except google.auth.exceptions.GoogleAuthError as error:
            if error.retryable:
                raise Transient(f"token: {first_line(error)}") from error
            raise InputError(
                f"the credentials of {self.account} give no token: {first_line(error)}; "
                "check GOOGLE_APPLICATION_CREDENTIALS or Workload Identity"
            ) from error


def message_of(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return first_line(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return first_line(body[:200].decode("utf-8", "replace"))


def first_line(text: object) -> str:
    """Return the first line of a foreign text, without characters that control a terminal."""
    line = (str(text).strip().splitlines() or [""])[0][:200]
    return "".join(char if char.isprintable() else "?" for char in line)
