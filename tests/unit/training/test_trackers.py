"""Trackers: MLflow's own store, the status of a TrainJob, and unreachable servers."""

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import MLFLOW, RunFolder
from kfp_ddp.training.report import trackers
from kfp_ddp.training.report.trackers import (
    BackgroundSink,
    Event,
    MlflowRun,
    Tracker,
    TrainJobStatus,
)
from kfp_ddp.training.spec.config import TrainConfig
from tests import training_ranks
from tests.serving import Recorder, free_port, serving


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "run").mkdir()
    return TrainConfig.create(
        data="/data/versions/67c0cb93c78b",
        output_dir=str(tmp_path / "run"),
        run_id="1f0c/train",
        model="cifar_resnet8",
        mlflow_uri=f"file://{tmp_path}/mlflow",
    )


def client(config: TrainConfig) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=config.mlflow_uri)


def step(number: int, loss: float) -> Event:
    fields = {"step": number, "epoch": 0.5, "loss": loss, "rank_seconds": [0.1], "mfu": None}
    return Event("step", fields, 1000.0 + number)


def test_mlflow_gets_settings_metrics_and_their_source(config: TrainConfig) -> None:
    run = MlflowRun(config)
    start = {"world_size": 2, "steps_total": 4, "resumed_from_step": 0}
    run.log([Event("start", start, 1000.0), step(1, 2.5), step(2, float("nan"))])
    run.log([Event("eval", {"step": 2, "epoch": 1, "accuracy": 0.75}, 1003.0)])
    run.log([Event("end", {"step": 4, "status": "done", "reason": ""}, 1004.0)])
    tracked = client(config).get_run(run.run_id)
    assert tracked.info.status == "FINISHED"
    assert tracked.info.run_name == "1f0c/train"
    assert (tracked.data.params["model"], tracked.data.params["epochs"]) == ("cifar_resnet8", "90")
    assert tracked.data.metrics == {
        "step/loss": 2.5, "step/epoch": 0.5, "eval/accuracy": 0.75, "eval/epoch": 1.0
    }  # fmt: skip
    assert tracked.data.tags["kfp_ddp.run_id"] == "1f0c/train"
    assert tracked.data.tags["kfp_ddp.data"] == "/data/versions/67c0cb93c78b"
    assert tracked.data.tags["kfp_ddp.world_size"] == "2"
    (first,) = client(config).get_metric_history(run.run_id, "step/loss")
    assert (first.step, first.timestamp) == (1, 1_001_000)


def test_created_run_without_a_record_is_found_again(config: TrainConfig) -> None:
    before = MlflowRun(config)
    Path(config.output_dir, MLFLOW).unlink()
    assert MlflowRun(config).run_id == before.run_id
    another = config.model_copy(update={"run_id": "2/train", "output_dir": f"{config.output_dir}2"})
    Path(another.output_dir).mkdir()
    assert MlflowRun(another).run_id != before.run_id


