"""Experiment trackers (MLflow, Weights & Biases), served by a thread of their own."""

import hashlib
import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kfp_ddp import __version__
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import MLFLOW, RunFolder
from kfp_ddp.core.text import one_line
from kfp_ddp.training.config import TrainConfig


class Event(NamedTuple):
    """A line of metrics.jsonl: the event's name, its fields, and when, in seconds since 1970."""

    name: str
    fields: dict[str, Any]
    time: float


class Tracker(Protocol):
    """A run at a server."""

    def log(self, events: Sequence[Event]) -> None:
        """Keep events, in their order; whatever it raises, they come again."""


class Patient:
    """A sink that sends what metrics.jsonl holds when its server takes it; nobody waits for it.

    How far it came stands in the tracker's own file, so that what a server that was away, or a
    process that was killed, missed is sent by the next one.
    """

    PAUSE_SECONDS = 30.0
    LAST_SECONDS = 60.0
    LAST_OF_STOPPED_SECONDS = 5.0
    """The same where the training was stopped, and has no time."""

    def __init__(
        self, title: str, metrics: Path, record: Path, connect: Callable[[], Tracker]
    ) -> None:
        """Begin to connect.

        Args:
            title: What people call the tracker.
            metrics: The events, a line each, which a caller appends to before it calls.
            record: A JSON file of the tracker; this keeps `sent` in it, the bytes that were sent.
            connect: Finds or makes the run; called again where it raised.
        """
        self._title, self._connect = title, connect
        self._metrics, self._record = metrics, record
        self._tracker: Tracker | None = None
        self._changed, self._over = threading.Event(), threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
        self._thread.start()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """See that the event is sent; after the last one wait a moment for the server."""
        if event == "end":
            self._over.set()
        self._changed.set()
        if event == "end":
            done = fields.get("status") == "done"
            self._thread.join(self.LAST_SECONDS if done else self.LAST_OF_STOPPED_SECONDS)
            left = _left(self._metrics, self._record)[0].count(b"\n")
            if left:
                print(f"warning: {self._title} lacks {left} events", flush=True)

    def _work(self) -> None:
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()
            last = self._over.is_set()
            if not self._sent() and not last:
                self._over.wait(self.PAUSE_SECONDS)
                self._changed.set()

    def _sent(self) -> bool:
        try:
            if self._tracker is None:
                self._tracker = self._connect()
            send_left(self._tracker, self._metrics, self._record)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the training goes on
            if not self._told:
                print(
                    f"warning: {self._title} takes nothing for now: {one_line(error)}", flush=True
                )
            self._told = True
            return False
        self._told = False
        return True


def send_left(tracker: Tracker, metrics: Path, record: Path) -> None:
    """Send what was not sent, and note that it was; raises what the tracker does."""
    lines, end = _left(metrics, record)
    tracker.log([_event(line) for line in lines.splitlines()])
    with atomic_write(record) as file:
        file.write(json.dumps({**_read(record), "sent": end}).encode())


def _left(metrics: Path, record: Path) -> tuple[bytes, int]:
    """The whole lines that were not sent, and where the last of them ends."""
    start = int(_read(record).get("sent", 0))
    with metrics.open("rb") as file:
        file.seek(start)
        lines = file.read()
    lines = lines[: lines.rfind(b"\n") + 1]
    return lines, start + len(lines)


def _event(line: bytes) -> Event:
    fields = json.loads(line)
    return Event(fields.pop("event"), fields, fields.pop("time"))


