"""Google Cloud Storage: a store through google-cloud-storage, a source through our HTTP client."""

import asyncio
import base64
import binascii
import contextlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import event_loop, store
from kfp_ddp.storage.gcs_objects import GcsObjects, message_of, problem
from kfp_ddp.storage.http.client import HttpClient, HttpPool
from kfp_ddp.storage.http.origin import Request
from kfp_ddp.storage.http.reader import MAX_ERROR, HttpReader
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.retry import is_temporary
from kfp_ddp.storage.source import (
    SourceOptions,
    Transient,
    bucket_and_prefix,
    check_end,
    check_not_empty,
)
from kfp_ddp.storage.store import BLOCK, BoundedWriter, Bucket, ConflictError, Page, Seen

FIELDS = "items(name,size,generation,crc32c),nextPageToken"
LIST_ATTEMPTS = 8
EMULATOR_WORKERS = 4
MAX_PAGE = 1 << 23
"""Bytes of a page: 1,000 names of 1,024 bytes, each six times as long when JSON escapes it."""
_TIMEOUTS = (10.0, 300.0)  # seconds to connect, and between two responses
_MAX_TOKEN = 1 << 12
_MAX_NUMBER = 1 << 63
_NO_CRC = "AAAAAA=="
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
Row = tuple[str, int, int, int]
"""Name below the prefix, bytes, crc32c and generation of an object."""


class GcsStore(Bucket):
    """A prefix of a bucket; STORAGE_EMULATOR_HOST is respected."""

    scheme = "gs"

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._handle: Any = None

    def delete(self, name: str) -> None:
        """Delete the live object; see `Store.delete`."""
        from google.api_core.exceptions import NotFound

        def request() -> None:
            with contextlib.suppress(NotFound):
                self._bucket().blob(self._key(name)).delete(**_options())

        self._call("delete", request)

    def _digest(self, content: BinaryIO) -> str:
        """Return the crc32c as Google Cloud Storage writes it."""
        return crc32c(content)

    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        start = len(self._key(""))
        blobs = self._bucket().list_blobs(
            prefix=self._key(prefix),
            page_size=size or None,
            fields="items(name,size),nextPageToken",
            **_options(),
        )
        for page in blobs.pages:
            yield [(blob.name[start:], blob.size) for blob in page]

    def _look(self, name: str) -> Seen | None:
        blob = self._bucket().get_blob(self._key(name), **_options())
        return blob and Seen(blob.size, blob.crc32c, str(blob.generation))

    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Compare the crc32c of the complete body, also where it took several requests."""
        from google.api_core.exceptions import NotFound, PreconditionFailed
        from google.cloud.storage.exceptions import DataCorruption

        bounded = BoundedWriter(into, limit, f"{self.uri}/{name}")
        blob = self._bucket().blob(self._key(name))
        condition = {"if_generation_match": int(tag)} if tag else {}
        try:
            blob.download_to_file(bounded, raw_download=True, **condition, **_options())
        except PreconditionFailed:
            raise ConflictError from None
        except NotFound:
            if not tag:
                self._check_bucket()
            return False
        if blob.crc32c and blob.crc32c != _base64(bounded.crc):
            raise DataCorruption(None, f"crc32c of {blob.name} is not {blob.crc32c}")
        return True

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Upload on the condition of the generation, and compare the crc32c of the response."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket().blob(self._key(name))
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
        if blob.crc32c != digest:
            raise StorageError(
                f"{self.uri}/{name} arrived with crc32c {blob.crc32c} instead of {digest}: "
                "the transfer is damaged; run the step again"
            )

    def _check_bucket(self) -> None:
        """Raise the client's error for a missing bucket."""
        from google.api_core.exceptions import Forbidden

        with contextlib.suppress(Forbidden):  # the right to list is not needed
            list(self._bucket().list_blobs(max_results=1, prefix=self.prefix, **_options()))

    def _bucket(self) -> Any:
        if self._handle is None:
            from google.cloud import storage

            self._handle = storage.Client().bucket(self.name)
        return self._handle

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


def crc32c(content: BinaryIO) -> str:
    """Return the crc32c of an open file's rest as the store writes it: big-endian, base64."""
    import google_crc32c

    checksum = 0
    while block := content.read(BLOCK):
        checksum = google_crc32c.extend(checksum, block)
    return _base64(checksum)


