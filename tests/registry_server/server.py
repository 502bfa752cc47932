"""Kubeflow Model Registry's contract in a thread: no registry, but what one has to keep to.

Each request and each answer is held against the types of the client (`contract`); a request that
does not fit is a fault of the test's subject, and kept in `violations`. How a real server answers
(404 and 409, properties that are replaced as a whole) is read from its source, kubeflow/hub.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.registry_server.contract import Operation, departs, operations
from tests.registry_server.store import Refused, Store
from tests.serving import serving as in_thread

Fault = Callable[["Handler"], bool]
"""Called before the operation; True where it has answered in its place."""


@dataclass
class RegistryServer:
    """The server as tests see it."""

    store: Store = field(default_factory=Store)
    url: str = ""
    token: str = ""
    """The token that requests must bear; '' for none."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Operations that were asked for, with what was sent."""
    violations: list[str] = field(default_factory=list)
    faults: list[tuple[str, Fault, int]] = field(default_factory=list)
    """Operation or '*', what it meets, and how often."""
    closing: threading.Event = field(default_factory=threading.Event)

    def fail(self, operation: str, fault: Fault, times: int = 1_000_000) -> None:
        """Let requests for an operation, or any for '*', meet a fault."""
        self.faults.append((operation, fault, times))

    def asked(self) -> list[str]:
        """The operations that were asked for, in turn."""
        return [name for name, _ in self.requests]

    def changes(self) -> list[str]:
        """Those that write."""
        return [name for name in self.asked() if not name.startswith(("get_", "find_"))]

    def fault(self, operation: str) -> Fault | None:
        """What the next request for an operation meets."""
        for at, (wanted, fault, times) in enumerate(self.faults):
            if wanted in (operation, "*") and times > 0:
                self.faults[at] = (wanted, fault, times - 1)
                return fault
        return None


@contextmanager
def serving() -> Iterator[RegistryServer]:
    """A server on a port of its own, ended with the block."""
    server = RegistryServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"registry": server}))
    http.block_on_close = False
    with in_thread(http) as server.url:
        try:
            yield server
        finally:
            server.closing.set()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    registry: RegistryServer
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for operation in operations():
            found = operation.match(self.command, parts.path)
            if found is not None:
                self._asked(operation, found, dict(parse_qsl(parts.query)), text)
                return
        self.registry.violations.append(f"no operation {self.command} {parts.path}")
        self.send(404, {"code": "", "message": "404 page not found"})

    do_POST = do_PATCH = do_GET  # noqa: N815

    def _asked(
        self, operation: Operation, inner: dict[str, str], query: dict[str, str], text: bytes
    ) -> None:
        registry = self.registry
        body = json.loads(text) if text else {}
        registry.requests.append((operation.name, body or query))
        fault = registry.fault(operation.name)
        if fault is not None and fault(self):
            return
        if registry.token and self.headers.get("Authorization") != f"Bearer {registry.token}":
            self.send(401, {"code": "401", "message": "Unauthorized"})
            return
        wrong = sorted(query.keys() - operation.query)
        departure = departs(operation.body, body) if operation.body else ""
        call = getattr(registry.store, operation.name, None)
        if wrong or departure or call is None:
            why = departure or f"unknown in the query: {wrong}" if call else "not played"
            registry.violations.append(f"{operation.name}: {why}")
            self.send(400, {"code": "400", "message": why})
            return
        try:
            with self.lock:
                answer = call(query, body, **inner) if operation.body else call(query, **inner)
        except Refused as refused:
            self.send(refused.status, {"code": str(refused.status), "message": str(refused)})
            return
        made = operation.name.startswith(("create", "upsert")) and 201 in operation.answers
        status = 201 if made else 200
        if departure := departs(operation.answers[status], answer):
            registry.violations.append(f"our own answer to {operation.name}: {departure}")
        self.send(status, answer)

    def send(self, status: int, content: Any, kind: str = "application/json") -> None:
        """Answer, and end the connection."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def status(code: int, message: str = "injected") -> Fault:
    """An answer of the server with this status."""

    def fault(handler: Handler) -> bool:
        handler.send(code, {"code": str(code), "message": message})
        return True

    return fault


def page(code: int = 200) -> Fault:
    """The page of something else."""

    def fault(handler: Handler) -> bool:
        handler.send(code, b"<html><body>Log in</body></html>", "text/html")
        return True

    return fault


def other_json(handler: Handler) -> bool:
    """JSON of something else."""
    handler.send(200, {"items": [{"kind": "Pod"}]})
    return True


def drop(handler: Handler) -> bool:
    """The connection ends without an answer."""
    handler.close_connection = True
    return True


def lose_answer(handler: Handler) -> bool:
    """What is asked for is done, and the answer is lost."""
    handler.wfile = open("/dev/null", "wb")  # noqa: SIM115
    handler.close_connection = True
    return False


def silence(handler: Handler) -> bool:
    """No answer, for as long as the server is up."""
    handler.registry.closing.wait()
    return drop(handler)
