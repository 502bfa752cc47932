"""A manifest on any web server: https://host/folder/_MANIFEST.jsonl, the files beside it.

That is what a version looks like when its folder is served, so one sync can feed another.
"""

import asyncio
import json
from concurrent.futures import Executor
from http import HTTPStatus
from urllib.parse import quote, urlsplit

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import event_loop, manifest
from kfp_ddp.components.data_sync.http.client import HttpClient, HttpPool
from kfp_ddp.components.data_sync.http.origin import (
    Origin,
    Request,
    display,
    netrc_login,
    target_of,
)
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.retry import Retry
from kfp_ddp.components.data_sync.sources import Changed, Entry, Transient
from kfp_ddp.components.data_sync.sources.over_http import RETRYABLE, HttpReader

_MAX_MANIFEST = 1 << 31


class WebSource:
    """The files that a manifest names; bodies are checked with its crc32c."""

    resumes = True

    def __init__(self, url: str, timeout: float) -> None:
        self.url = display(url)
        origin, parts = Origin.of(url), urlsplit(url)
        if not parts.path.endswith(".jsonl"):
            raise InputError(
                f"source {self.url!r} is not a manifest; give https://host/folder/{manifest.NAME}"
            )
        self.max_workers = 256
        self._manifest = Request(origin, target_of(parts), b"", netrc_login(origin.host))
        self._pool = HttpPool(self._manifest.origin, timeout)

    def listing(self) -> Listing:
        """Read the manifest; see `Source.listing`."""
        found = Listing()
        lines = event_loop.run(self._read()).decode("utf-8", "surrogateescape").strip().split("\n")
        try:
            packed = json.loads(lines[0]).get("pack", "none") != "none"
            for line in lines[1:]:
                name, size, _, crc, *_ = json.loads(line)
                found.add(name, size, int(crc, 16))
        except (ValueError, IndexError, AttributeError, TypeError, OverflowError) as error:
            raise InputError(f"{self.url} is not a manifest of data_sync: {error}") from error
        if packed:
            raise InputError(f"{self.url} is of a packed version; its files are in archives")
        if not found:
            raise InputError(f"{self.url} names no files; check that its sync is done")
        return found

    def reader(self, threads: Executor) -> HttpReader:
        """A reader with a connection of its own."""
        return HttpReader(WebObjects(self._manifest), self._pool, threads)

    async def _read(self) -> bytes:
        """The manifest."""
        client, retry, problem = HttpClient(self._pool), Retry(), ""
        try:
            for attempt in range(retry.attempts):
                try:
                    answer, body = await client.whole(self._manifest, _MAX_MANIFEST)
                except OSError as error:
                    problem = f"{type(error).__name__}: {error}"
                else:
                    if answer.version == 10:
                        self.max_workers = 4
                    if answer.status == HTTPStatus.OK:
                        return body
                    problem = f"HTTP {answer.status}"
                    if answer.status not in RETRYABLE:
                        raise InputError(f"cannot read {self.url}: {problem}; check the address")
                await asyncio.sleep(retry.delay(attempt))
        finally:
            client.close()
        raise retry.exhausted(self.url, problem)


class WebObjects:
    """Files in the folder of a manifest; see `HttpObjects`."""

    authorised = True

    def __init__(self, manifest: Request) -> None:
        self._manifest = manifest
        path, mark, query = manifest.target.partition("?")
        self._folder, self._query = path.rpartition("/")[0], mark + query

    async def authorise(self) -> None:
        """See `HttpObjects.authorise`; a user and password stand in the address."""

    def request(self, entry: Entry, offset: int) -> Request:
        """See `HttpObjects.request`; there are no generations here."""
        path = quote(entry.name.encode("utf-8", "surrogateescape"), safe="/")
        return self._manifest._replace(
            target=f"{self._folder}/{path}{self._query}",
            headers=b"Range: bytes=%d-\r\n" % offset if offset else b"",
        )

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """See `HttpObjects.refusal`."""
        if status in RETRYABLE:
            return Transient(f"HTTP {status}")
        if status == HTTPStatus.NOT_FOUND:
            return Changed(entry.name)
        return InputError(f"cannot read {entry.name!r}: HTTP {status}; check the web server")
