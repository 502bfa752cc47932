"""Teardown: processes, jobs and folders of earlier runs, and how a run ended."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.k8s.api import Api
from kfp_ddp.k8s.pods import NODE_NAME
from kfp_ddp.k8s.resource import PODS, WORKFLOWS
from kfp_ddp.runs.teardown import engine
from kfp_ddp.runs.teardown.engine import outcome
from kfp_ddp.storage import leases
from tests import cluster
from tests.cluster import FakeApi
from tests.files import write

DAY = 86400.0
NOTHING = "nothing to clean up"


def run(work: object, **job: Any) -> str:
    return engine.run("own", "local", job, str(work))


def folder(work: Path, name: str, days: float, file: str = "train/metrics.jsonl") -> Path:
    """Create the folder of a run that last wrote `days` ago."""
    path = work / name / file
    (path.parent / "checkpoints").mkdir(parents=True)
    path.touch()
    for changed in (path, path.parent / "checkpoints", path.parent, work / name):
        os.utime(changed, (time.time() - days * DAY,) * 2)
    return work / name


def test_old_unused_runs_are_deleted(tmp_path: Path) -> None:
    for name, days in (("own", 9.0), ("newer", 2.0), ("older", 3.0), ("oldest", 400.0)):
        folder(tmp_path, name, days)
    folder(tmp_path, "of-an-earlier-version", 500.0, "metrics.jsonl")
    foreign = folder(tmp_path, "models", 500.0, "model.onnx")
    outside = folder(tmp_path.parent, f"{tmp_path.name}-outside", 500.0)
    (tmp_path / "link").symlink_to(outside)
    (folder(tmp_path, "linked", 500.0, "model.onnx") / "train").symlink_to(outside / "train")
    assert run(tmp_path) == NOTHING  # by default no run is deleted
    # An invalid setting of train does not prevent it.
    assert run(tmp_path, keep_runs=2, no_such_setting=1) == "deleted 3 older run(s)"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"own", "newer", "models", "link", "linked"}
    assert foreign.exists()
    assert (outside / "train/metrics.jsonl").exists()
    assert run(tmp_path / "missing", keep_runs=2) == NOTHING


def test_runs_in_use_are_retained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, "own", 0.0)
    waiting, working, _ = (folder(tmp_path, n, 30.0) for n in ("waiting", "working", "queued"))
    recorded = {working / "train": os.getpid()}
    monkeypatch.setattr(local, "recorded", recorded.get)
    with (
        monkeypatch.context() as patch,
        leases.folder_lease(RunFolder(waiting / "train").leases, "evaluate"),
    ):
        patch.setattr(engine, "live_runs", lambda: {"queued"}.__contains__)
        assert run(tmp_path, keep_runs=1) == NOTHING
    recorded.clear()
    assert run(tmp_path, keep_runs=1) == "deleted 3 older run(s)"


def test_unknown_live_runs_retain_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    kube_config = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(kube_config, str(tmp_path / "none"))  # read from KUBECONFIG by its import
    for name in ("own", "old"):
        folder(tmp_path, name, 30.0)
    assert run(tmp_path, keep_runs=1).startswith("retained 1 older run(s): ")
    assert (tmp_path / "old").exists()


@pytest.fixture
def unprivileged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, of a user to whom file modes apply."""
    monkeypatch.chdir(tmp_path)
    before = os.geteuid()
    if before == 0:
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
    yield tmp_path
    os.seteuid(before)


def test_unreadable_folders_are_ignored(unprivileged: Path) -> None:
    for name in ("own", "old"):
        folder(Path(), name, 30.0)
    Path("lost+found").mkdir(mode=0)
    partly = folder(Path(), "partly", 40.0)
    (partly / "private").mkdir(mode=0)
    assert run(".", keep_runs=1) == "deleted 1 older run(s)"
    assert sorted(os.listdir()) == ["lost+found", "own", "partly"]


