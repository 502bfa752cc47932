"""A stand-in for Kubeflow Model Registry in a thread, which follows the contract of its API.

Each request and response is checked against the types of the client (`contract`); an invalid
request is a fault of the code under test, recorded in `violations`. Statuses (404, 409) and the
replacement of all properties are as in the source of the real server, kubeflow/hub.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests import serving
from tests.kfp_server import faults
from tests.registry_server.contract import Operation, mismatch, operations
from tests.registry_server.store import RefusedError, Store
from tests.serving import Fault, Faulty


@dataclass
class RegistryServer(Faulty):
    """The server for tests."""

    store: Store = field(default_factory=Store)
    api: str = "v1"
    """The version of the API in paths; there is no other."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Requested operations, with body or query."""

    def asked(self) -> list[str]:
        """Return the requested operations in order."""
        return [name for name, _ in self.requests]

    def changes(self) -> list[str]:
        """Return those that write."""
        return [name for name in self.asked() if not name.startswith(("get_", "find_"))]


@contextmanager
def serve() -> Iterator[RegistryServer]:
    """Run a server on its own port during the block."""
    server = RegistryServer()
    with server.serve(Handler, ("127.0.0.1", 0)):
        yield server


class Handler(serving.Handler):
    """One connection."""

    stand_in: RegistryServer
    lock = threading.Lock()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = parts.path.replace(f"/{self.stand_in.api}/", "/v1/", 1)
        for operation in operations():
            parameters = operation.match(self.command, path)
            if parameters is not None and f"/{self.stand_in.api}/" in parts.path:
                self._operate(operation, parameters, dict(parse_qsl(parts.query)), text)
                return
        if self.stand_in.api == "v1":
            self.stand_in.violations.append(f"no operation {self.command} {parts.path}")
        self.answer(404, b"404 page not found\n", Content_Type="text/plain; charset=utf-8")

    do_POST = do_PATCH = do_GET

    def _operate(
        self, operation: Operation, parameters: dict[str, str], query: dict[str, str], text: bytes
    ) -> None:
        registry = self.stand_in
        body = json.loads(text) if text else {}
        registry.requests.append((operation.name, body or query))
        fault = registry.fault(operation.name)
        if fault and not fault(self, registry):
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
    return faults.answer(json.dumps({"code": str(code), "message": message}), code)
