"""Google Cloud Storage: google-auth's credentials, the JSON API over our own HTTP client."""

import asyncio
import binascii
import itertools
import json
import os
import re
import threading
import time
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from kfp_ddp.core.errors import InputError, UnavailableError
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.http.client import HttpClient, HttpPool
from kfp_ddp.storage.http.origin import Origin, Request, credentials
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.retry import is_temporary
from kfp_ddp.storage.sources import Changed, Entry, Transient, check_end
from kfp_ddp.storage.sources.over_http import MAX_ERROR, HttpReader

SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
FIELDS = "items(name,size,generation,crc32c),nextPageToken"
LIST_ATTEMPTS = 8
EMULATOR_WORKERS = 4
MAX_PAGE = 1 << 23
"""Bytes of a page: 1,000 names of 1,024 bytes, each six times as long as JSON may write it."""
_MAX_TOKEN = 1 << 12
Row = tuple[str, int, int, int]
"""Name below the prefix, bytes, crc32c and generation of an object."""
_MAX_NUMBER = 1 << 63
_NO_CRC = "AAAAAA=="
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_PLAIN = re.compile(r"[A-Za-z0-9._~/-]*")


class GcsSource:
    """A prefix of a bucket; bodies are pinned to their generation and checked with crc32c."""

    resumes = True

    def __init__(self, url: str, bucket: str, prefix: str, timeout: float, ahead: int = 0) -> None:
        self.url = url
        self.max_workers = 1 << 16
        self._bucket, self._prefix, self._ahead = bucket, prefix, ahead
        self._access = _Access()
        self.exposed = self._access.origin.exposed
        self._objects = GcsObjects(self._access, bucket, prefix)
        self._pool = HttpPool(self._access.origin, timeout)

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        found = event_loop.run(self._list())
        if not found:
            raise InputError(
                f"{self.url} holds no objects below {self._prefix or '/'!r}; "
                "check the prefix and that the upload is done"
            )
        return found

    def reader(self, threads: Executor) -> HttpReader:
        """A reader with a connection of its own."""
        return HttpReader(self._objects, self._pool, threads)

    async def _list(self) -> Listing:
        client, found, token = HttpClient(self._pool), Listing(), ""
        try:
            for number in itertools.count():
                rows, following = await self._page(client, token)
                if not token:
                    self._pool.open(min(self._ahead, self.max_workers, len(rows)))
                token = following
                if token and self._access.fresh:
                    client.send(self._request(token))
                for name, size, crc, generation in rows:
                    found.add(name, size, crc, generation)
                check_end(self.url, number, found)
                if not token:
                    break
        finally:
            client.close()
        return found

    def _request(self, token: str) -> Request:
        query = {"prefix": self._prefix, "maxResults": "1000", "fields": FIELDS}
        if token:
            query["pageToken"] = token
        target = f"/storage/v1/b/{quote(self._bucket, safe='')}/o?{urlencode(query)}"
        return Request(self._access.origin, target, MAX_PAGE, b"", self._access.headers)

    async def _page(self, client: HttpClient, token: str) -> tuple[list[Row], str]:
        """The objects of a page, and the token of the next."""
        renewed = False
        for attempt in range(LIST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 10))
            try:
                await self._access.freshen()
                request = self._request(token)
                body = bytearray()
                answer = await client.pour(request, body.extend)
                if answer.version == 10:
                    # A server that closes after each answer is an emulator with a short queue.
                    self.max_workers, self._ahead = EMULATOR_WORKERS, 0
                if answer.status == HTTPStatus.OK:
                    return self._parsed(body)
                message = _message(b"".join(answer.take())[:MAX_ERROR])
                problem = f"HTTP {answer.status} {message}"
                if answer.status == HTTPStatus.UNAUTHORIZED and not renewed:
                    await self._access.renew(request.secret)
                    renewed = True
                    continue
            except (OSError, Transient) as error:
                client.close()
                problem = f"{type(error).__name__}: {error}"
                continue
            if not is_temporary(answer.status):
                raise self._refused(answer.status, message)
        raise UnavailableError(
            f"cannot list {self.url}: {problem}, {LIST_ATTEMPTS} times; try again later"
        )

    def _refused(self, status: int, message: str) -> InputError:
        if status == HTTPStatus.NOT_FOUND:
            return InputError(
                f"bucket {self._bucket!r} of {self.url} does not exist; check its name"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return InputError(
                f"no right to list {self.url} as {self._access.account} ({message}); "
                "grant roles/storage.objectViewer on the bucket"
            )
        return InputError(f"cannot list {self.url}: HTTP {status} {message}")

    def _parsed(self, body: bytearray) -> tuple[list[Row], str]:
        """Take a page apart.

        Raises:
            Transient: it is none, as where a proxy answers.
            InputError: an object has no crc32c.
        """
        try:
            page = json.loads(body)
            token = page.get("nextPageToken", "")
            if len(token.encode()) > _MAX_TOKEN:
                raise ValueError("a token without end")
            rows = map(self._row, page.get("items", ()))
            return [row for row in rows if row[0] or row[1]], token
        except InputError:
            raise
        except _MALFORMED as error:
            raise Transient(f"no page of a listing ({type(error).__name__}: {error})") from error

    def _row(self, item: dict[str, Any]) -> Row:
        """An object; the marker of the prefix itself has neither name nor bytes."""
        name, size, generation = item["name"], int(item["size"]), int(item.get("generation") or 0)
        if not name.startswith(self._prefix):
            raise ValueError("a name without the prefix")
        if not (0 <= size < _MAX_NUMBER and 0 <= generation < _MAX_NUMBER):
            raise ValueError("a number that can be none")
        crc = item.get("crc32c")
        if not crc and (size or name != self._prefix):
            raise InputError(
                f"{self.url}: the listing gives no crc32c for {name!r}, so it could "
                "not be verified; upload the object again"
            )
        raw = binascii.a2b_base64(crc or _NO_CRC)
        if len(raw) != 4:
            raise ValueError("a crc32c that can be none")
        return name[len(self._prefix) :], size, int.from_bytes(raw, "big"), generation


class GcsObjects:
    """The objects of one prefix, stored bytes as they were listed; see `HttpObjects`."""

    def __init__(self, access: "_Access", bucket: str, prefix: str) -> None:
        self._access, self._bucket = access, bucket
        self._base = f"/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(prefix, safe='')}"

    @property
    def authorised(self) -> bool:
        """See `HttpObjects.authorised`."""
        return self._access.fresh

    async def authorise(self) -> None:
        """See `HttpObjects.authorise`."""
        await self._access.freshen()

    def request(self, entry: Entry, offset: int) -> Request:
        """Pinned to the generation; see `HttpObjects.request`."""
        name = entry.name
        plain = _PLAIN.fullmatch(name)  # most names; quote() is slow
        path = name.replace("/", "%2F") if plain else quote(name, "", errors="surrogateescape")
        target = f"{self._base}{path}?alt=media"
        if entry.generation:
            target += f"&generation={entry.generation}"
        headers = b"Accept-Encoding: gzip\r\n"
        if offset:
            headers += b"Range: bytes=%d-\r\n" % offset
        return Request(self._access.origin, target, entry.size, headers, self._access.headers)

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """See `HttpObjects.refusal`; a token that is refused is renewed."""
        message = _message(body)
        if status == HTTPStatus.UNAUTHORIZED:
            await self._access.renew(secret)
            return Transient(f"HTTP 401 {message}")
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED):
            return Changed(entry.name)
        if is_temporary(status) or status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return Transient(f"HTTP {status} {message}")
        return InputError(
            f"cannot read {entry.name!r} of gs://{self._bucket} as {self._access.account}: "
            f"HTTP {status} {message}; grant roles/storage.objectViewer on the bucket"
        )


class _Access:
    """Endpoint and credentials: STORAGE_EMULATOR_HOST, application default, or anonymous.

    `headers` are complete lines that authorise a request, good for as long as they are `fresh`.
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
        """Take the application's default credentials, if any; the endpoint that goes with them."""
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
        """Who we are, for messages."""
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
        """Get a new token, unless that of the `stale` ones was replaced already.

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
        """Write the headers from a valid token, and trust them for ten seconds."""
        if not self._credentials.valid:
            self._refresh()
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        self.headers = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in headers.items())
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
    """Of words that others chose, what may stand on a terminal."""
    line = (str(text).strip().splitlines() or [""])[0][:200]
    return "".join(char if char.isprintable() else "?" for char in line)
