"""Where metrics go beside metrics.jsonl: trackers, TensorBoard, Prometheus, a TrainJob's status."""

import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kfp_ddp import __version__
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.http import post
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import MLFLOW, RunFolder
from kfp_ddp.core.settings import mapping_in, mapping_of
from kfp_ddp.core.text import one_line
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.metrics import Sink

TRAINJOB = "trainjob.json"
"""In a training's folder: how much of its metrics the status of the TrainJob has."""


class Event(NamedTuple):
    """A line of metrics.jsonl: the event's name, its fields, and its time in seconds since 1970."""

    name: str
    fields: dict[str, Any]
    time: float


class Tracker(Protocol):
    """A run at a server."""

    def log(self, events: Sequence[Event]) -> None:
        """Log events in their order; after an exception they are sent again."""


class BackgroundSink:
    """Sends metrics.jsonl from a thread; the next process sends what was not sent."""

    PAUSE_SECONDS = 30.0
    LAST_SECONDS = 60.0
    """Limit of the wait after the last epoch."""
    LAST_OF_STOPPED_SECONDS = 5.0
    """Limit of the wait if the training was stopped."""

    def __init__(
        self, title: str, metrics: Path, record: Path, connect: Callable[[], Tracker], every: float
    ) -> None:
        """Start to connect; `every`: least seconds between requests."""
        self._title = title
        self._connect = connect
        self._every = every
        self._metrics = metrics
        self._record = record
        self._tracker: Tracker | None = None
        self._changed = threading.Event()
        self._over = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
        self._thread.start()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """Let the event be sent; after the last one, wait for the server for a limited time."""
        if event == "end":
            self._over.set()
        self._changed.set()
        if event == "end":
            done = fields.get("status") == "done"
            self._thread.join(self.LAST_SECONDS if done else self.LAST_OF_STOPPED_SECONDS)
            unsent = _unsent(self._metrics, self._record)[0].count(b"\n")
            if unsent:
                log.warning(f"{self._title} lacks {unsent} events")

    def _work(self) -> None:
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()
            last = self._over.is_set()
            if self._send():
                self._over.wait(self._every)
            elif not last:
                self._over.wait(self.PAUSE_SECONDS)
                self._changed.set()

    def _send(self) -> bool:
        try:
            if self._tracker is None:
                self._tracker = self._connect()
            send_unsent(self._tracker, self._metrics, self._record)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            if not self._warned:
                log.warning(f"{self._title} is not reachable: {one_line(error)}")
            self._warned = True
        else:
            self._warned = False
        return not self._warned


def send_unsent(tracker: Tracker, metrics: Path, record: Path) -> None:
    """Send the events that were not sent, and record it; raise the tracker's exceptions."""
    lines, end = _unsent(metrics, record)
    if not lines:
        return
    events = [event for line in lines.splitlines() if "time" in (event := mapping_in(line))]
    tracker.log([Event(event.pop("event"), event, event.pop("time")) for event in events])
    with atomic_write(record) as file:
        file.write(json.dumps({**mapping_of(record), "sent": end}).encode())


def _unsent(metrics: Path, record: Path) -> tuple[bytes, int]:
    """Return the complete lines that were not sent, and the position after them."""
    start = int(mapping_of(record).get("sent", 0))
    with metrics.open("rb") as file:
        file.seek(start)
        lines = file.read()
    lines = lines[: lines.rfind(b"\n") + 1]
    return lines, start + len(lines)


def require(package: str, setting: str) -> None:
    """Raise InputError if the package of a setting is not installed."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{setting} needs the package {package}, which this image lacks: add it to the image, "
            f"or do not set {setting}"
        )


# MLflow's limits of a request, and of the length of a parameter.
_METRICS = 1000
_PARAMS = 100
_LONGEST = 6000
_RUN_ID = "kfp_ddp.run_id"
_ENDS = {"done": "FINISHED", "preempted": "KILLED"}


def run_of_step(chosen: str) -> dict[str, Any]:
    """Return the record of the run that KFP's MLflow plugin made for this step; empty for none.

    `chosen` is the server of the settings: only runs of that one count, unless it is ''.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    run_id = os.environ.get("MLFLOW_RUN_ID", "")
    given = uri and run_id and chosen in ("", uri)
    return {"uri": uri, "run_id": run_id, "is_ours": False} if given else {}


def _server_of(config: TrainConfig) -> str:
    """Return the URI of the MLflow server of a training; '' for none.

    Without one in the settings, it is that of the run which the step has recorded.
    """
    if config.mlflow_uri:
        return config.mlflow_uri
    known = mapping_of(Path(config.output_dir, MLFLOW))
    return "" if known.get("is_ours", True) else str(known["uri"])


def mlflow_client(uri: str, retries: int = 1) -> Any:
    """Return a client of an MLflow server that does not try for minutes, unless a user wants it."""
    # MLflow's own are 7 retries of 2 minutes each.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(retries))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


