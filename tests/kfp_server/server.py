"""A KFP API server in a thread, that answers as a real 2.17 one was recorded to.

Each request is held against the published contract: what does not fit is a fault of the test's
subject, and kept in `violations`.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.kfp_nodes import States, Workflow, details
from tests.kfp_server import contract, faults
from tests.kfp_server.catalog import Row
from tests.kfp_server.refusal import RefusalError, gateway
from tests.kfp_server.runs import OVER, Store
from tests.kfp_server.specs import NotYamlError
from tests.serving import Faulty, Handler

RECORDED = Path(__file__).with_name("recorded")
MULTI_USER = RECORDED / "multi_user"
NODE_LOG = re.compile(r"/apis/v1alpha1/runs/([^/]+)/nodes/([^/]+)/log")
"""The path that the contract lacks, as the server answers it without a check of rights."""


@dataclass(frozen=True)
class Request:
    """One that came."""

    operation: str
    """As the contract names it: create_run, list_pipelines and so on."""
    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]
    """Their names in lower case."""


@dataclass
class KfpServer(Faulty):
    """The server as tests see it."""

    store: Store
    cookie: str = ""
    """The cookie that requests must bring; '' for none."""
    requests: list[Request] = field(default_factory=list)
    logs: dict[str, bytes] = field(default_factory=dict)
    """By the node's id."""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Of the UI's server, by `bucket/key`."""

    def requests_for(self, operation: str) -> list[Request]:
        """The requests for an operation, such as create_run."""
        return [one for one in self.requests if one.operation == operation]

    def record(self, name: str, **other: Any) -> str:
        """Have the run of recorded/NAME.json, with other fields set; its id."""
        record = json.loads((RECORDED / f"{name}.json").read_text())
        run = record.get("answer", record.get("body")) | other
        if run["experiment_id"] not in self.store.experiments:
            run["experiment_id"] = next(iter(self.store.experiments))
        if not isinstance(run.get("pipeline_spec", {}), dict):
            del run["pipeline_spec"]
        self.store.runs[run["run_id"]] = run
        return str(run["run_id"])

    def put_run(self, run_id: str, state: str, tasks: States) -> None:
        """Let a run be in a state, with its tasks in theirs: {"preflight": "SUCCEEDED"}."""
        spec = self.store.spec_of(run_id)
        workflow = f"{spec['pipelineInfo']['name']}-{run_id[:5]}"
        nodes = Workflow(spec, workflow, over=state in OVER).lay(tasks)
        self.store.runs[run_id]["run_details"] = {"task_details": details(nodes, run_id)}
        self.store.set_state(run_id, state)


@contextmanager
def serving(listen: tuple[str, int] = ("127.0.0.1", 0), **store: Any) -> Iterator[KfpServer]:
    """A server on a port of its own, ended with the block."""
    server = KfpServer(Store(**store))
    with server.serve(_Handler, listen):
        yield server


class _NoSessionError(Exception):
    """A request without the cookie."""


class _Handler(Handler):
    stand_in: KfpServer
    lock = threading.Lock()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = dict(parse_qsl(parts.query))
        called = _find(self.command, parts.path)
        raw = {"/artifacts/get": "artifact"}.get(parts.path, "")
        raw = "node_log" if NODE_LOG.fullmatch(parts.path) else raw
        name = called[0].name if called else raw
        body: Any = data
        if called and called[0].body not in ("", "file"):
            body = json.loads(data) if data else {}
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = Request(name, self.command, unquote(parts.path), query, body, headers)
        with self.lock:
            self.stand_in.requests.append(request)
            fault = self.stand_in.fault(name)
        try:
            if fault and not fault(self, self.stand_in):
                return
            if raw:
                self._check_login(request)
                getattr(self, f"_{raw}")(request)
                return
            self.answer(200, self._called(called, request))
        except RefusalError as refusal:
            self.answer(refusal.status, refusal.body)
        except _NoSessionError:
            faults.login_page(self, self.stand_in)
        except NotYamlError:
            faults.silence(self, self.stand_in)  # as the real one, which never answered

    do_POST = do_DELETE = do_PATCH = do_PUT = do_GET

    def _called(self, called: Any, request: Request) -> Row:
        self._check_login(request)
        if not called:
            unknown = f"{request.method} {request.path} is no operation of KFP"
            self.stand_in.violations.append(unknown)
            raise gateway(404, "Not Found", request.path)
        operation, values = called
        surplus = set(request.query) - operation.query
        wrong = [f"query {one}" for one in sorted(surplus)]
        if operation.body not in ("", "file"):
            wrong += contract.faults(request.body, operation.body, "body")
        if wrong:
            self.stand_in.violations += [f"{operation.name}: {one}" for one in wrong]
            raise gateway(400, "Bad Request", wrong[0])
        method: Callable[..., Row] | None = getattr(self.stand_in.store, operation.name, None)
        if method is None:
            raise NotImplementedError(f"the contract server has no {operation.name} yet")
        with self.lock:
            if operation.body == "file":
                answer = method(_file(request), request.query)
            elif operation.body not in ("", "object"):
                answer = method(request.body, request.query, **values)
            else:
                answer = method(request.query, **values)
            answer = dict(json.loads(json.dumps(answer)))
        wrong = contract.faults(answer, operation.answer, "answer")
        # The recorded server's healthz says more than the contract knows of.
        assert not wrong or operation.name == "get_healthz", wrong
        return answer

    def _node_log(self, request: Request) -> None:
        log = self.stand_in.logs.get(request.path.split("/")[-2])
        if log is None:
            log = json.loads((MULTI_USER / "node_log_missing.json").read_text())["body"]
            log = json.dumps(log).encode()
        self.answer(200, log, Content_Type="text/plain")

    def _artifact(self, request: Request) -> None:
        server, query = self.stand_in, request.query
        if server.store.multi_user and query.get("namespace") not in server.store.namespaces:
            self.answer(403, b"not authorized to GET viewers", Content_Type="text/plain")
            return
        content = server.artifacts.get(f"{query['bucket']}/{query['key']}")
        if content is None or query["source"] not in ("minio", "s3", "gcs"):
            self.answer(500, b"Failed to get object: NoSuchKey", Content_Type="text/plain")
            return
        self.answer(200, content, Content_Type="application/octet-stream")

    def _check_login(self, request: Request) -> None:
        token, cookies = request.headers.get("authorization", ""), request.headers.get("cookie", "")
        if self.stand_in.token and token != f"Bearer {self.stand_in.token}":
            raise gateway(
                401,
                "Failed to authenticate: Unauthenticated",
                "Request header error: there is no user identity header.",
            )
        if self.stand_in.cookie and self.stand_in.cookie not in cookies.split("; "):
            raise _NoSessionError


def _find(method: str, path: str) -> tuple[contract.Operation, dict[str, str]] | None:
    for operation in contract.operations():
        if operation.method == method and (match := operation.path.fullmatch(path)):
            return operation, {key: unquote(value) for key, value in match.groupdict().items()}
    return None


def _file(request: Request) -> bytes:
    """The file of a form."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    form = BytesParser().parsebytes(head + request.body)
    parts = form.get_payload()
    assert isinstance(parts, list)
    part = parts[0]
    assert not isinstance(part, str)
    data = part.get_payload(decode=True)
    assert isinstance(data, bytes)
    return data
