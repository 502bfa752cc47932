"""A manifest on a web server, the files beside it: https://host/folder/_MANIFEST.jsonl."""

import contextlib
import math
import re
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import from_json
from kfp_ddp.storage import event_loop, manifest
from kfp_ddp.storage.http.answer import Response
from kfp_ddp.storage.http.client import Checksum, HttpClient, HttpSource
from kfp_ddp.storage.http.origin import Origin, Request, display, netrc_login, quoted, target_of
from kfp_ddp.storage.listing import Listing, expected_digest, new_hash
from kfp_ddp.storage.source import (
    MAX_OBJECTS,
    Damaged,
    Entry,
    Retry,
    SourceOptions,
    Transient,
    is_temporary,
    is_text,
)

MAX_MANIFEST = 1 << 32
"""Bytes of a manifest: `MAX_OBJECTS` lines of 128."""
MAX_LINE = 1 << 16
"""Bytes of a line of it: two names of 4,000 bytes, each six times as long when JSON escapes it."""
_MAX_SIZE = 1 << 63
_CRC = re.compile("[0-9a-f]{8}")


class WebSource(HttpSource):
    """The files that a manifest names, in its folder; bodies are checked with its crc32c."""

    resumes = True
    max_workers = 256
    advice = "check the web server"

    def __init__(self, url: str, options: SourceOptions) -> None:
        super().__init__(display(url), Origin.of(url), options.timeout)
        parts = urlsplit(url)
        if not parts.path.endswith(".jsonl"):
            raise InputError(
                f"source {self.url!r} is not a manifest; give https://host/folder/{manifest.NAME}"
            )
        login = b"" if self.exposed else netrc_login(self.origin.host)
        self._manifest = Request(self.origin, target_of(parts), MAX_MANIFEST, b"", login)
        self._trusted_until = math.inf  # a login does not expire
        path, mark, query = self._manifest.target.partition("?")
        self._folder = path.rpartition("/")[0]
        self._query = mark + query

    def listing(self) -> Listing:
        """Read the manifest; see `Source.listing`."""
        listing = event_loop.run(self._read())
        self.resumes = listing.weak == len(listing)  # a hash is of the complete body
        if not listing:
            raise InputError(f"{self.url} names no files; check that its sync is done")
        return listing

    async def _read(self) -> Listing:
        async def attempt() -> Listing:
            rows = ManifestRows(self.url)
            answer = await client.pour(self._manifest, rows.take)
            if answer.version == 10:
                self.max_workers = 4
            if answer.status == HTTPStatus.OK:
                return rows.end()
            problem = f"HTTP {answer.status}"
            if is_temporary(answer.status):
                raise Transient(problem)
            advice = "check the address; a login of the netrc file needs https"
            raise InputError(f"cannot read {self.url}: {problem}; {advice}")

        with contextlib.closing(HttpClient(self.pool)) as client:
            return await Retry().call("read", self.url, attempt)

    def checksum(self, entry: Entry, answer: Response) -> Checksum | None:
        """Return the hash of the manifest, None where it has a crc32c alone."""
        state = new_hash(entry.tag)
        return state and Checksum(state.name.upper(), state, expected_digest(entry.tag, 0))

    def request(self, entry: Entry, offset: int) -> Request:
        """See `HttpSource.request`; a web server has no generations."""
        return self._manifest._replace(
            target=f"{self._folder}/{quoted(entry.name)}{self._query}",
            limit=entry.size,
            headers=b"Range: bytes=%d-\r\n" % offset if offset else b"",
        )


class ManifestRows:
    """Parses a foreign manifest as it arrives; `url` is as it may be shown."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = b""
        self._lines = 0
        self._listing = Listing()
        self._files: object = None

    def take(self, block: bytes) -> None:
        """Parse the next bytes; raise InputError if they are not of a manifest."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > MAX_LINE:
            raise self._wrong("has no end")

    def end(self) -> Listing:
        """Return its files; raise Damaged if it was cut."""
        if self._rest:
            self._take(self._rest)
        if not self._lines:
            raise self._wrong("is missing")
        if self._files not in (None, len(self._listing)):
            raise Damaged(f"{len(self._listing)} lines of {self._files!r} files")
        return self._listing

    def _take(self, line: bytes) -> None:
        self._lines += 1
        if len(line) > MAX_LINE or self._lines > MAX_OBJECTS:
            raise self._wrong("is too long, or there are too many lines")
        try:
            read = from_json(line.decode())
        except ValueError as error:
            raise self._wrong("is not JSON") from error
        if self._lines > 1:
            self._take_row(read)
        elif not isinstance(read, dict):
            raise self._wrong("is not a header")
        elif read.get("pack", "none") != "none":
            raise InputError(f"{self._url} is of a packed version, whose files are in archives")
        else:
            self._files = read.get("files")

    def _take_row(self, row: Any) -> None:
        types = [type(column) for column in row[:4]] if isinstance(row, list) else []
        if types[:2] == [str, int] and types[3:] == [str]:
            name, size, _, crc = row[:4]
            valid = is_text(name) and 0 <= size < _MAX_SIZE and _CRC.fullmatch(crc)
            if valid:
                token = row[2] if type(row[2]) is str and new_hash(row[2]) else crc
                self._listing.add(name, size, int(crc, 16), tag=token)
                return
        raise self._wrong("is not [name, size, token, crc32c]")

    def _wrong(self, why: str) -> InputError:
        return InputError(f"{self._url} is not a manifest of data_sync: line {self._lines} {why}")