def _read(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def require(package: str, setting: str) -> None:
    """Refuse a setting whose package is not installed.

    Raises:
        InputError: saying that the image lacks it.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{setting} needs the package {package}, which this image lacks: add it to the image, "
            f"or leave {setting} out"
        )


# MLflow's own are 7 tries of 2 minutes each.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_METRICS, _PARAMS, _LONGEST = 1000, 100, 6000
"""What MLflow takes in a request, and of a parameter."""
_RUN_ID = "kfp_ddp.run_id"
_ENDS = {"done": "FINISHED", "preempted": "KILLED"}


class MlflowRun:
    """The run of a training."""

    def __init__(self, config: TrainConfig) -> None:
        """Find the run that `mlflow.json` in the output folder names, or make one.

        Raises:
            Exception: MLflow's own, of which there are many.
        """
        self.client = _client(config.mlflow_uri)
        file = Path(config.output_dir, MLFLOW)
        known = _known_run(file)
        if known.get("uri") == config.mlflow_uri:
            self.run_id = known["run_id"]
        else:
            experiment = self._experiment(config)
            self.run_id = self._found(config, experiment) or self._made(config, experiment)
            with atomic_write(file) as record:
                record.write(json.dumps({"uri": config.mlflow_uri, "run_id": self.run_id}).encode())
        if not self.client.get_run(self.run_id).data.params:
            self._keep_settings(config)

    def _found(self, config: TrainConfig, experiment: str) -> str:
        """The run that was made for this one by a process that was killed before it noted so."""
        if not config.run_id:
            return ""
        of_this_run = f"tags.`{_RUN_ID}` = '{config.run_id}'"
        found = self.client.search_runs([experiment], of_this_run, max_results=1)
        return str(found[0].info.run_id) if found else ""

    def _made(self, config: TrainConfig, experiment: str) -> str:
        name = config.run_id or Path(config.output_dir).name
        tags = {
            "kfp_ddp.version": __version__,
            _RUN_ID: config.run_id,
            "kfp_ddp.data": config.data,
            "mlflow.source.name": "kfp_ddp",
        }
        made = self.client.create_run(experiment, tags=tags, run_name=name)
        return str(made.info.run_id)

    def _keep_settings(self, config: TrainConfig) -> None:
        from mlflow.entities import Param

        settings = config.model_dump(exclude={"model_code", "mlflow_uri"})
        params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
        for some in _parts(params, _PARAMS):
            self.client.log_batch(self.run_id, params=some)

    def log(self, events: Sequence[Event]) -> None:
        """Keep the numbers of events, and how the run ended."""
        from mlflow.entities import Metric

        metrics = [
            Metric(f"{event.name}/{name}", value, int(event.time * 1000), event.fields["step"])
            for event in events
            if event.name in ("step", "eval")
            for name, value in _figures(event.fields).items()
        ]
        for some in _parts(metrics, _METRICS):
            self.client.log_batch(self.run_id, metrics=some)
        for event in events:
            if event.name == "start":
                self.client.update_run(self.run_id, status="RUNNING")
                for name in ("world_size", "steps_total", "resumed_from_step"):
                    self.client.set_tag(self.run_id, f"kfp_ddp.{name}", str(event.fields[name]))
            elif event.name == "end":
                ended = _ENDS.get(event.fields["status"], "FAILED")
                self.client.update_run(self.run_id, status=ended)

    def _experiment(self, config: TrainConfig) -> str:
        name = config.mlflow_experiment
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name))
            except Exception:  # noqa: BLE001 - another run may have made it meanwhile
                found = self.client.get_experiment_by_name(name)
        if found is None:
            raise LookupError(f"the experiment {name} can neither be found nor made")
        return str(found.experiment_id)


def note(run_dir: Path, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
    """Add what a later step found to the run of a training that asked for MLflow.

    What the training could not send goes before it. A server that does not take it is a warning in
    the log.
    """
    folder = RunFolder(run_dir)
    try:
        config = TrainConfig.from_json(folder.config.read_text())
    except (OSError, KfpDdpError):
        return
    if not config.mlflow_uri:
        return
    try:
        from mlflow.entities import Metric, RunTag

        run = MlflowRun(config.model_copy(update={"output_dir": str(run_dir)}))
        send_left(run, folder.metrics, run_dir / MLFLOW)
        now = int(time.time() * 1000)
        run.client.log_batch(
            run.run_id,
            metrics=[Metric(name, value, now, 0) for name, value in _figures(metrics).items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
    except Exception as error:  # noqa: BLE001 - what was found stands without MLflow
        print(f"warning: MLflow was not told of this: {error}", flush=True)


def _client(uri: str) -> Any:
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _known_run(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text())
        return {"uri": str(known["uri"]), "run_id": str(known["run_id"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _figures(fields: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


def _parts(items: list[Any], most: int) -> Iterable[list[Any]]:
    return (items[at : at + most] for at in range(0, len(items), most))


class WandbRun:
    """The run of a training."""

    def __init__(self, config: TrainConfig) -> None:
        """Begin it, or go on in it.

        Raises:
            Exception: those of wandb.
        """
        import wandb

        name = config.run_id or config.output_dir
        self._run = wandb.init(
            project=config.wandb_project,
            id=hashlib.sha256(name.encode()).hexdigest()[:16],
            name=name,
            resume="allow",
            dir=config.output_dir,
            config=config.model_dump(exclude={"model_code", "mlflow_uri"}),
        )

    def log(self, events: Sequence[Event]) -> None:
        """Keep the numbers of events, and how the run ended."""
        for event in events:
            if event.name in ("step", "eval"):
                numbers = {
                    f"{event.name}/{name}": value
                    for name, value in event.fields.items()
                    if isinstance(value, int | float) and name != "step"
                }
                self._run.log(numbers, step=event.fields["step"])
            elif event.name == "end":
                self._run.finish(exit_code=int(event.fields["status"] != "done"))
