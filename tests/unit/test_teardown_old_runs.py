"""Teardown: processes, jobs and folders of earlier runs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.runs.teardown import engine
from kfp_ddp.storage import leases

DAY = 86400.0
NOTHING = "nothing was left to end"


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


def test_runs_with_a_lease_a_process_or_a_workflow_are_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_all_runs_are_retained_if_live_runs_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        path = work / name / "train" / file
        path.parent.mkdir(parents=True)
        path.touch()


def test_old_unused_runs_in_a_bucket_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "live_runs", lambda: {"queued"}.__contains__)
    bucket_run(tmp_path, "queued", 600.0)
    valid, expired = (f"evaluate.ab.{time.time() - age:.0f}" for age in (0, DAY))
    bucket_run(tmp_path, "own", 9.0)
    bucket_run(tmp_path, "newer", 2.0)
    bucket_run(tmp_path, "older", 3.0, expired)
    bucket_run(tmp_path, "used", 400.0, valid)
    bucket_run(tmp_path, "oldest", 500.0)
    foreign = tmp_path / "models/x/model.onnx"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
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
def test_a_trial_of_a_run_without_jobs_is_rolled_back_on_a_cluster(
    pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", pod)
    monkeypatch.setattr("kfp_ddp.k8s.api.Api.connect", lambda: "the cluster")
    monkeypatch.setattr(engine, "take_back_of", lambda api, run_id: [f"{run_id} of {api}"])
    assert run(tmp_path) == ("own of the cluster" if pod else NOTHING)
