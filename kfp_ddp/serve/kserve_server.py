"""KServe's Python server with one model: v2 over HTTP and gRPC, health, Prometheus metrics."""

import logging
import math
import os
import signal
import threading
import uuid
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import uvicorn
from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.errors import InvalidInput, ServerNotReady
from kserve.model_server import app
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from prometheus_client import Gauge, Histogram

from kfp_ddp.serve.batches import Batches, FullError, Images
from kfp_ddp.serve.body_limit import BodyLimit
from kfp_ddp.serve.model import Ready

GRACE_SECONDS = 30
"""Time to finish running requests at the end."""
DRAIN_SECONDS = 10
"""Time after SIGTERM in which a pod takes requests, as nodes still route them to it.

On KServe 0.20 in Standard mode, four clients and two busy cores: 13 requests of 16,643 were lost in
three rollouts with 5 seconds, 0 of 19,382 with 10.
"""
_BATCHED = Histogram(
    "kfp_ddp_batch_images",
    "Images that were computed together",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
_INFO = Gauge(
    "kfp_ddp_served_bundle",
    "1 for the bundle that is served",
    ("name", "version", "file", "runtime"),
)


def serve(
    model: Ready, name: str, *, port: int, grpc_port: int, largest: int, waiting: int
) -> None:
    """Serve until SIGTERM or SIGINT, and finish running requests; in a pod, drain first.

    Args:
        model: Model to serve.
        name: Name of the model in requests.
        port: HTTP port.
        grpc_port: gRPC port, 0 for none.
        largest: Images in one call of the model, at most.
        waiting: Images in the queue, at most.
    """
    server = ModelServer(
        http_port=port,
        grpc_port=grpc_port,
        enable_grpc=bool(grpc_port),
        enable_latency_logging=False,
        grace_period=GRACE_SECONDS,
    )
    # By default any client could unload the model.
    server.model_repository_extension = _Closed(server.registered_models)
    # A pixel takes five bytes of JSON, such as "255, ".
    pixels = math.prod(size for size in model.loaded.entry[1] if size > 0)
    app.add_middleware(BodyLimit, max_json=5 * pixels * max(largest, waiting) + (1 << 16))
    for logger in ("kserve.trace", "uvicorn.access"):  # three lines per request
        logging.getLogger(logger).setLevel(logging.WARNING)
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        _drain_on_sigterm()
    _INFO.labels(name, model.version, model.file, model.loaded.runtime).set(1)
    server.start([Served(model, name, largest, waiting)])


def _drain_on_sigterm() -> None:
    """Let uvicorn take requests for some seconds after SIGTERM; it has no setting for it.

    A `preStop` hook would do the same, but Knative refuses it.
    """
    stop = uvicorn.Server.handle_exit

    def handle_exit(self: uvicorn.Server, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGTERM:
            stop(self, sig, frame)
            return
        # A handler may interrupt a `print`, which may not be entered twice.
        os.write(2, b"SIGTERM: taking requests for %d more seconds\n" % DRAIN_SECONDS)
        threading.Timer(DRAIN_SECONDS, stop, (self, sig, frame)).start()

    uvicorn.Server.handle_exit = handle_exit  # type: ignore[method-assign]


class Served(Model):  # type: ignore[misc]
    """A bundle's model for KServe's server."""

    def __init__(self, model: Ready, name: str, largest: int, waiting: int) -> None:
        super().__init__(name)
        self.version = model.version
        self.entry, self.output = model.loaded.entry, model.loaded.output
        self.batches = Batches(model.loaded, largest, waiting, _BATCHED.observe)
        self.ready = True

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return the model's inputs; -1 is any size."""
        return [{"name": self.entry[0], "datatype": "UINT8", "shape": list(self.entry[1])}]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return the model's outputs."""
        return [{"name": self.output[0], "datatype": "FP32", "shape": list(self.output[1])}]

    async def predict(
        self, payload: Any, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        """Answer a request of the v2 protocol."""
        if not isinstance(payload, InferRequest):
            raise InvalidInput(f"only v2 is spoken here: POST /v2/models/{self.name}/infer")
        images = self._images(payload.inputs)
        name = self.output[0]
        for requested in payload.request_outputs or ():
            if requested.name != name:
                raise InvalidInput(f"there is no output {requested.name!r}: there is {name!r}")
        try:
            logits = await self.batches(images)
        except FullError as error:
            raise _Busy(str(error)) from None
        output = InferOutput(name, list(logits.shape), "FP32")
        output.set_data_from_numpy(logits, binary_data=payload.use_binary_outputs)
        return InferResponse(
            payload.id or str(uuid.uuid4()),
            self.name,
            [output],
            model_version=self.version,
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )

    def _images(self, inputs: list[InferInput]) -> Images:
        """Return the images of a request; raises InvalidInput."""
        name, shape = self.entry
        expected = f"one input {name!r}, UINT8 {['batch', *shape[1:]]}".replace("'", '"')
        if len(inputs) != 1 or inputs[0].name != name or inputs[0].datatype != "UINT8":
            actual = ", ".join(f"{one.name!r} {one.datatype}" for one in inputs) or "none"
            raise InvalidInput(f"give {expected}, not {actual[:200]}")
        try:
            data = inputs[0].data  # empty with binary data
            if data and np.array(data).dtype.kind not in "iu":
                raise ValueError("the data are no whole numbers")
            images: Images = inputs[0].as_numpy()
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidInput(f"give {expected} with as many bytes: {str(error)[:200]}") from None
        fits = len(images.shape) == len(shape) and all(
            size in (-1, actual) for size, actual in zip(shape[1:], images.shape[1:], strict=True)
        )
        if not fits or not images.size:
            raise InvalidInput(f"give {expected}, not {list(images.shape)}")
        return np.ascontiguousarray(images)


class _Busy(ServerNotReady):  # type: ignore[misc]
    """HTTP 503, or UNAVAILABLE, for which KServe's gRPC server asks for a `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Closed(ModelRepositoryExtension):  # type: ignore[misc]
    """A repository whose one model stays loaded while the server runs."""

    async def load(self, model_name: str) -> NoReturn:
        """HTTP 501."""
        raise NotImplementedError("the served model cannot be reloaded: restart the server")

    async def unload(self, model_name: str) -> NoReturn:
        """HTTP 501."""
        raise NotImplementedError("the served model cannot be unloaded: stop the server")