class MlflowRun:
    """The MLflow run of a training: the same one after each resume, and for later steps."""

    def __init__(self, config: TrainConfig) -> None:
        uri = _server_of(config)
        self.client: Any = mlflow_client(uri)
        file = Path(config.output_dir, MLFLOW)
        known = mapping_of(file)
        if known.get("uri") != uri or "run_id" not in known:
            known = {"uri": uri, "run_id": self._find_or_create(config)}
            with atomic_write(file) as record:
                record.write(json.dumps(known).encode())
        self.run_id = str(known["run_id"])
        self.is_ours = bool(known.get("is_ours", True))
        """Whether its state is that of the training; the state of another is KFP's."""
        if not self.client.get_run(self.run_id).data.params:
            from mlflow.entities import Param

            settings = config.model_dump(exclude={"model_code", "mlflow_uri"})
            params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
            for at in range(0, len(params), _PARAMS):
                self.client.log_batch(self.run_id, params=params[at : at + _PARAMS])

    def _find_or_create(self, config: TrainConfig) -> str:
        """Return the run that a killed process created but did not record, or a new one."""
        experiment = self._experiment(config.mlflow_experiment)
        query = f"tags.`{_RUN_ID}` = '{config.run_id}'"
        if config.run_id and (runs := self.client.search_runs([experiment], query, max_results=1)):
            return str(runs[0].info.run_id)
        name = config.run_id or Path(config.output_dir).name
        tags = {
            "kfp_ddp.version": __version__,
            _RUN_ID: config.run_id,
            "kfp_ddp.data": config.data,
            "mlflow.source.name": "kfp_ddp",
        }
        run = self.client.create_run(experiment, tags=tags, run_name=name)
        return str(run.info.run_id)

    def log(self, events: Sequence[Event]) -> None:
        """Log the numbers of events, and how the run ended."""
        from mlflow.entities import Metric

        metrics = [
            Metric(f"{event.name}/{name}", value, int(event.time * 1000), event.fields["step"])
            for event in events
            if event.name in ("step", "eval")
            for name, value in _figures(event.fields).items()
        ]
        for at in range(0, len(metrics), _METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[at : at + _METRICS])
        for event in events:
            if event.name == "start":
                self._set_state("RUNNING")
                for name in ("world_size", "steps_total", "resumed_from_step"):
                    self.client.set_tag(self.run_id, f"kfp_ddp.{name}", str(event.fields[name]))
            elif event.name == "end":
                self._set_state(_ENDS.get(event.fields["status"], "FAILED"))

    def _set_state(self, state: str) -> None:
        if self.is_ours:
            self.client.update_run(self.run_id, status=state)

    def _experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self.client.create_experiment(name))
            except Exception:  # noqa: BLE001 - another run may have created it meanwhile
                experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            raise LookupError(f"the experiment {name} can neither be found nor created")
        return str(experiment.experiment_id)


def note(run_dir: Path, metrics: Mapping[str, float], tags: Mapping[str, str]) -> str:
    """Add results of a later step to the run of KFP's step, else to that of the training.

    Return a warning if that fails, '' otherwise.
    """
    folder = RunFolder(run_dir)
    settings = mapping_of(folder.config)
    known = TrainConfig.model_fields.keys() & settings.keys()  # an older run has retired ones
    try:
        config = TrainConfig.create(**{name: settings[name] for name in known})
    except InputError:
        return ""
    config = config.model_copy(update={"output_dir": str(run_dir)})
    of_step = run_of_step(config.mlflow_uri)
    if not of_step and not _server_of(config):
        return ""
    try:
        from mlflow.entities import Metric, RunTag

        if of_step:
            client = mlflow_client(of_step["uri"])
            run_id = of_step["run_id"]
        else:
            run = MlflowRun(config)
            send_unsent(run, folder.metrics, run_dir / MLFLOW)
            client = run.client
            run_id = run.run_id
        now = int(time.time() * 1000)
        client.log_batch(
            run_id,
            metrics=[Metric(name, value, now, 0) for name, value in _figures(metrics).items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
    except Exception as error:  # noqa: BLE001 - the result is valid without MLflow
        warning = (
            "MLflow did not get these results, and may lack events of the training "
            f"({one_line(error)}): check mlflow_uri and its server; metrics.jsonl has all events"
        )
        log.warning(warning)
        return warning
    return ""


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in fields.items() if isinstance(v, int | float)}


def _figures(fields: Mapping[str, Any]) -> dict[str, float]:
    numbers = _numbers(fields)
    numbers.pop("step", None)
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def sinks(config: TrainConfig) -> list[Sink]:
    """Create the sinks of `config` and the environment, on rank 0; raise InputError."""
    folder = RunFolder(config.output_dir)

    def tracker(title: str, record: str, connect: Callable[[], Tracker], every: float = 0) -> Sink:
        return BackgroundSink(title, folder.metrics, folder.path / record, connect, every)

    chosen: list[Sink] = []
    if config.tensorboard:
        require("tensorboard", "tensorboard")
        chosen.append(_tensorboard(folder.tensorboard))
    if config.mlflow_uri:
        require("mlflow", "mlflow_uri")
    if _server_of(config):
        if importlib.util.find_spec("mlflow"):
            chosen.append(tracker("MLflow", MLFLOW, lambda: MlflowRun(config)))
        else:
            log.warning("the MLflow run of this step gets no curves: the image lacks mlflow")
    if config.prometheus_port:
        require("prometheus_client", "prometheus_port")
        chosen.append(_prometheus(config.prometheus_port))
    if "KUBEFLOW_TRAINER_SERVER_URL" in os.environ:
        every = TrainJobStatus.INTERVAL_SECONDS
        chosen.append(tracker("the TrainJob's status", TRAINJOB, TrainJobStatus, every))
    return chosen


def _tensorboard(folder: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(event: str, fields: dict[str, Any]) -> None:
        for name, value in _numbers(fields).items():
            if name not in ("step", "epoch"):
                writer.add_scalar(f"{event}/{name}", value, fields.get("step"))
        if event in ("eval", "end"):
            writer.flush()

    return write


def _prometheus(port: int) -> Sink:
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

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


class TrainJobStatus:
    """Progress in the status of a TrainJob (Trainer 2.2), which injects the environment."""

    INTERVAL_SECONDS = 5.0

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
        url = os.environ["KUBEFLOW_TRAINER_SERVER_URL"]
        body = self.body(time.monotonic())
        post(url, body, {"Authorization": f"Bearer {token}"}, 5, certificate)

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
