"""An answer in HTTP/1, taken apart as its bytes arrive; nothing in it may be endless."""

import re

BLOCK = 1 << 20
"""Bytes of a body that gather at once; one that may be longer is big."""
MAX_HEAD = 1 << 16
"""Bytes of a head, or of all trailers."""
LOWEST_SPEED = 1000
"""Bytes a second, over any time of waiting as long as the longest silence. A GB takes 12 days at
that speed, so a slower server only blocks a sync."""
_MAX_INTERIM = 16
_MAX_LINE = 1 << 12
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)\b")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_TINY = 1 << 12
_UNTIL_THE_END = -1
_BODILESS = frozenset({204, 304})


class HttpError(OSError):
    """The peer does not speak HTTP/1, says more than is good for us, or stopped in the middle."""


class Pace:
    """Counts the bytes that arrive while we wait, and raises where they are too slow.

    `period` is in seconds. It starts with the first byte of a response: how long a server may take
    until then is limited by the longest silence. Our own pauses do not count.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self.bytes = 0
        self._seconds = 0.0

    def restart(self) -> None:
        """Start to wait for another response."""
        self.bytes, self._seconds = 0, 0.0

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting, in which `bytes` have arrived.

        Raises:
            TimeoutError: too few bytes for the period that ends.
        """
        if not self.bytes:
            return
        self._seconds += seconds
        if self._seconds >= self._period:
            if self.bytes < LOWEST_SPEED * self._seconds:
                raise TimeoutError(f"less than {LOWEST_SPEED} bytes a second")
            self.restart()


class Answer:
    """One answer: give it what arrives with `feed`, until it is `complete`.

    `status` is 0 before the head is there; `length` is what the head says of the body, None where
    only its end will tell; `left` bytes of it are sure to follow. The body gathers, `size` bytes
    of it, until it is taken; a good one of more than `limit` bytes is no answer. A 1xx answer
    before this one is passed over. `bodiless`: as to CONNECT, a body does not follow.
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
        """Bytes of the body that have gathered."""
        return sum(map(len, self._blocks))

    @property
    def big(self) -> bool:
        """Whether more of the body is to come than should gather."""
        return not self.complete and max(self.size, self.length or 0) > BLOCK

    def feed(self, data: bytes) -> None:
        """Take apart what has arrived.

        Raises:
            HttpError: this is no answer, or not a good one.
        """
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                return
        if self._chunk:
            self._read_chunks(data)
        elif self.left == _UNTIL_THE_END:
            self._gather(data)
        else:
            if len(data) > self.left:  # more than was announced: not to be trusted any further
                data, self.keeps = data[: self.left], False
            self._gather(data)
            self.left -= len(data)
            self.complete = not self.left

    def finish(self) -> None:
        """The connection has ended.

        Raises:
            HttpError: in the middle of the answer.
        """
        if not self.status:
            raise HttpError("connection closed without an answer")
        if not self.complete and (self._chunk or self.left != _UNTIL_THE_END):
            raise HttpError("connection closed within the answer")
        self.complete = True

    def take(self) -> list[bytes]:
        """What has gathered of the body since the last call."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def field(self, name: bytes) -> bytes:
        """The value of a header, its name in lower case; b'' if it is not there.

        Raises:
            HttpError: it is there twice.
        """
        key = b"\n" + name + b":"
        start = self._lower.find(key)
        if start < 0:
            return b""
        start += len(key)
        end = self._lower.find(b"\r\n", start)
        if self._lower.find(key, end) >= 0:
            raise HttpError(f"two headers {name.decode()}")
        return self._head[start:end].strip()

    def _read_head(self, data: bytes) -> bytes:
        """Read the head, if it is all there; what follows it."""
        data = self._rest + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if len(data if end < 4 else data[:end]) > MAX_HEAD:
                raise HttpError("endless head")
            if end < 4:
                self._rest = data
                return b""
            self._head, data = data[:end], data[end:]
            match = _STATUS.match(self._head)
            if match is None:
                raise HttpError(f"not HTTP/1: {self._head[:60]!r}")
            status = int(match[2])
            if status >= 200:
                break
            self._extra += 1
            if status == 101 or self._extra > _MAX_INTERIM:
                raise HttpError(f"HTTP {status} without end" if status != 101 else "HTTP 101")
        self.version, self._lower = 10 + int(match[1]), self._head.lower()
        self._rest, self._extra = b"", 0
        self._frame(status)
        self.status = status
        return data

    def _frame(self, status: int) -> None:
        """Find out how long the body is."""
        wish = self.field(b"connection").lower()
        self.keeps = wish != b"close" and (self.version == 11 or wish == b"keep-alive")
        coding, length = self.field(b"transfer-encoding"), self.field(b"content-length")
        if self._bodiless or status in _BODILESS:
            self.length, self.complete = 0, True
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
                raise HttpError(f"more than {self._limit} bytes")
        else:
            self.left, self.keeps = _UNTIL_THE_END, False

    def _read_chunks(self, data: bytes) -> None:
        data, self._rest = self._rest + data, b""
        at = 0
        while not self.complete and at < len(data):
            if self.left:
                block = data[at : at + self.left]
                self._gather(block)
                self.left -= len(block)
                at += len(block)
                continue
            end = data.find(b"\r\n", at)
            if (len(data) if end < 0 else end) - at > _MAX_LINE:
                raise HttpError("endless line in a chunked body")
            if end < 0:
                self._rest = data[at:]
                return
            self._read_line(data[at:end])
            at = end + 2
        if at < len(data):
            self.keeps = False

    def _read_line(self, line: bytes) -> None:
        """A line between the chunks, or after the last."""
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
            raise HttpError(f"more than {self._limit} bytes")
        if len(block) < _TINY and self._blocks and len(self._blocks[-1]) < _TINY:
            self._blocks[-1] += block  # a million chunks of a byte are not a million objects
        else:
            self._blocks.append(block)
