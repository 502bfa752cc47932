"""A run that trains in its step may evaluate by a job."""

from pathlib import Path

import pytest

from kfp_ddp.runs.teardown import engine


@pytest.mark.parametrize(("backend", "looks"), [("local", False), ("trainjob", True)])
def test_jobs_are_looked_for_where_one_evaluates(
    backend: str, looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_jobs", lambda run_id: [f"ended the jobs of {run_id}"])
    job = {"evaluate_backend": backend}
    said = engine.run(run_id="r", backend="local", job=job, work_dir=str(tmp_path))
    assert ("ended the jobs of r" in said) == looks


@pytest.mark.parametrize("pod", ["train-resnet-x7-123", ""])
def test_what_a_run_without_jobs_has_on_trial_is_taken_back_on_a_cluster(
    pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", pod)
    monkeypatch.setattr("kfp_ddp.k8s.api.Api.connect", lambda: "the cluster")
    monkeypatch.setattr(engine, "take_back_of", lambda api, run_id: [f"{run_id} of {api}"])
    said = engine.run(run_id="r", backend="local", job={}, work_dir=str(tmp_path))
    assert said == ("r of the cluster" if pod else "nothing was left to end")
