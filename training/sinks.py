"""Sinks of metrics beside metrics.jsonl: TensorBoard, trackers, Prometheus, TrainJob status."""

import json
import os
import ssl
import threading
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import MLFLOW, WANDB, RunFolder
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.metrics import Sink
from kfp_ddp.training.trackers import BackgroundSink, MlflowRun, WandbRun, require


def sinks(config: TrainConfig) -> list[Sink]:
    """Create the sinks of `config` and the environment; called on rank 0.

    Raises:
        InputError: the port of Prometheus is in use, or a package is not installed.
    """
    chosen: list[Sink] = []
    metrics = RunFolder(config.output_dir).metrics
    if config.tensorboard:
        chosen.append(_tensorboard(RunFolder(config.output_dir).tensorboard))
    if config.mlflow_uri:
        require("mlflow", "mlflow_uri")
        record = Path(config.output_dir, MLFLOW)
        chosen.append(BackgroundSink("MLflow", metrics, record, lambda: MlflowRun(config)))
    if config.wandb_project:
        require("wandb", "wandb_project")
        record = Path(config.output_dir, WANDB)
        chosen.append(BackgroundSink("Weights & Biases", metrics, record, lambda: WandbRun(config)))
    if config.prometheus_port:
        chosen.append(_prometheus(config.prometheus_port))
    if "KUBEFLOW_TRAINER_SERVER_URL" in os.environ:
        chosen.append(TrainJobStatus())
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

    The controller injects URL, token and certificate. Reports are sent from a thread, at most one
    every five seconds; a failed report is dropped.
    """

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._url = os.environ["KUBEFLOW_TRAINER_SERVER_URL"]
        self._total = 0
        self._began = (time.monotonic(), 0)
        self._sent = -self.EVERY_S
        self._values: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Record the numbers of an event; report if the interval is over."""
        step = int(fields.get("step", 0))
        if event == "start":
            self._total = fields["steps_total"]
            self._began = (time.monotonic(), fields["resumed_from_step"])
        self._values.update({f"{event}_{k}": v for k, v in _numbers(fields).items()})
        now = time.monotonic()
        busy = self._thread is not None and self._thread.is_alive()
        last = event == "end"
        if not last and (event == "start" or busy or now - self._sent < self.EVERY_S):
            return
        self._sent = now
        body = self._body(self._total if last and fields["status"] == "done" else step, now)
        self._thread = threading.Thread(target=self._post, args=(body,), daemon=True)
        self._thread.start()
        if last:
            self._thread.join(self.EVERY_S)

    def _body(self, step: int, now: float) -> bytes:
        began, first = self._began
        status: dict[str, Any] = {
            "metrics": [
                {"name": name[:64], "value": f"{value:.6g}"}
                for name, value in list(self._values.items())[:256]
            ],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if step:
            status["progressPercentage"] = 100 * step // max(1, self._total)
        if step > first:
            remaining = (self._total - step) * (now - began) / (step - first)
            status["estimatedRemainingSeconds"] = round(remaining)
        return json.dumps({"trainerStatus": status}).encode()

    def _post(self, body: bytes) -> None:
        try:
            token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text().strip()
            certificate = os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(self._url, body, headers)  # noqa: S310
            context = ssl.create_default_context(cafile=certificate) if certificate else None
            handlers = [_NoRedirect(), urllib.request.HTTPSHandler(context=context)]
            with urllib.request.build_opener(*handlers).open(request, timeout=5):
                pass
        except (OSError, ValueError, KeyError) as error:
            print(f"warning: the TrainJob's status was not updated: {error}", flush=True)
