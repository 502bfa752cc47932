"""A response in HTTP/1, parsed as its bytes arrive; the size of every part is bounded."""

import re

BLOCK = 1 << 20
"""Bytes of a body that are buffered; a longer body is big."""
MAX_HEAD = 1 << 16
"""Bytes of a head, or of all trailers."""
LOWEST_SPEED = 1000
"""Bytes a second, averaged over the timeout. A GB takes 12 days at that speed."""
_MAX_INTERIM = 16
_MAX_LINE = 1 << 12
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)\b")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_TINY = 1 << 12
_UNTIL_THE_END = -1
_BODILESS = frozenset({204, 304})


class HttpError(OSError):
    """The response is not HTTP/1, has too many bytes, or is incomplete."""


class TooLongError(HttpError):
    """The body is longer than the limit."""


class MinimumRate:
    """Counts the bytes of a response; raises where they are too slow over `period` seconds."""

    def __init__(self, period: float) -> None:
        self._period = period
        self.bytes = 0
        self._seconds = 0.0

    def restart(self) -> None:
        """Start another response."""
        self.bytes = 0
        self._seconds = 0.0

    def waited(self, seconds: float) -> None:
        """Add seconds in which `bytes` have arrived; raise TimeoutError if they are too slow."""
        if not self.bytes:
            return
        self._seconds += seconds
        if self._seconds >= self._period:
            if self.bytes < LOWEST_SPEED * self._seconds:
                raise TimeoutError(f"less than {LOWEST_SPEED} bytes a second")
            self.restart()


class Response:
    """One response: `feed` it the bytes that arrive until it is `complete`.

    `status` is 0 before the head is complete; `left` bytes of the body must follow. `limit` is the
    maximum of a body with a status below 300; `bodiless` means that there is none (CONNECT).
    """

    status = 0
    version = 11
    length: int | None = None
    keeps = complete = False
    left = 0
    _head = _lower = _rest = b""
    _chunk = ""  # which line of a chunked body is next: "size", "end" or "trailer"
    _extra = 0  # interim answers, then bytes of trailers

    def __init__(self, limit: int, bodiless: bool = False) -> None:
        self._limit = self._room = limit
        self._bodiless = bodiless
        self._blocks: list[bytes] = []

    @property
    def size(self) -> int:
        """Bytes of the body in the buffer."""
        return sum(map(len, self._blocks))

    @property
    def big(self) -> bool:
        """Whether the body is longer than the buffer should be."""
        return not self.complete and max(self.size, self.length or 0) > BLOCK

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; raise HttpError."""
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                return
        if self._chunk:
            self._read_chunks(data)
        elif self.left == _UNTIL_THE_END:
            self._gather(data)
        else:
            if len(data) > self.left:  # more than announced
                data = data[: self.left]
                self.keeps = False
            self._gather(data)
            self.left -= len(data)
            self.complete = not self.left

    def finish(self) -> None:
        """End the response with its connection; raise HttpError where it is incomplete."""
        if not self.status:
            raise HttpError("connection closed without an answer")
        until_the_end = self.left == _UNTIL_THE_END and not self._chunk
        if not self.complete and not until_the_end:
            raise HttpError("connection closed within the answer")
        self.complete = True

    def take(self) -> list[bytes]:
        """Return and empty the buffer."""
        blocks = self._blocks
        self._blocks = []
        return blocks

    def field(self, name: bytes) -> bytes:
        """Return the value of a header by its name in lower case; b'' without it."""
        key = b"\n" + name + b":"
        start = self._lower.find(key)
        if start < 0:
            return b""
        start += len(key)
        end = self._lower.find(b"\r\n", start)
        if self._lower.find(key, end) >= 0:
            raise HttpError(f"two headers {name.decode()}")
        return self._head[start:end].strip()

    def suffixes(self, prefix: bytes) -> list[bytes]:
        """Return what follows `prefix` in the lower-case names of headers."""
        return [rest.partition(b":")[0] for rest in self._lower.split(b"\n" + prefix)[1:]]

    def _read_head(self, data: bytes) -> bytes:
        """Parse the head if it is complete; return the bytes after it."""
        data = self._rest + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            is_complete = end >= 4
            size = end if is_complete else len(data)
            if size > MAX_HEAD:
                raise HttpError("endless head")
            if not is_complete:
                self._rest = data
                return b""
            self._head = data[:end]
            data = data[end:]
            match = _STATUS.match(self._head)
            if match is None:
                raise HttpError(f"not HTTP/1: {self._head[:60]!r}")
            status = int(match[2])
            if status >= 200:
                break
            self._extra += 1
            if status == 101:
                raise HttpError("HTTP 101")
            if self._extra > _MAX_INTERIM:
                raise HttpError(f"HTTP {status} without end")
        self.version = 10 + int(match[1])
        self._lower = self._head.lower()
        self._rest = b""
        self._extra = 0
        self._frame(status)
        self.status = status
        return data

    def _frame(self, status: int) -> None:
        wish = self.field(b"connection").lower()
        self.keeps = wish != b"close" if self.version == 11 else wish == b"keep-alive"
        coding = self.field(b"transfer-encoding")
        length = self.field(b"content-length")
        if self._bodiless or status in _BODILESS:
            self.length = 0
            self.complete = True
            self.keeps = self.keeps or self._bodiless  # a tunnel lasts
        elif coding:
            if coding.lower() != b"chunked":
                raise HttpError(f"transfer-encoding {coding[:60]!r}")
            self._chunk = "size"
        elif length:
            if not length.isdigit() or len(length) > 18:
                raise HttpError(f"content-length {length[:60]!r}")
            self.length = self.left = int(length)
            self.complete = not self.left
            if self.length > self._room and status < 300:
                raise TooLongError(f"more than {self._limit:,} bytes")
        else:
            self.left = _UNTIL_THE_END
            self.keeps = False

    def _read_chunks(self, data: bytes) -> None:
        data = self._rest + data
        self._rest = b""
        start = 0
        while not self.complete and start < len(data):
            if self.left:
                block = data[start : start + self.left]
                self._gather(block)
                self.left -= len(block)
                start += len(block)
                continue
            end = data.find(b"\r\n", start)
            line_end = len(data) if end < 0 else end
            if line_end - start > _MAX_LINE:
                raise HttpError("endless line in a chunked body")
            if end < 0:
                self._rest = data[start:]
                return
            self._read_line(data[start:end])
            start = end + 2
        if start < len(data):  # more than announced
            self.keeps = False

    def _read_line(self, line: bytes) -> None:
        """Parse a line between the chunks, or after the last."""
        if self._chunk == "size":
            match = _SIZE.fullmatch(line)
            if match is None:
                raise HttpError(f"chunk size {line[:60]!r}")
            self.left = int(match[1], 16)
            self._chunk = "end" if self.left else "trailer"
        elif self._chunk == "end":
            if line:
                raise HttpError("a chunk is longer than it says")
            self._chunk = "size"
        else:
            self._extra += len(line)
            if self._extra > MAX_HEAD:
                raise HttpError("endless trailers")
            self.complete = not line

    def _gather(self, block: bytes) -> None:
        if not block:
            return
        self._room -= len(block)
        if self._room < 0 and self.status < 300:
            raise TooLongError(f"more than {self._limit:,} bytes")
        if len(block) < _TINY and self._blocks and len(self._blocks[-1]) < _TINY:
            self._blocks[-1] += block  # not a million objects of a byte
        else:
            self._blocks.append(block)
