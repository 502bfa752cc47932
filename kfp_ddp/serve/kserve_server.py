"""A server with one model, on KServe's protocols: v2 over HTTP and gRPC, health, metrics."""

import asyncio
import html
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import grpc  # type: ignore[import-untyped]
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from kserve import ModelRepository
from kserve.errors import (
    InferenceError,
    InvalidInput,
    ModelNotFound,
    ServerNotReady,
    UnsupportedProtocol,
)
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.interceptors import ExceptionToStatusInterceptor
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.models.inference_service import DRAIN_SECONDS
from kfp_ddp.serve.limits import (
    CONNECTIONS,
    GRPC_OPTIONS,
    IDLE_SECONDS,
    BodyLimit,
    HttpConnection,
    InProgress,
    MessageLimit,
)
from kfp_ddp.serve.served import Closed, Ready, Served

GRACE_SECONDS = 30
"""Time to finish running requests at the end."""


def serve(
    model: Ready,
    name: str,
    *,
    listen: str,
    port: int,
    grpc_port: int,
    largest: int,
    waiting: int,
    line: str,
) -> None:
    """Serve until a signal; in a pod, drain first. There is no gRPC with port 0."""
    models = ModelRepository()
    served = Served(model, name, largest, waiting)
    plane = DataPlane(models)
    models.update(served)
    progress = InProgress()
    host = f"[{listen}]" if ":" in listen else listen
    config = uvicorn.Config(
        make(served, plane, Closed(models), listen, progress),
        host=listen,
        port=port,
        http=HttpConnection,
        ws="none",
        log_config=None,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    logging.getLogger("kserve").setLevel(logging.CRITICAL)  # a traceback per refused request
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: None)  # uvicorn raises the signal again at the end
    servicer = InferenceServicer(plane, Closed(models))
    address = f"{host}:{grpc_port}" if grpc_port else ""
    _Server(config, servicer, address, line, progress).run()


class _Server(uvicorn.Server):
    """The HTTP server, and with it the gRPC server."""

    def __init__(
        self,
        config: uvicorn.Config,
        servicer: InferenceServicer,
        address: str,
        line: str,
        progress: InProgress,
    ) -> None:
        super().__init__(config)
        self._servicer = servicer
        self._address = address
        self._line = line
        self._limit = MessageLimit(progress)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on both ports, and print the line."""
        self._grpc = grpc.aio.server(
            interceptors=[self._limit, ExceptionToStatusInterceptor()],
            maximum_concurrent_rpcs=CONNECTIONS,
            options=GRPC_OPTIONS,
        )
        add_GRPCInferenceServiceServicer_to_server(self._servicer, self._grpc)
        if self._address:
            self._grpc.add_insecure_port(self._address)
        await self._grpc.start()
        await super().startup(sockets)
        print(self._line, file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests."""
        await asyncio.gather(super().shutdown(sockets), self._grpc.stop(GRACE_SECONDS))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal, in a pod after some seconds: Knative refuses a `preStop` hook."""
        if sig != signal.SIGTERM or "KUBERNETES_SERVICE_HOST" not in os.environ:
            super().handle_exit(sig, frame)
            return
        # A handler may interrupt a `print`, which may not be entered twice.
        os.write(2, b"SIGTERM: taking requests for %d more seconds\n" % DRAIN_SECONDS)
        threading.Timer(DRAIN_SECONDS, super().handle_exit, (sig, frame)).start()


PREDICT = "/predict"
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob:; "
    "connect-src 'self'"
)
_STATUS: dict[type[Exception], int] = {
    InputError: 400,
    InvalidInput: 400,
    InferenceError: 400,  # of KServe's decoder
    RequestValidationError: 400,
    ClientDisconnect: 400,  # nobody reads it
    ModelNotFound: 404,
    NotImplementedError: 501,
    UnsupportedProtocol: 501,
    ServerNotReady: 503,
}


def make(
    served: Served,
    plane: DataPlane,
    repository: ModelRepositoryExtension,
    listen: str,
    progress: InProgress,
) -> FastAPI:
    """Return the application; on a loopback address it answers to names of this machine only.

    Else a page of another site, whose name its DNS then gives this address, could read the answers.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = _PAGE.read_text(encoding="utf-8").replace("{{model}}", html.escape(served.name))
    page = page.replace("{{version}}", html.escape(served.version))

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _POLICY})

    async def predict(request: Request) -> Response:
        answer = await served.classify(await _picture(request))
        return JSONResponse({"model": served.name, "version": served.version, **answer})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/", show)
    app.add_route(PREDICT, predict, methods=["POST"])
    app.add_route("/metrics", metrics)
    register_v1_endpoints(app, plane, repository)
    register_v2_endpoints(app, plane, repository)
    app.add_middleware(BodyLimit, progress=progress, picture_path=PREDICT)
    if listen in _LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK)
    for kind in (*_STATUS, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


async def _picture(request: Request) -> bytes:
    """Return the picture of a request: the body itself, or the one file of a form."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return await request.body()
    async with request.form(max_files=1) as form:
        for value in form.values():
            if isinstance(value, UploadFile):
                return await value.read()
    raise InputError("the form has no file: give one, as curl -F file=@picture.jpg does")


async def _refuse(_: Request, error: Exception) -> Response:
    codes = (code for kind, code in _STATUS.items() if isinstance(error, kind))
    status = next(codes, 500)
    text: Any = error
    if isinstance(error, HTTPException):
        status = error.status_code
        text = error.detail
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return JSONResponse({"error": one_line(text)}, status)
