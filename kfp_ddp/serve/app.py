"""The HTTP side of the server: a page, /predict for a picture, the v2 protocol, and metrics."""

import html
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from kserve.errors import (
    InferenceError,
    InvalidInput,
    ModelNotFound,
    ServerNotReady,
    UnsupportedProtocol,
)
from kserve.protocol.dataplane import DataPlane
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
from kfp_ddp.serve.limits import BodyLimit
from kfp_ddp.serve.served import Served

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
    served: Served, plane: DataPlane, repository: ModelRepositoryExtension, listen: str
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
        classes = await served.classify(await _picture(request))
        return JSONResponse({"model": served.name, "version": served.version, "classes": classes})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/", show)
    app.add_route(PREDICT, predict, methods=["POST"])
    app.add_route("/metrics", metrics)
    register_v1_endpoints(app, plane, repository)
    register_v2_endpoints(app, plane, repository)
    app.add_middleware(BodyLimit, picture_path=PREDICT)
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
        (file,) = (*(one for one in form.values() if isinstance(one, UploadFile)), None)[:1]
        if file is None:
            raise InputError("the form has no file: give one, as curl -F file=@picture.jpg does")
        return await file.read()


async def _refuse(_: Request, error: Exception) -> Response:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    text: Any = error
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return JSONResponse({"error": one_line(text)}, status)