def test_resume_and_later_steps_use_the_same_run(config: TrainConfig) -> None:
    before = MlflowRun(config)
    before.log([step(1, 2.5), Event("end", {"step": 1, "status": "preempted"}, 1002.0)])
    assert client(config).get_run(before.run_id).info.status == "KILLED"
    again = MlflowRun(config)
    assert again.run_id == before.run_id
    start = {"world_size": 2, "steps_total": 4, "resumed_from_step": 1}
    again.log([Event("start", start, 1003.0), step(2, 2.0)])
    assert client(config).get_run(before.run_id).info.status == "RUNNING"
    folder = RunFolder(config.output_dir)
    folder.config.write_text(config.model_dump_json())
    left = {"event": "step", "time": 1004.0, "step": 3, "loss": 1.5}
    folder.metrics.write_text(json.dumps(left) + "\n")
    for _ in range(2):
        trackers.note(folder.path, {"accuracy": 0.9}, {"kfp_ddp.dataset_digest": "67c0"})
    history = client(config).get_metric_history(again.run_id, "step/loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.5), (2, 2.0), (3, 1.5)]
    tracked = client(config).get_run(again.run_id).data
    assert (tracked.metrics["accuracy"], tracked.tags["kfp_ddp.dataset_digest"]) == (0.9, "67c0")


def test_steps_of_kfp_log_into_its_runs(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KFP's MLflow plugin makes a run for each step, and ends it itself."""
    server = client(config)
    experiment = server.create_experiment("kfp")
    train, evaluate = (server.create_run(experiment).info.run_id for _ in range(2))
    uri, config = config.mlflow_uri, config.model_copy(update={"mlflow_uri": ""})
    folder = RunFolder(config.output_dir)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert trackers.run_of_step("") == {}
    monkeypatch.setenv("MLFLOW_RUN_ID", train)
    assert trackers.run_of_step("https://another.example.com") == {}
    (folder.path / MLFLOW).write_text(json.dumps(trackers.run_of_step("")))  # as the step does
    monkeypatch.delenv("MLFLOW_RUN_ID")  # the ranks have none
    for number in (1, 2):
        run = MlflowRun(config)
        run.log([step(number, 2.5), Event("end", {"step": number, "status": "done"}, 1002.0)])
        assert (run.run_id, server.get_run(train).info.status) == (train, "RUNNING")
    assert len(server.get_metric_history(train, "step/loss")) == 2

    folder.config.write_text(config.model_dump_json())
    folder.metrics.write_text("")
    monkeypatch.setenv("MLFLOW_RUN_ID", evaluate)
    trackers.note(folder.path, {"accuracy": 0.9}, {"kfp_ddp.dataset_digest": "67c0"})
    assert server.get_run(evaluate).data.metrics == {"accuracy": 0.9}
    monkeypatch.delenv("MLFLOW_RUN_ID")
    trackers.note(folder.path, {"accuracy": 0.8}, {})
    assert server.get_run(train).data.metrics["accuracy"] == 0.8
    assert len(server.search_runs([experiment])) == 2
    assert [one.name for one in server.search_experiments()] == ["kfp", "Default"]


def test_no_mlflow_fails_no_step(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(config.output_dir)
    assert trackers.note(folder.path, {"accuracy": 0.9}, {}) == ""
    assert capsys.readouterr().out == ""
    down = config.model_copy(update={"mlflow_uri": f"http://127.0.0.1:{free_port()}"})
    folder.config.write_text(down.model_dump_json())
    warning = trackers.note(folder.path, {"accuracy": 0.9}, {})
    assert "MLflow did not get these results" in warning
    assert f"warning: {warning}\n" == capsys.readouterr().out


class Away:
    """A server that takes events from the third time on."""

    def __init__(self) -> None:
        self.took: list[Event] = []
        self.asked = 0
        self.took_some = threading.Event()

    def log(self, events: Sequence[Event]) -> None:
        self.asked += 1
        if self.asked < 3:
            raise ConnectionError("away")
        self.took += events
        self.took_some.set()


class Hanging(Away):
    """A server that takes its time."""

    free = threading.Event()

    def log(self, events: Sequence[Event]) -> None:
        assert self.free.wait(30)


def send(sink: BackgroundSink, folder: Path, event: str, number: int, **fields: Any) -> None:
    """What the loop does: a line in the file, then a call."""
    fields = {"step": number, **fields}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "time": 1000.0 + number, **fields}) + "\n")
    sink(event, fields)


def patient(folder: Path, connect: Callable[[], Tracker]) -> BackgroundSink:
    (folder / "metrics.jsonl").touch()
    return BackgroundSink("A", folder / "metrics.jsonl", folder / "a.json", connect, 0)


def test_events_wait_for_an_unreachable_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BackgroundSink, "PAUSE_SECONDS", 0.01)
    server = Away()
    sink = patient(tmp_path, lambda: server)
    for number in range(5):
        send(sink, tmp_path, "step", number)
    assert server.took_some.wait(30)
    send(sink, tmp_path, "end", 5, status="done")
    assert [event.fields["step"] for event in server.took] == list(range(6))
    assert [event.time for event in server.took] == [1000.0 + number for number in range(6)]
    assert capsys.readouterr().out == "warning: A is not reachable: away\n"


