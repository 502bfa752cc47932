"""A manifest on any web server: https://host/folder/_MANIFEST.jsonl, the files beside it.

That is what a version looks like when its folder is served, so one sync can feed another.
"""

import http.client
import json
from http import HTTPStatus
from urllib.parse import quote, urlsplit

from kfp_ddp.components.data_sync.connection import Connection, Response
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.sources import RETRYABLE, Body, Changed, HttpBody, Transient
from kfp_ddp.components.data_sync.transfer import Retry
from kfp_ddp.training.errors import InputError


class WebSource:
    """The files that a manifest names; bodies are checked with its crc32c."""

    resumes = True

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        if not parts.netloc or not parts.path.endswith(".jsonl"):
            raise InputError(
                f"source {url!r} is no manifest; give https://host/folder/_MANIFEST.jsonl"
            )
        self.url = url
        self.max_workers = 256
        self._endpoint, self._timeout = f"{parts.scheme}://{parts.netloc}", timeout
        self._path = parts.path
        self._query = f"?{parts.query}" if parts.query else ""

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

    def reader(self) -> "WebReader":
        """A reader with a connection of its own."""
        return WebReader(self._endpoint, self._path.rpartition("/")[0], self._query, self._timeout)

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
                retry.wait(attempt)
        finally:
            connection.close()
        raise InputError(f"cannot read {self.url}: {problem}; check the address")


class WebReader:
    """Files below one folder of a web server; see `Reader`."""

    def __init__(self, endpoint: str, folder: str, query: str, timeout: float) -> None:
        self._connection = Connection(endpoint, timeout)
        self._folder, self._query = folder, query

    def open(self, name: str, generation: int, tag: str, size: int, offset: int) -> Body:
        """Start a download; see `Reader.open`."""
        path = quote(name.encode("utf-8", "surrogateescape"), safe="/")
        headers = b"Range: bytes=%d-\r\n" % offset if offset else b""
        try:
            response = self._connection.get(f"{self._folder}/{path}{self._query}", headers)
            if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                return self._body(response, size, offset)
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Transient(f"{type(error).__name__}: {error}") from error
        if response.status in RETRYABLE:
            raise Transient(f"HTTP {response.status}")
        if response.status == HTTPStatus.NOT_FOUND:
            raise Changed(name)
        raise InputError(f"cannot read {name!r}: HTTP {response.status}; check the web server")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _body(self, response: Response, size: int, offset: int) -> Body:
        skip = offset if response.status == HTTPStatus.OK else 0  # a server without ranges
        body = HttpBody(response, self.close)
        while skip and (data := body.read(min(skip, 1 << 20))):
            skip -= len(data)
        if response.length is not None and response.length != size - offset and size:
            length = response.length
            self.close()
            raise Transient(f"length {length} instead of {size - offset}")
        return body