@pytest.mark.parametrize("run_id", ["../other/run-b", "a/b", "", "."])
def test_a_run_id_that_is_a_path_is_an_error(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(SystemExit, match="cannot name a folder"):
        engine.run(run_id, "local", {}, str(tmp_path))
    with pytest.raises(SystemExit, match="keep_runs=-1 cannot be used"):
        run(tmp_path, keep_runs=-1)


def bucket_run(work: Path, name: str, days: float, lease: str = "") -> None:
    """Create the files of a run in a bucket that started `days` ago."""
    files = [f".begun/{time.time() - days * DAY:.0f}", "checkpoints/step-00000001/state.pt"]
    files += [f".leases/{lease}"] if lease else []
    for file in files:
        write(work / name / "train" / file)


def test_old_runs_in_a_bucket_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "live_runs", lambda: {"queued"}.__contains__)
    bucket_run(tmp_path, "queued", 600.0)
    valid, expired = (f"evaluate.ab.{time.time() - age:.0f}" for age in (0, DAY))
    bucket_run(tmp_path, "own", 9.0)
    bucket_run(tmp_path, "newer", 2.0)
    bucket_run(tmp_path, "older", 3.0, expired)
    bucket_run(tmp_path, "used", 400.0, valid)
    bucket_run(tmp_path, "oldest", 500.0)
    write(tmp_path / "models/x/model.onnx")
    work = f"file://{tmp_path}"
    assert run(work, keep_runs=2) == "deleted 2 older run(s)"
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"own", "newer", "used", "queued", "models"}
    assert run(work, keep_runs=2) == NOTHING


