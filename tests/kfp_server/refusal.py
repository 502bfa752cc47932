"""How the server refuses, in the two shapes that a real one was seen to answer in."""

from typing import Any

OF_STATUS = {400: 3, 404: 5, 409: 6, 403: 7, 401: 16, 500: 13, 501: 12, 503: 14}
"""The code of gRPC for one of HTTP."""
STACK = (
    "\ngithub.com/kubeflow/pipelines/backend/src/apiserver/server.(*PipelineUploadServer)"
    ".uploadPipeline\n\t/src/backend/src/apiserver/server/pipeline_upload_server.go:190"
    "\nruntime.goexit\n\t/go/src/runtime/asm_amd64.s:1771"
)


class RefusalError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def gateway(status: int, before: str, why: str, code: int = 0) -> RefusalError:
    """As the gRPC gateway answers: what failed, and why, which stands alone in the details."""
    code = code or OF_STATUS[status]
    inner = {"@type": "type.googleapis.com/google.rpc.Status", "code": code, "message": why}
    return RefusalError(status, {"code": code, "message": f"{before}: {why}", "details": [inner]})


def invalid(doing: str, why: str) -> RefusalError:
    """400, for a request that failed for its input."""
    return gateway(400, f"Failed to {doing}: Invalid input error", why)


def taken(kind: str, name: str) -> RefusalError:
    """409, for a name that something else of its kind has."""
    why = (
        f"Failed to create a new {kind}. The name {name} already exists. Please specify a new name"
    )
    return gateway(409, f"Failed to create a {kind}: Already exist error", why)


def upload(status: int, message: str) -> RefusalError:
    """As the upload handlers answer: with a stack trace of Go."""
    return RefusalError(status, {"error_message": message, "error_details": message + STACK})


def unknown(what: str, word: str) -> RefusalError:
    """404, for something that is not there."""
    lower = what.lower()
    before = f"Failed to get a {lower}: Failed to fetch {lower} {word}: ResourceNotFoundError"
    return gateway(404, before, f"{what} {word} not found")
