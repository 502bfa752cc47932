"""A run that trains in its step may evaluate by a job."""

from pathlib import Path

import pytest

from kfp_ddp.components.teardown import engine


@pytest.mark.parametrize(("backend", "looks"), [("local", False), ("trainjob", True)])
def test_jobs_are_looked_for_where_one_evaluates(
    backend: str, looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_jobs", lambda run_id: [f"ended the jobs of {run_id}"])
    job = {"evaluate_backend": backend}
    said = engine.run(run_id="r", backend="local", job=job, work_dir=str(tmp_path))
    assert ("ended the jobs of r" in said) == looks
