"""A stand-in for Kubeflow Model Registry in a thread, which follows the contract of its API.

Each request and response is checked against the types of the client (`contract`); an invalid
request is a fault of the code under test, recorded in `violations`. Statuses (404, 409) and the
replacement of all properties are as in the source of the real server, kubeflow/hub.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests import serving
from tests.registry_server.contract import Operation, mismatch, operations
from tests.registry_server.store import RefusedError, Store

Fault = Callable[["Handler"], bool]
"""Called before the operation; returns True if it has answered instead."""


@dataclass
class RegistryServer:
    """The server for tests."""

    store: Store = field(default_factory=Store)
    url: str = ""
    token: str = ""
    """The required bearer token; '' for none."""
    api: str = "v1"
    """The version of the API in paths; there is no other."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Requested operations, with body or query."""
    violations: list[str] = field(default_factory=list)
    faults: list[tuple[str, Fault, int]] = field(default_factory=list)
    """Operation or '*', its fault, and how often."""
    closing: threading.Event = field(default_factory=threading.Event)

    def fail(self, operation: str, fault: Fault, times: int = 1_000_000) -> None:
        """Add a fault to an operation, or to any for '*'."""
        self.faults.append((operation, fault, times))

    def asked(self) -> list[str]:
        """Return the requested operations in order."""
        return [name for name, _ in self.requests]

    def changes(self) -> list[str]:
        """Return those that write."""
        return [name for name in self.asked() if not name.startswith(("get_", "find_"))]

    def fault(self, operation: str) -> Fault | None:
        """Return the fault of the next request for an operation."""
        for at, (name, fault, times) in enumerate(self.faults):
            if name in (operation, "*") and times > 0:
                self.faults[at] = (name, fault, times - 1)
                return fault
        return None


@contextmanager
def serve() -> Iterator[RegistryServer]:
    """Run a server on its own port during the block."""
    server = RegistryServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"registry": server}))
    http.block_on_close = False
    with serving.serving(http) as server.url:
        try:
            yield server
        finally:
            server.closing.set()


class Handler(serving.Handler):
    """One connection."""

    registry: RegistryServer
    lock = threading.Lock()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = parts.path.replace(f"/{self.registry.api}/", "/v1/", 1)
        for operation in operations():
            parameters = operation.match(self.command, path)
            if parameters is not None and f"/{self.registry.api}/" in parts.path:
                self._operate(operation, parameters, dict(parse_qsl(parts.query)), text)
                return
        if self.registry.api == "v1":
            self.registry.violations.append(f"no operation {self.command} {parts.path}")
        self.answer(404, b"404 page not found\n", Content_Type="text/plain; charset=utf-8")

    do_POST = do_PATCH = do_GET

    def _operate(
        self, operation: Operation, parameters: dict[str, str], query: dict[str, str], text: bytes
    ) -> None:
        registry = self.registry
        body = json.loads(text) if text else {}
        registry.requests.append((operation.name, body or query))
        fault = registry.fault(operation.name)
        if fault is not None and fault(self):
            return
        if registry.token and self.headers.get("Authorization") != f"Bearer {registry.token}":
            self.answer(401, {"code": "401", "message": "Unauthorized"})
            return
        unknown = sorted(query.keys() - operation.query)
        problem = mismatch(operation.body, body) if operation.body else ""
        call = getattr(registry.store, operation.name, None)
        if unknown or problem or call is None:
            why = problem or f"unknown in the query: {unknown}" if call else "not implemented"
            registry.violations.append(f"{operation.name}: {why}")
            self.answer(400, {"code": "400", "message": why})
            return
        arguments = (query, body) if operation.body else (query,)
        try:
            with self.lock:
                answer = call(*arguments, **parameters)
        except RefusedError as error:
            self.answer(error.status, {"code": str(error.status), "message": str(error)})
            return
        created = operation.name.startswith(("create", "upsert")) and 201 in operation.answers
        status = 201 if created else 200
        if problem := mismatch(operation.answers[status], answer):
            registry.violations.append(f"our own answer to {operation.name}: {problem}")
        self.answer(status, answer)


def status(code: int, message: str = "injected") -> Fault:
    """Answer with this status."""

    def fault(handler: Handler) -> bool:
        handler.answer(code, {"code": str(code), "message": message})
        return True

    return fault


def page(code: int = 200) -> Fault:
    """Answer with a web page."""

    def fault(handler: Handler) -> bool:
        handler.answer(code, b"<html><body>Log in</body></html>", Content_Type="text/html")
        return True

    return fault


def other_json(handler: Handler) -> bool:
    """Answer with JSON of another API."""
    handler.answer(200, {"items": [{"kind": "Pod"}]})
    return True


def drop(handler: Handler) -> bool:
    """Close the connection without an answer."""
    handler.close_connection = True
    return True


def lose_answer(handler: Handler) -> bool:
    """Do the operation, and lose the answer."""
    handler.wfile = open("/dev/null", "wb")  # noqa: SIM115
    handler.close_connection = True
    return False


def silence(handler: Handler) -> bool:
    """Do not answer while the server runs."""
    handler.registry.closing.wait()
    return drop(handler)
