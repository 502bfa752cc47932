"""Sinks of metrics beside metrics.jsonl: TensorBoard, trackers, Prometheus, TrainJob status."""

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import MLFLOW, WANDB, RunFolder
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.metrics import Sink
from kfp_ddp.training.trackers import (
    BackgroundSink,
    Event,
    MlflowRun,
    Tracker,
    WandbRun,
    require,
)

TRAINJOB = "trainjob.json"
"""In a training's folder: how much of its metrics the status of the TrainJob has."""


def sinks(config: TrainConfig) -> list[Sink]:
    """Create the sinks of `config` and the environment, on rank 0; raise InputError."""
    folder = RunFolder(config.output_dir)

    def tracker(title: str, record: str, connect: Callable[[], Tracker], every: float = 0) -> Sink:
        return BackgroundSink(title, folder.metrics, folder.path / record, connect, every)

    chosen: list[Sink] = []
    if config.tensorboard:
        chosen.append(_tensorboard(folder.tensorboard))
    if config.mlflow_uri:
        require("mlflow", "mlflow_uri")
        chosen.append(tracker("MLflow", MLFLOW, lambda: MlflowRun(config)))
    if config.wandb_project:
        require("wandb", "wandb_project")
        chosen.append(tracker("Weights & Biases", WANDB, lambda: WandbRun(config)))
    if config.prometheus_port:
        chosen.append(_prometheus(config.prometheus_port))
    if "KUBEFLOW_TRAINER_SERVER_URL" in os.environ:
        every = TrainJobStatus.EVERY_S
        chosen.append(tracker("the TrainJob's status", TRAINJOB, TrainJobStatus, every))
    return chosen


def _numbers(fields: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in fields.items() if isinstance(v, int | float)}


def _tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("tensorboard=True needs the package tensorboard: install it") from None
    writer = SummaryWriter(str(folder))

    def write(event: str, fields: dict[str, Any]) -> None:
        for name, value in _numbers(fields).items():
            if name not in ("step", "epoch"):
                writer.add_scalar(f"{event}/{name}", value, fields.get("step"))
        if event in ("eval", "end"):
            writer.flush()

    return write


def _prometheus(port: int) -> Sink:
    try:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server
    except ImportError:
        raise InputError("prometheus_port needs the package prometheus-client") from None
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise InputError(
            f"cannot serve metrics on prometheus_port={port}: {error.strerror}; use another port"
        ) from None

    def write(event: str, fields: dict[str, Any]) -> None:
        for field, value in _numbers(fields).items():
            name = f"kfp_ddp_{event}_{field}"
            if name not in gauges:
                gauges[name] = Gauge(name, f"{field} of the latest {event}", registry=registry)
            gauges[name].set(value)

    return write


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Raises on a redirect, which would send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class TrainJobStatus:
    """Progress in the status of a Kubeflow TrainJob (Trainer 2.2, feature gate TrainJobStatus).

    The controller injects URL, token and certificate.
    """

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._total = self._step = 0
        self._began = (time.monotonic(), 0)
        self._values: dict[str, float] = {}

    def log(self, events: Sequence[Event]) -> None:
        """Report the newest numbers of events; raise OSError if the controller does not take it."""
        for name, fields, _ in events:
            self._step = int(fields.get("step", self._step))
            if name == "start":
                self._total = fields["steps_total"]
                self._began = (time.monotonic(), fields["resumed_from_step"])
            elif name == "end" and fields["status"] == "done":
                self._step = self._total
            self._values.update({f"{name}_{k}": v for k, v in _numbers(fields).items()})
        token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text().strip()
        certificate = os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        url, body = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], self.body(time.monotonic())
        request = urllib.request.Request(url, body, headers)  # noqa: S310
        context = ssl.create_default_context(cafile=certificate) if certificate else None
        handlers = [_NoRedirect(), urllib.request.HTTPSHandler(context=context)]
        with urllib.request.build_opener(*handlers).open(request, timeout=5):
            pass

    def body(self, now: float) -> bytes:
        """Return the report; `now` is on the monotonic clock."""
        began, first = self._began
        status: dict[str, Any] = {
            "metrics": [
                {"name": name[:64], "value": f"{value:.6g}"}
                for name, value in list(self._values.items())[:256]
            ],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self._step:
            status["progressPercentage"] = 100 * self._step // max(1, self._total)
        if self._step > first:
            remaining = (self._total - self._step) * (now - began) / (self._step - first)
            status["estimatedRemainingSeconds"] = round(remaining)
        return json.dumps({"trainerStatus": status}).encode()
