"""Google Cloud Storage: a store through google-cloud-storage, a source through our HTTP client."""

import base64
import binascii
import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

import google_crc32c

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.core.text import from_json, one_line, printable
from kfp_ddp.storage import event_loop, store
from kfp_ddp.storage.http.answer import Response
from kfp_ddp.storage.http.client import MAX_ERROR, Checksum, HttpClient, HttpSource, base64_digest
from kfp_ddp.storage.http.origin import Origin, Request, credentials, quoted
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import (
    MALFORMED,
    Changed,
    Damaged,
    Entry,
    Pages,
    Retry,
    SourceOptions,
    Transient,
    bucket_and_prefix,
    check_not_empty,
    is_temporary,
    reading_pages,
)
from kfp_ddp.storage.store import BLOCK, Bucket, ConflictError, ObjectState, Page

SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
FIELDS = "items(name,size,generation,crc32c,md5Hash),nextPageToken"
EMULATOR_WORKERS = 4
MAX_PAGE = 1 << 23
"""Bytes of a page: 1,000 names of 1,024 bytes, each six times as long when JSON escapes it."""
_TIMEOUTS = (10.0, store.READ_TIMEOUT)  # seconds to connect, and between two responses
_MAX_TOKEN = 1 << 12
_MAX_NUMBER = 1 << 63
_NO_CRC = "AAAAAA=="
_MD5_BYTES = 16
_OURS = "crc32c="
"""Begin of the digest of an object of ours."""
_NO_MD5 = "md5="
"""End of the digest of an object whose MD5 the server does not list, which equals no other."""
Row = tuple[str, int, int, int, str]
"""Name below the prefix, bytes, crc32c, generation and token of an object."""


def problem(verb: str, uri: str, root: str, status: int | None, reason: str) -> KfpDdpError:
    """Return the error for a response with an error status, None for a fault of the network."""
    if status == HTTPStatus.NOT_FOUND:
        return store.NoBucketError(root)
    if status == HTTPStatus.BAD_REQUEST and "user project" in reason:
        return store.no_permission(verb, uri, reason, "set requester_pays to a project that pays")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        role = "objectViewer" if verb in ("list", "read") else "objectUser"
        advice = f"grant the step's service account roles/storage.{role} on the bucket"
        return store.no_permission(verb, uri, reason, advice)
    temporary = status is None or is_temporary(status)
    return store.failed(verb, uri, reason, "check the network, then run again", temporary=temporary)


def message_of(body: bytes) -> str:
    """Return the message of an error response."""
    message = body[:200].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = from_json(body)["error"]["message"]
    return printable(one_line(message, 200))