def test_unsent_events_are_sent_once_by_the_next_process(tmp_path: Path) -> None:
    def gone() -> Tracker:
        raise ConnectionError("away")

    send(patient(tmp_path, gone), tmp_path, "end", 1, status="preempted")
    server = Away()
    server.asked = 2
    send(patient(tmp_path, lambda: server), tmp_path, "end", 2, status="preempted")
    assert [event.fields["step"] for event in server.took] == [1, 2]
    send(patient(tmp_path, lambda: server), tmp_path, "end", 3, status="done")
    assert [event.fields["step"] for event in server.took] == [1, 2, 3]


def test_wait_for_a_hanging_server_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BackgroundSink, "LAST_SECONDS", 0.05)
    sink = patient(tmp_path, Hanging)
    send(sink, tmp_path, "end", 1, status="done")
    Hanging.free.set()
    sink._thread.join(30)
    assert capsys.readouterr().out == "warning: A lacks 1 events\n"


def test_missing_package_is_named() -> None:
    with pytest.raises(InputError, match="mlflow_uri needs the package no_such_package"):
        trackers.require("no_such_package", "mlflow_uri")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("https://ana:s3cr3t@mlflow.example.com", "has a login in it"),
        ("mlflow.example.com", "is not a URI such as https://"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(uri: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        TrainConfig.create(data="/d", output_dir="/o", mlflow_uri=uri)
    assert "s3cr3t" not in str(caught.value)


def at(name: str, **fields: Any) -> Event:
    return Event(name, fields, 0.0)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_get_no_token(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret")
    other = Recorder()
    with serving(other) as target:
        first = Recorder((code, f"{target}/status"))
        with serving(first) as url:
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"{url}/status")
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
            with pytest.raises(OSError, match=str(code)):
                TrainJobStatus().log([at("start", steps_total=10, resumed_from_step=0)])
    assert [authorization for _, authorization, _ in first.seen] == ["Bearer secret"]
    assert other.seen == []


def test_trainjob_gets_progress_and_the_remaining_seconds() -> None:
    status = TrainJobStatus()
    start = at("start", steps_total=200, resumed_from_step=50)
    for events, progress, remaining in (
        ([start, at("step", step=50, loss=1.5)], 25, None),
        ([at("step", step=100, loss=0.5)], 50, 200),
    ):
        with contextlib.suppress(KeyError):  # no controller
            status.log(events)
        report = json.loads(status.body(status._began[0] + 100))["trainerStatus"]
        assert report["progressPercentage"] == progress
        assert report.get("estimatedRemainingSeconds") == remaining
    assert {"name": "start_steps_total", "value": "200"} in report["metrics"]
    assert {"name": "step_loss", "value": "0.5"} in report["metrics"]


def test_loop_sends_to_its_trackers_and_continues_its_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol of Kubeflow Trainer 2.2: an authorised POST with progress and metrics."""
    (tmp_path / "token").write_text("secret\n")
    data, status = training_ranks.dataset(tmp_path / "data", train=16, val=4), Recorder()
    uri = {"mlflow_uri": config.mlflow_uri, "mlflow_experiment": "flowers", "log_steps": 1}
    run = training_ranks.config(data, tmp_path / "run", epochs=2, run_id="1f0c/train", **uri)
    with serving(status) as url:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"{url}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        stopped = training_ranks.trainer(run)
        stopped.stop.ask("a test")
        assert not stopped.fit()
        assert training_ranks.trainer(run).fit()
    assert {authorization for _, authorization, _ in status.seen} == {"Bearer secret"}
    last = json.loads(status.seen[-1][2])["trainerStatus"]
    assert last["progressPercentage"] == 100
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert {"eval_accuracy", "step_loss"} <= metrics.keys()
    assert all(isinstance(value, str) for value in metrics.values())
    experiment = client(config).get_experiment_by_name("flowers")
    (tracked,) = client(config).search_runs([experiment.experiment_id])
    assert (tracked.info.status, tracked.data.params["batch_size"]) == ("FINISHED", "8")
    history = client(config).get_metric_history(tracked.info.run_id, "step/loss")
    assert {point.step for point in history} == {1, 2, 3, 4}
    evaluated = client(config).get_metric_history(tracked.info.run_id, "eval/accuracy")
    assert evaluated[-1].step == 4
