"""Google Cloud Storage: google-auth's credentials, the JSON API over our own connections."""

import binascii
import http.client
import json
import os
import re
import threading
import time
from typing import Any
from urllib.parse import quote, urlencode

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.connection import Connection
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.sources import Changed, Transient
from kfp_ddp.components.data_sync.sources.over_http import RETRYABLE, HttpReader

SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
FIELDS = "items(name,size,generation,crc32c),nextPageToken"
LIST_ATTEMPTS = 8
EMULATOR_WORKERS = 4
_PLAIN = re.compile(r"[A-Za-z0-9._~/-]*")


class GcsSource:
    """A prefix of a bucket; bodies are pinned to their generation and checked with crc32c."""

    resumes = True

    def __init__(self, url: str, bucket: str, prefix: str, timeout: float) -> None:
        self.url = url
        self.max_workers = 1 << 16
        self._bucket, self._prefix, self._timeout = bucket, prefix, timeout
        self._access = _Access()
        self.objects = GcsObjects(self._access, bucket, prefix, timeout)

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        connection = Connection(self._access.endpoint, self._timeout)
        found, token = Listing(), ""
        try:
            while True:
                page = self._page(connection, token)
                self._add(found, page.get("items", []))
                token = page.get("nextPageToken", "")
                if not token:
                    break
        finally:
            connection.close()
        if not found:
            raise InputError(
                f"{self.url} holds no objects below {self._prefix or '/'!r}; "
                "check the prefix and that the upload is done"
            )
        return found

    def reader(self) -> HttpReader:
        """A reader with a connection of its own."""
        return HttpReader(self.objects)

    def _page(self, connection: Connection, token: str) -> dict[str, Any]:
        query = {"prefix": self._prefix, "maxResults": "1000", "fields": FIELDS}
        if token:
            query["pageToken"] = token
        target = f"/storage/v1/b/{quote(self._bucket, safe='')}/o?{urlencode(query)}"
        renewed = False
        for attempt in range(LIST_ATTEMPTS):
            if attempt:
                time.sleep(min(0.25 * 2**attempt, 10))
            try:
                lines = self._access.lines()
                response = connection.get(target, lines)
                body = response.read()
                if response.version == 10:
                    # A server that closes after each answer is an emulator with a short queue.
                    self.max_workers = EMULATOR_WORKERS
                if response.status == http.HTTPStatus.OK:
                    page: dict[str, Any] = json.loads(body)
                    return page
                problem = f"HTTP {response.status} {_message(body)}"
                if response.status == http.HTTPStatus.UNAUTHORIZED and not renewed:
                    self._access.renew(lines)
                    renewed = True
                    continue
            except (OSError, http.client.HTTPException, json.JSONDecodeError, Transient) as error:
                connection.close()
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status not in RETRYABLE:
                raise self._refused(response.status, _message(body))
        raise InputError(
            f"cannot list {self.url}: {problem}, {LIST_ATTEMPTS} times; try again later"
        )

    def _refused(self, status: int, message: str) -> InputError:
        if status == http.HTTPStatus.NOT_FOUND:
            return InputError(
                f"bucket {self._bucket!r} of {self.url} does not exist; check its name"
            )
        if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            return InputError(
                f"no right to list {self.url} as {self._access.account} ({message}); "
                "grant roles/storage.objectViewer on the bucket"
            )
        return InputError(f"cannot list {self.url}: HTTP {status} {message}")

    def _add(self, found: Listing, items: list[dict[str, Any]]) -> None:
        start = len(self._prefix)
        for item in items:
            name, size = item["name"][start:], int(item["size"])
            if not name and not size:
                continue  # the marker of the prefix itself
            crc = item.get("crc32c")
            if not crc:
                raise InputError(
                    f"{self.url}: the listing gives no crc32c for {item['name']!r}, so it could "
                    "not be verified; upload the object again"
                )
            value = int.from_bytes(binascii.a2b_base64(crc), "big")
            found.add(name, size, value, int(item.get("generation") or 0))