class GcsSource(HttpSource):
    """A prefix of a bucket, also of STORAGE_EMULATOR_HOST; bodies are checked with crc32c."""

    resumes = True
    max_workers = 1 << 16

    def __init__(self, url: str, options: SourceOptions) -> None:
        self._bucket, self._prefix = bucket_and_prefix(url)
        bucket = quote(self._bucket, safe="")
        prefix = quote(self._prefix, safe="")
        self._base = f"/download/storage/v1/b/{bucket}/o/{prefix}"
        project = options.requester_pays
        self._billed = {"userProject": project} if project else {}
        self._credentials: Any = None
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator:
            endpoint = emulator if "://" in emulator else f"http://{emulator}"
        else:
            endpoint = self._find_credentials()
        super().__init__(url, Origin.of(endpoint), options.timeout)
        if self._credentials is None:
            self.secret = credentials(urlsplit(endpoint))
            self._trusted_until = math.inf
        self._ahead = options.ahead

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        with reading_pages(self.url):
            listing = event_loop.run(self._list())
        check_not_empty(self.url, self._prefix, listing)
        return listing

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
        email = getattr(self._credentials, "service_account_email", None)
        return email or "the default credentials"

    def _renew(self, refused: bool) -> None:
        if self._credentials is None:
            return
        if refused or not self._credentials.valid:
            self._refresh()
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        self.secret = "".join(lines).encode("latin-1")

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
        """Pin the request to the generation; see `HttpSource.request`."""
        query = urlencode({"alt": "media", **self._billed})
        target = f"{self._base}{quoted(entry.name).replace('/', '%2F')}?{query}"
        if entry.generation:
            target += f"&generation={entry.generation}"
        headers = b"Accept-Encoding: gzip\r\n"
        if offset:
            headers += b"Range: bytes=%d-\r\n" % offset
        return Request(self.origin, target, entry.size, headers, self.secret)

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """See `HttpSource.refusal`; a token that is refused is renewed."""
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

    def has_pin(self, entry: Entry, answer: Response) -> bool:
        """See `HttpSource.has_pin`; an emulator may send no generation, but crc32c is compared."""
        pin = b"%d" % entry.generation
        return answer.field(b"x-goog-generation") in (b"", pin) or pin == b"0"

    def checksum(self, entry: Entry, answer: Response) -> Checksum | None:
        """Return the crc32c of `GcsStore`; a transfer compares that of the listing itself."""
        if not entry.tag.startswith(_OURS):
            return None
        state = google_crc32c.Checksum()  # type: ignore[no-untyped-call]
        expected = entry.tag.removeprefix(_OURS).partition(",")[0]
        return Checksum("crc32c", state, base64_digest(expected.encode()))

    async def _list(self) -> Listing:
        listing = Listing()
        token = ""
        pages = Pages(self.url, self._prefix)
        with contextlib.closing(HttpClient(self.pool)) as client:
            while True:
                rows, following = await self._page(client, token, pages)
                if not token:
                    self.pool.open(min(self._ahead, self.max_workers, len(rows)))
                token = pages.following(following)
                if token and self.authorised:
                    client.send(self._request(token))
                for row in rows:
                    listing.add(*row)
                if not token:
                    return listing

    def _request(self, token: str) -> Request:
        query = {"prefix": self._prefix, "maxResults": "1000", "fields": FIELDS, **self._billed}
        if token:
            query["pageToken"] = token
        target = f"/storage/v1/b/{quote(self._bucket, safe='')}/o?{urlencode(query)}"
        return Request(self.origin, target, MAX_PAGE, b"", self.secret)

    async def _page(self, client: HttpClient, token: str, pages: Pages) -> tuple[list[Row], str]:
        """Return the objects of a page, and the token of the next."""
        renewed = False

        async def attempt() -> tuple[list[Row], str]:
            nonlocal renewed
            await self.authorise()
            request = self._request(token)
            body = bytearray()
            answer = await client.pour(request, body.extend)
            if answer.version == 10:
                # A server that closes after each response is an emulator with a short queue.
                self.max_workers = EMULATOR_WORKERS
                self._ahead = 0
            if answer.status == HTTPStatus.OK:
                return self._parse(body, pages)
            reason = f"HTTP {answer.status} {message_of(b''.join(answer.take())[:MAX_ERROR])}"
            if answer.status == HTTPStatus.UNAUTHORIZED and not renewed:
                await self.authorise(request.secret)
                renewed = True
            elif not is_temporary(answer.status):
                reason += f" as {self.account}"
                raise problem("list", self.url, f"gs://{self._bucket}", answer.status, reason)
            raise Transient(reason)

        return await Retry().call("list", self.url, attempt)

    def _parse(self, body: bytearray, pages: Pages) -> tuple[list[Row], str]:
        """Parse a page; raise Damaged, and InputError for an object without crc32c."""
        try:
            page = from_json(body)
            token = page.get("nextPageToken", "")
            if len(token.encode()) > _MAX_TOKEN:
                raise ValueError("the token is too long")
            rows = [self._row(item, pages) for item in page.get("items", ())]
            return [row for row in rows if row[0] or row[1]], token
        except InputError:
            raise
        except MALFORMED as error:
            raise Damaged(f"invalid page of a listing ({type(error).__name__}: {error})") from error

    def _row(self, item: dict[str, Any], pages: Pages) -> Row:
        """Parse an object; the marker of the prefix itself has neither name nor bytes."""
        name, size = pages.row(item["name"], int(item["size"]))
        generation = int(item.get("generation") or 0)
        if not 0 <= generation < _MAX_NUMBER:
            raise ValueError("a number out of range")
        crc = item.get("crc32c")
        if not crc and (size or name):
            raise InputError(
                f"{self.url}: the listing gives no crc32c for {item['name']!r}, so it could "
                "not be verified; upload the object again"
            )
        raw = binascii.a2b_base64(crc or _NO_CRC)
        if len(raw) != 4:
            raise ValueError("an invalid crc32c")
        token = raw.hex()
        if item.get("md5Hash"):
            md5 = binascii.a2b_base64(item["md5Hash"])
            if len(md5) != _MD5_BYTES:
                raise ValueError("an invalid md5")
            token = f"md5-{md5.hex()}"
        elif generation:  # as a composite object has no MD5
            token = f"generation-{generation}-{raw.hex()}"
        return name, size, int.from_bytes(raw, "big"), generation, token


