"""A server with one model, on KServe's protocols: v2 over HTTP and gRPC, health, metrics."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType

import grpc  # type: ignore[import-untyped]
import uvicorn
from kserve import ModelRepository
from kserve.constants.constants import MAX_GRPC_MESSAGE_LENGTH
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.interceptors import ExceptionToStatusInterceptor
from kserve.protocol.grpc.servicer import InferenceServicer

from kfp_ddp.models.serving.inference_service import DRAIN_SECONDS
from kfp_ddp.serve.app import make
from kfp_ddp.serve.limits import IDLE_SECONDS, HttpConnection
from kfp_ddp.serve.model import Ready
from kfp_ddp.serve.served import Closed, Served

CONNECTIONS = 1000
"""Open connections, at most; further requests are refused (503)."""
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
    served, plane = Served(model, name, largest, waiting), DataPlane(models)
    models.update(served)
    host = f"[{listen}]" if ":" in listen else listen
    config = uvicorn.Config(
        make(served, plane, Closed(models), listen),
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
    _Server(config, servicer, f"{host}:{grpc_port}" if grpc_port else "", line).run()


class _Server(uvicorn.Server):
    """The HTTP server, and with it the gRPC server."""

    def __init__(
        self, config: uvicorn.Config, servicer: InferenceServicer, address: str, line: str
    ) -> None:
        super().__init__(config)
        self._servicer, self._address, self._line = servicer, address, line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on both ports, and print the line."""
        self._grpc = grpc.aio.server(
            interceptors=[ExceptionToStatusInterceptor()],
            maximum_concurrent_rpcs=CONNECTIONS,
            options=[
                ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_LENGTH),
                ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_LENGTH),
            ],
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