@pytest.mark.parametrize(("backend", "deleted"), [("local", False), ("trainjob", True)])
def test_jobs_of_an_evaluation_are_deleted(
    backend: str, deleted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_jobs", lambda run_id: [f"deleted the jobs of {run_id}"])
    assert ("deleted the jobs of own" in run(tmp_path, evaluate_backend=backend)) == deleted


@pytest.mark.parametrize("pod", ["train-resnet-x7-123", ""])
def test_trial_is_rolled_back(pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_POD_NAME", pod)
    monkeypatch.setattr("kfp_ddp.k8s.api.Api.connect", lambda: "the cluster")
    monkeypatch.setattr(engine, "roll_back_run", lambda api, run_id: [f"{run_id} of {api}"])
    assert run(tmp_path) == ("own of the cluster" if pod else NOTHING)


VERDICT = {
    "blessed": True,
    "reason": "blessed: accuracy 0.9918 >= 0.97",
    "model": "resnet18",
    "accuracy": 0.9918,
    "dataset_digest": "67c0cb93c78b",
    "champion": "0123456789ab",
    "champion_accuracy": 0.98,
}
EXPORTED = {"name": "digits", "uri": "gs://models/digits/ab", "champion": True}


def note(work: Path, name: str, content: object) -> None:
    write(work / "run-1" / name, json.dumps(content))


def state(work: Path) -> tuple[str, str]:
    result = outcome("run-1", str(work), "")
    return result.state, result.reason


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def test_the_folder_has_the_last_state(tmp_path: Path) -> None:
    assert state(tmp_path) == ("unchanged", "")
    note(tmp_path, "train/metrics.jsonl", {"event": "start", "steps_total": 9})
    note(tmp_path, "train/evaluation/verdict.json", ["no", "object"])  # damaged records
    (tmp_path / "run-1/train/exported.json").write_text("{")
    assert state(tmp_path) == ("trained", "")
    note(tmp_path, "train/logs/failure.json", {"rank": 1, "error": "Boom: x", "exit_code": 1})
    assert state(tmp_path) == ("failed", "rank 1: Boom: x")
    first = {"rank": 5, "error": "its cause", "exit_code": 1, "time": -1}  # of another node
    note(tmp_path, "train/logs/failure-b.json", first)
    assert state(tmp_path) == ("failed", "rank 5: its cause")
    note(tmp_path, "train/metrics.jsonl", {"event": "end", "status": "done"})  # a later attempt
    assert state(tmp_path) == ("trained", "")
    note(tmp_path, "train/evaluation-test/verdict.json", VERDICT)
    assert state(tmp_path)[0] == "blessed"
    note(tmp_path, "train/evaluation/verdict.json", VERDICT | {"blessed": False, "reason": "not"})
    assert state(tmp_path) == ("not blessed", "not")
    note(tmp_path, "train/evaluation/verdict.json", VERDICT)
    assert state(tmp_path) == ("blessed", "accuracy 0.9918 >= 0.97")
    reason = "another came first"
    note(tmp_path, "train/exported.json", EXPORTED | {"champion": False, "champion_stays": reason})
    assert state(tmp_path) == ("exported", reason)
    note(tmp_path, "train/exported.json", EXPORTED)
    result = outcome("run-1", str(tmp_path), "https://ui/#/runs/details/run-1")
    assert (result.state, result.model, result.bundle) == ("promoted", "digits", EXPORTED["uri"])
    assert result.gain == pytest.approx(0.0118)
    assert result.lines()[-1] == "run: https://ui/#/runs/details/run-1"

    # What others may plant is not read.
    (tmp_path / "run-1/train/exported.json").unlink()
    (tmp_path / "run-1/train/evaluation/verdict.json").unlink()
    (tmp_path / "run-1/train/evaluation/verdict.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "run-1/train/exported.json")
    write(tmp_path / "elsewhere", json.dumps(VERDICT | {"reason": "planted"}))
    note(tmp_path, f"train/logs/failure-{'x' * 240}.json", {})  # its copy cannot be written
    assert state(tmp_path) == ("blessed", "accuracy 0.9918 >= 0.97")

    # The most advanced of several trainings counts.
    note(tmp_path, "train-2/exported.json", EXPORTED)
    note(tmp_path, "train-3/evaluation/verdict.json", VERDICT | {"blessed": False})
    assert state(tmp_path) == ("promoted", "")


def pod(node: str, phase: str, second: int = 0, reason: str = "Error") -> dict[str, Any]:
    name = node.replace("(", "-").replace(")", "")
    end = cluster.ended(int(phase == "Failed"), second=second, reason=reason)
    result = cluster.pod(
        name, end, spec={"containers": [{"name": "wait"}, {"name": "main"}]}, phase=phase
    )
    result["metadata"] |= {
        "creationTimestamp": end["terminated"]["finishedAt"],
        "annotations": {NODE_NAME: f"wf.root.{node}"},
    }
    return result


def serve(
    monkeypatch: pytest.MonkeyPatch, pods: list[Any], logs: dict[str, str], **workflow: object
) -> FakeApi:
    """Let a cluster have pods, their logs and a Workflow."""
    path = PODS.path("space")
    workflows = WORKFLOWS.path("space")
    objects: dict[str, Any] = {path: {"items": pods}, workflows: {"items": [{"spec": workflow}]}}
    objects |= {f"{path}/{name}/log": {"value": log} for name, log in logs.items()}
    api = FakeApi(objects)
    monkeypatch.setattr(Api, "connect", lambda: api)
    return api


def test_the_first_failed_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [
        pod("preflight.executor", "Succeeded", 0),
        pod("training.sync.executor(0)", "Failed", 1),
        pod("training.sync.executor(1)", "Succeeded", 2),
        pod("training.train.executor(0)", "Failed", 3),
        pod("training.other-driver", "Failed", 4),
        pod("teardown.executor", "Running", 5),
    ]
    log = "I1122 launching\nstep 3\nerror: training failed: rank 1: Boom: x\nexit status 1\n"
    api = serve(monkeypatch, pods, {"training.train.executor-0": log})
    result = outcome("run-1", str(tmp_path), "")
    assert {"labelSelector": "pipeline/runid=run-1"} in api.queries
    assert api.queries[-1]["container"] == "main"
    assert (result.state, result.step) == ("failed", "train")
    assert result.reason == "training failed: rank 1: Boom: x"
    assert result.title() == "run failed in train"


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [
        ({}, ("failed", "out of memory (OOMKilled)")),
        ({"activeDeadlineSeconds": 0}, ("cancelled", "")),
    ],
)
def test_a_step_without_a_log_has_the_reason_of_kubernetes(
    workflow: dict[str, Any],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled run has not failed."""
    pods = [pod("training.evaluate.executor", "Failed", 1, "OOMKilled")]
    serve(monkeypatch, pods, {}, **workflow)
    assert state(tmp_path) == expected


def test_a_notification_never_fails_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setting is invalid, the key is missing, or the folder cannot be read."""
    prefix = "no notification of the run's end was sent:"
    for job, message in (
        ({"notify_on": "no"}, f"{prefix} notify_on='no' is"),
        ({"notify_slack": "NO_SUCH_KEY"}, "nothing was sent to NO_SUCH_KEY: the bucket's secret"),
    ):
        assert engine.run("run-1", "local", job, str(tmp_path)) == "nothing to clean up"
        assert message in capsys.readouterr().out
    monkeypatch.setattr(engine, "open_store", lambda work: 1 / 0)
    job = {"notify_slack": "KEY"}
    assert engine.run("run-1", "local", job, str(tmp_path)) == "nothing to clean up"
    assert f"warning: {prefix} division" in capsys.readouterr().out


def test_no_notification_requests_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = serve(monkeypatch, [], {})
    engine.run("run-1", "local", {}, str(tmp_path))
    assert api.requests == []
