import os
import time
from pathlib import Path

import pytest

from kfp_ddp.components.teardown.engine import run

DAY = 86400.0


def folder(work: Path, name: str, days: float, inside: str = "metrics.jsonl") -> Path:
    """A run that last wrote so many days ago."""
    made = work / name
    (made / "checkpoints").mkdir(parents=True)
    (made / inside).touch()
    for path in (made / inside, made / "checkpoints", made):
        os.utime(path, (time.time() - days * DAY,) * 2)
    return made


def test_runs_before_the_newest_are_deleted_once_they_are_quiet(tmp_path: Path) -> None:
    for name, days in (("own", 9.0), ("newer", 2.0), ("older", 3.0), ("oldest", 400.0)):
        folder(tmp_path, name, days)
    foreign = folder(tmp_path, "models", 500.0, inside="model.onnx")
    outside = folder(tmp_path.parent, f"{tmp_path.name}-outside", 500.0)
    (tmp_path / "link").symlink_to(outside)
    assert run("own", "local", {"keep_runs": 2}, str(tmp_path)) == "deleted 2 older run(s)"
    assert {path.name for path in tmp_path.iterdir()} == {"own", "newer", "models", "link"}
    assert foreign.exists()
    assert (outside / "metrics.jsonl").exists()


def test_a_run_that_still_writes_is_kept(tmp_path: Path) -> None:
    folder(tmp_path, "own", 0.0)
    waiting = folder(tmp_path, "waiting", 30.0)
    (waiting / "heartbeat").touch()
    assert run("own", "local", {"keep_runs": 1}, str(tmp_path)) == "nothing was left to end"
    assert waiting.exists()


def test_by_default_no_run_is_deleted(tmp_path: Path) -> None:
    old = folder(tmp_path, "old", 1000.0)
    assert run("own", "local", {}, str(tmp_path)) == "nothing was left to end"
    assert old.exists()


def test_a_number_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="keep_runs=-1 cannot be used: it should be greater"):
        run("own", "local", {"keep_runs": -1}, str(tmp_path))


def test_a_job_that_train_refuses_keeps_nothing_from_being_ended(tmp_path: Path) -> None:
    for name, days in (("own", 0.0), ("old", 400.0)):
        folder(tmp_path, name, days)
    said = run("own", "local", {"no_such_setting": 1, "keep_runs": 1}, str(tmp_path))
    assert said == "deleted 1 older run(s)"
