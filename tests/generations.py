"""A bucket that checks generations, which the emulator does not, with faults."""

import base64
import contextlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

from tests.serving import Handler


class Bucket:
    """The part of the JSON API that an upload uses, with generations and faults."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.order: list[str] = []
        self.sessions: dict[str, tuple[str, str]] = {}
        self.fault = ""
        self.fault_after = 0
        self.before_write: Callable[[], None] | None = None
        """Called between a reading and a writing, as another writer."""
        self.lose_answers = 0
        """Number of writes that are done and answered by an error."""
        self.endless = self.garbled = ""
        """Names of objects that are sent without an end, or with other bytes."""
        self.endless_size = ""
        self.sent = 0
        self._lock = threading.Lock()
        self._last = 0

    def describe(self, name: str) -> dict[str, Any]:
        """Return the metadata of an object."""
        content, generation = self.objects[name]
        crc = google_crc32c.value(content)
        return {
            "name": name,
            "bucket": "models",
            "size": str(len(content)),
            "generation": str(generation),
            "crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode(),
        }

    def put(self, name: str, content: bytes) -> None:
        """Write as another writer."""
        self._last += 1
        self.objects[name] = (content, self._last)

    def store(self, name: str, match: str | None, content: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and answer of an upload."""
        with self._lock:
            return self._store(name, match, content)

    def _store(self, name: str, match: str | None, content: bytes) -> tuple[int, dict[str, Any]]:
        if self.before_write:
            self.before_write()
        if self.fault and len(self.order) >= self.fault_after:
            if self.fault == "race":
                self.objects[name] = (b"another writer", 77)
            if self.fault == "forbidden":
                return 403, {"error": {"message": "no storage.objects.create access"}}
            if self.fault == "damage":
                content = content[:-1] + b"?"
        if match is not None and int(match) != self.objects.get(name, (b"", 0))[1]:
            return 412, {"error": {"message": "conditionNotMet"}}
        self.order.append(name)
        self.put(name, content)
        if self.lose_answers:
            self.lose_answers -= 1
            return 503, {"error": {"message": "backendError"}}
        return 200, self.describe(name)


def handler(bucket: Bucket) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests to the bucket."""

    class Visit(Handler):
        protocol_version = "HTTP/1.1"

        def answer_json(self, status: int, content: dict[str, Any], **headers: str) -> None:
            self.answer(
                status, json.dumps(content).encode(), Content_Type="application/json", **headers
            )

        def send(self, name: str, match: str) -> None:
            content, generation = bucket.objects[name]
            if match and int(match) != generation:
                self.answer_json(412, {"error": {"message": "conditionNotMet"}})
                return
            if name == bucket.garbled:
                content = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
            length = {"its size": 1 << 40, "a small size": len(content)}.get(bucket.endless_size)
            size = length if name == bucket.endless else len(content)
            self.send_response(200)
            if size is not None:
                self.send_header("Content-Length", str(size))
            self.send_header("X-Goog-Hash", f"crc32c={bucket.describe(name)['crc32c']}")
            self.end_headers()
            self.wfile.write(content)
            with contextlib.suppress(OSError):
                while name == bucket.endless:
                    bucket.sent += self.wfile.write(bytes(1 << 16))
            self.close_connection = name == bucket.endless

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            name = unquote(parts.path.partition("/o/")[2])
            query = parse_qs(parts.query)
            if name in bucket.objects and query.get("alt") == ["media"]:
                self.send(name, query.get("ifGenerationMatch", [""])[0])
            elif not name:
                prefix = query.get("prefix", [""])[0]
                names = sorted(one for one in bucket.objects if one.startswith(prefix))
                self.answer_json(200, {"items": [bucket.describe(one) for one in names]})
            elif name in bucket.objects:
                self.answer_json(200, bucket.describe(name))
            else:
                self.answer_json(404, {"error": {"message": "No such object"}})

        def do_POST(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            match = query.get("ifGenerationMatch", [None])[0]
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if query["uploadType"] == ["resumable"]:
                token = str(len(bucket.sessions))
                bucket.sessions[token] = (json.loads(body)["name"], match or "")
                host = self.headers["Host"]
                self.answer_json(200, {}, Location=f"http://{host}/session/{token}")
                return
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
            assert boundary is not None
            _, head, tail, _ = body.split(b"--" + boundary[1].encode())
            name = json.loads(head.split(b"\r\n\r\n", 1)[1])["name"]
            content = tail.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
            self.answer_json(*bucket.store(name, match, content))

        def do_PUT(self) -> None:
            name, match = bucket.sessions[self.path.rsplit("/", 1)[1]]
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer_json(*bucket.store(name, match or None, content))

        def do_DELETE(self) -> None:
            name = unquote(urlsplit(self.path).path.partition("/o/")[2])
            bucket.objects.pop(name, None)
            self.answer_json(200, {})

    return Visit
