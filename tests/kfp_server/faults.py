"""What goes wrong with servers: each is called in place of an answer."""

import json
import os
from typing import Any

from tests.kfp_server.refusal import STACK
from tests.serving import Fault


def silence(handler: Any, server: Any) -> None:
    """No answer, for as long as the server is up."""
    server.closing.wait()
    handler.close_connection = True


def gone(handler: Any, _: Any) -> None:
    """The connection ends without an answer."""
    handler.close_connection = True


def lost(handler: Any, _: Any) -> bool:
    """Let the request have its effect, and lose the answer."""
    handler.wfile = open(os.devnull, "wb")  # noqa: SIM115
    handler.close_connection = True
    return True


def cut(handler: Any, _: Any) -> None:
    """An answer that ends early."""
    handler.answer(200, b'{"runs": [', Content_Type="application/json", Content_Length="1000")
    handler.close_connection = True


def login_page(handler: Any, _: Any) -> None:
    """What stands before KFP and knows nobody."""
    handler.answer(302, Location="/dex/auth?client_id=kubeflow-oidc-authservice&state=abc")


def answer(text: str, code: int = 200, kind: str = "application/json") -> Fault:
    """An answer of something else."""
    return lambda handler, _: handler.answer(code, text.encode(), Content_Type=kind)


def status(code: int, why: str = "injected") -> Fault:
    """An answer of the gateway with this status."""
    return answer(json.dumps({"code": 13, "message": why, "details": []}), code)


def proxy_error(code: int) -> Fault:
    """An answer of a proxy before the server: HTML."""
    return answer(f"<html><h1>{code} upstream connect error</h1></html>", code, "text/html")


half = answer('{"runs": [')
"""JSON that is not whole."""
stack_trace = answer(
    json.dumps(
        {"error_message": "Internal Server Error", "error_details": f"mysql is down{STACK}"}
    ),
    code=500,
)
"""A fault of the server in the shape of the upload handlers."""
page = answer("<!DOCTYPE html><html><body>Log in</body></html>", kind="text/html")
"""The page of something else."""


def endless(field: str, rows: list[Any]) -> Fault:
    """A page whose token leads to itself."""
    return answer(json.dumps({field: rows, "next_page_token": "c2FtZQ=="}))
