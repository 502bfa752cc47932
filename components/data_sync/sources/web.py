"""A manifest on any web server: https://host/folder/_MANIFEST.jsonl, the files beside it.

That is what a version looks like when its folder is served, so one sync can feed another.
"""

import http.client
import json
import time
from http import HTTPStatus
from urllib.parse import quote, urlsplit

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import manifest
from kfp_ddp.components.data_sync.connection import Connection
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.retry import Retry
from kfp_ddp.components.data_sync.sources import Changed, Transient
from kfp_ddp.components.data_sync.sources.over_http import RETRYABLE, HttpReader


class WebSource:
    """The files that a manifest names; bodies are checked with its crc32c."""

    resumes = True

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        if not parts.netloc or not parts.path.endswith(".jsonl"):
            raise InputError(
                f"source {url!r} is not a manifest; give https://host/folder/{manifest.NAME}"
            )
        self.url = url
        self.max_workers = 256
        self._endpoint, self._timeout = f"{parts.scheme}://{parts.netloc}", timeout
        self._path = parts.path
        self._query = f"?{parts.query}" if parts.query else ""
        folder = parts.path.rpartition("/")[0]
        self.objects = WebObjects(self._endpoint, folder, self._query, timeout)

    def listing(self) -> Listing:
        """Read the manifest; see `Source.listing`."""
        found = Listing()
        lines = self._manifest().decode("utf-8", "surrogateescape").strip().split("\n")
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

    def reader(self) -> HttpReader:
        """A reader with a connection of its own."""
        return HttpReader(self.objects)

    def _manifest(self) -> bytes:
        connection = Connection(self._endpoint, self._timeout)
        retry, problem = Retry(), ""
        try:
            for attempt in range(retry.attempts):
                try:
                    response = connection.get(quote(self._path, safe="/%") + self._query)
                    body = response.read()
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    problem = f"{type(error).__name__}: {error}"
                else:
                    if response.version == 10:
                        self.max_workers = 4
                    if response.status == HTTPStatus.OK:
                        return body
                    problem = f"HTTP {response.status}"
                    if response.status not in RETRYABLE:
                        break
                time.sleep(retry.delay(attempt))
        finally:
            connection.close()
        raise InputError(f"cannot read {self.url}: {problem}; check the address")


class WebObjects:
    """Files below one folder of a web server; see `HttpObjects`."""

    def __init__(self, endpoint: str, folder: str, query: str, timeout: float) -> None:
        self.endpoint, self.timeout = endpoint, timeout
        self._folder, self._query = folder, query

    def request(self, name: str, generation: int, offset: int) -> tuple[str, bytes]:
        """See `HttpObjects.request`; there are no generations here."""
        path = quote(name.encode("utf-8", "surrogateescape"), safe="/")
        headers = b"Range: bytes=%d-\r\n" % offset if offset else b""
        return f"{self._folder}/{path}{self._query}", headers

    def refusal(self, name: str, status: int, body: bytes, headers: bytes) -> Exception:
        """See `HttpObjects.refusal`."""
        if status in RETRYABLE:
            return Transient(f"HTTP {status}")
        if status == HTTPStatus.NOT_FOUND:
            return Changed(name)
        return InputError(f"cannot read {name!r}: HTTP {status}; check the web server")