def _base64(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _options() -> dict[str, Any]:
    """Return timeouts and a retry policy, which is safe as writes have a generation to match."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _TIMEOUTS, "retry": DEFAULT_RETRY.with_timeout(store.PATIENCE)}


class GcsSource:
    """A prefix of a bucket; bodies are pinned to their generation and checked with crc32c."""

    resumes = True

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url = url
        self.max_workers = 1 << 16
        self._bucket, self._prefix = bucket_and_prefix(url)
        self._ahead = options.ahead
        self._objects = GcsObjects(self._bucket, self._prefix)
        self.exposed = self._objects.origin.exposed
        self._pool = HttpPool(self._objects.origin, options.timeout)

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        listing = event_loop.run(self._list())
        check_not_empty(self.url, self._prefix, listing)
        return listing

    def reader(self, threads: Executor) -> HttpReader:
        """Return a reader with a connection of its own."""
        return HttpReader(self._objects, self._pool, threads)

    async def _list(self) -> Listing:
        client, listing, token = HttpClient(self._pool), Listing(), ""
        try:
            for number in itertools.count():
                rows, following = await self._page(client, token)
                if not token:
                    self._pool.open(min(self._ahead, self.max_workers, len(rows)))
                token = following
                if token and self._objects.authorised:
                    client.send(self._request(token))
                for name, size, crc, generation in rows:
                    listing.add(name, size, crc, generation)
                check_end(self.url, number, listing)
                if not token:
                    break
        finally:
            client.close()
        return listing

    def _request(self, token: str) -> Request:
        query = {"prefix": self._prefix, "maxResults": "1000", "fields": FIELDS}
        if token:
            query["pageToken"] = token
        target = f"/storage/v1/b/{quote(self._bucket, safe='')}/o?{urlencode(query)}"
        return Request(self._objects.origin, target, MAX_PAGE, b"", self._objects.secret)

    async def _page(self, client: HttpClient, token: str) -> tuple[list[Row], str]:
        """Return the objects of a page, and the token of the next."""
        renewed = False
        for attempt in range(LIST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 10))
            try:
                await self._objects.authorise()
                request = self._request(token)
                body = bytearray()
                answer = await client.pour(request, body.extend)
                if answer.version == 10:
                    # A server that closes after each response is an emulator with a short queue.
                    self.max_workers, self._ahead = EMULATOR_WORKERS, 0
                if answer.status == HTTPStatus.OK:
                    return self._parse(body)
                message = message_of(b"".join(answer.take())[:MAX_ERROR])
                reason = f"HTTP {answer.status} {message}"
                if answer.status == HTTPStatus.UNAUTHORIZED and not renewed:
                    await self._objects.authorise(request.secret)
                    renewed = True
                    continue
            except (OSError, Transient) as error:
                client.close()
                reason = f"{type(error).__name__}: {error}"
                continue
            if not is_temporary(answer.status):
                reason += f" as {self._objects.account}"
                raise problem("list", self.url, f"gs://{self._bucket}", answer.status, reason)
        raise UnavailableError(
            f"cannot list {self.url}: {reason}, {LIST_ATTEMPTS} times; try again later"
        )

    def _parse(self, body: bytearray) -> tuple[list[Row], str]:
        """Parse a page; raises Transient, and InputError for an object without crc32c."""
        try:
            page = json.loads(body)
            token = page.get("nextPageToken", "")
            if len(token.encode()) > _MAX_TOKEN:
                raise ValueError("the token is too long")
            rows = map(self._row, page.get("items", ()))
            return [row for row in rows if row[0] or row[1]], token
        except InputError:
            raise
        except _MALFORMED as error:
            raise Transient(
                f"invalid page of a listing ({type(error).__name__}: {error})"
            ) from error

    def _row(self, item: dict[str, Any]) -> Row:
        """Parse an object; the marker of the prefix itself has neither name nor bytes."""
        name, size, generation = item["name"], int(item["size"]), int(item.get("generation") or 0)
        if not name.startswith(self._prefix):
            raise ValueError("a name without the prefix")
        if not (0 <= size < _MAX_NUMBER and 0 <= generation < _MAX_NUMBER):
            raise ValueError("a number out of range")
        crc = item.get("crc32c")
        if not crc and (size or name != self._prefix):
            raise InputError(
                f"{self.url}: the listing gives no crc32c for {name!r}, so it could "
                "not be verified; upload the object again"
            )
        raw = binascii.a2b_base64(crc or _NO_CRC)
        if len(raw) != 4:
            raise ValueError("an invalid crc32c")
        return name[len(self._prefix) :], size, int.from_bytes(raw, "big"), generation