class GcsStore(Bucket):
    """A prefix of a bucket; STORAGE_EMULATOR_HOST is respected."""

    scheme = "gs"

    def delete(self, name: str) -> None:
        """Delete the live object; see `Store.delete`."""
        from google.api_core.exceptions import NotFound

        def request() -> None:
            with contextlib.suppress(NotFound):
                self._bucket.blob(self._key(name)).delete(**_options())

        self._call("delete", request)

    def _digest(self, content: BinaryIO) -> str:
        """Return crc32c and MD5 as Google Cloud Storage writes them."""
        return digest_of(content)

    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        pages = Pages(self.uri, self._key(""), prefix)
        blobs = self._bucket.list_blobs(
            prefix=self._key(prefix),
            page_size=size or None,
            fields="items(name,size),nextPageToken",
            **_options(),
        )
        for page in blobs.pages:
            yield [pages.row(blob.name, blob.size) for blob in page]
            pages.following(blobs.next_page_token)

    def _stat(self, name: str) -> ObjectState | None:
        blob = self._bucket.get_blob(self._key(name), **_options())
        return blob and ObjectState(blob.size, _digest_of_blob(blob), str(blob.generation))

    def _entry(self, name: str, seen: ObjectState) -> Entry:
        return Entry(name, int(seen.tag), seen.digest, seen.size)

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Upload on the condition of the generation, and compare the crc32c of the response."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket.blob(self._key(name))
        try:
            blob.upload_from_file(
                content,
                size=size,
                checksum="crc32c",
                if_generation_match=int(tag or 0),
                **_options(),
            )
        except PreconditionFailed:
            raise ConflictError from None
        except NotFound:
            if tag:
                raise ConflictError from None
            raise
        arrived = _digest_of_blob(blob)
        if arrived not in (digest, f"{digest.partition(',')[0]},{_NO_MD5}"):
            raise StorageError(
                f"{self.uri}/{name} arrived with {arrived} instead of {digest}: "
                "the transfer is damaged; run the step again"
            )

    @functools.cached_property
    def _source(self) -> "GcsSource":
        return GcsSource(self.uri, SourceOptions(store.READ_TIMEOUT))

    @functools.cached_property
    def _bucket(self) -> Any:
        from google.cloud import storage

        return storage.Client().bucket(self.name)

    def _problem(self, verb: str, error: Exception) -> KfpDdpError | None:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption

        reason = one_line(error).rstrip(".")
        if isinstance(error, DataCorruption):
            return StorageError(
                f"a transfer of {self.uri} is damaged: {reason}; run the step again"
            )
        if isinstance(error, GoogleAuthError) and not error.retryable:
            return InputError(
                f"there are no credentials for {self.uri}: {reason}; use Workload Identity "
                "or set GOOGLE_APPLICATION_CREDENTIALS"
            )
        if isinstance(error, (GoogleAPIError, GoogleAuthError, OSError)):
            return problem(verb, self.uri, self.root, getattr(error, "code", None), reason)
        return None


def digest_of(content: BinaryIO) -> str:
    """Return crc32c and MD5 of an open file's rest as the store writes them, in base64."""
    checksum = 0
    state = hashlib.md5(usedforsecurity=False)
    while block := content.read(BLOCK):
        checksum = google_crc32c.extend(checksum, block)
        state.update(block)
    crc = base64.b64encode(checksum.to_bytes(4, "big")).decode()
    md5 = base64.b64encode(state.digest()).decode()
    return f"{_OURS}{crc},md5={md5}"


def _digest_of_blob(blob: Any) -> str:
    return f"{_OURS}{blob.crc32c},md5={blob.md5_hash or ''}"


def _options() -> dict[str, Any]:
    """Return timeouts and a retry policy, which is safe as writes have a generation to match."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _TIMEOUTS, "retry": DEFAULT_RETRY.with_timeout(store.PATIENCE)}