class GcsObjects:
    """The objects of one prefix, stored bytes as they were listed; see `HttpObjects`."""

    def __init__(self, access: "_Access", bucket: str, prefix: str, timeout: float) -> None:
        self.endpoint, self.timeout = access.endpoint, timeout
        self._access, self._bucket = access, bucket
        self._base = f"/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(prefix, safe='')}"

    def request(self, name: str, generation: int, offset: int) -> tuple[str, bytes]:
        """Pinned to the generation; see `HttpObjects.request`."""
        plain = _PLAIN.fullmatch(name)  # most names; quote() is slow
        path = name.replace("/", "%2F") if plain else quote(name, "", errors="surrogateescape")
        target = f"{self._base}{path}?alt=media"
        if generation:
            target += f"&generation={generation}"
        headers = self._access.lines() + b"Accept-Encoding: gzip\r\n"
        return target, headers + b"Range: bytes=%d-\r\n" % offset if offset else headers

    def refusal(self, name: str, status: int, body: bytes, headers: bytes) -> Exception:
        """See `HttpObjects.refusal`; a token that is refused is renewed."""
        message = _message(body)
        if status == http.HTTPStatus.UNAUTHORIZED:
            self._access.renew(headers)
            return Transient(f"HTTP 401 {message}")
        if status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.PRECONDITION_FAILED):
            return Changed(name)
        if status in RETRYABLE:
            return Transient(f"HTTP {status} {message}")
        return InputError(
            f"cannot read gs://{self._bucket}/…/{name} as {self._access.account}: HTTP {status} "
            f"{message}; grant roles/storage.objectViewer on the bucket"
        )


class _Access:
    """Endpoint and credentials: STORAGE_EMULATOR_HOST, application default, or anonymous."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines, self._fresh_until = b"", 0.0
        self._credentials: Any = None
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator:
            self.endpoint = emulator if "://" in emulator else f"http://{emulator}"
            return
        import google.auth
        from google.cloud import storage

        try:
            self._credentials, _ = google.auth.default(scopes=[SCOPE])
        except google.auth.exceptions.DefaultCredentialsError:
            client = storage.Client.create_anonymous_client()  # public buckets need none
        else:
            client = storage.Client(project="none", credentials=self._credentials)
        self.endpoint = str(client.api_endpoint)

    @property
    def account(self) -> str:
        """Who we are, for messages."""
        if self._credentials is None:
            return "anonymous (no credentials were found)"
        return (
            getattr(self._credentials, "service_account_email", None) or "the default credentials"
        )

    def lines(self) -> bytes:
        """The header lines that authorise a request."""
        if self._credentials is None or time.monotonic() < self._fresh_until:
            return self._lines
        with self._lock:
            if time.monotonic() >= self._fresh_until:
                self._build()
            return self._lines

    def renew(self, stale: bytes) -> None:
        """Get a new token, unless another thread replaced that of the `stale` lines already."""
        with self._lock:
            if self._credentials is not None and stale.startswith(self._lines):
                self._refresh()
                self._build()

    def _build(self) -> None:
        """Write the lines from a valid token, and trust them for ten seconds."""
        if not self._credentials.valid:
            self._refresh()
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        self._lines = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items())
        self._fresh_until = time.monotonic() + 10

    def _refresh(self) -> None:
        import google.auth.exceptions
        from google.auth.transport.requests import Request

        try:
            self._credentials.refresh(Request())
        except google.auth.exceptions.TransportError as error:
            raise Transient(f"token: {error}") from error
        except google.auth.exceptions.GoogleAuthError as error:
            if error.retryable:
                raise Transient(f"token: {_first_line(error)}") from error
            raise InputError(
                f"the credentials of {self.account} give no token: {_first_line(error)}; "
                "check GOOGLE_APPLICATION_CREDENTIALS or Workload Identity"
            ) from error


def _message(body: bytes) -> str:
    try:
        return _first_line(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _first_line(body[:200].decode("utf-8", "replace"))


def _first_line(text: object) -> str:
    return (str(text).strip().splitlines() or [""])[0][:200]
