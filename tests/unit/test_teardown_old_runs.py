import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.runs.teardown import engine
from kfp_ddp.runs.teardown.engine import run
from kfp_ddp.storage import leases

DAY = 86400.0


def folder(work: Path, name: str, days: float, inside: str = "train/metrics.jsonl") -> Path:
    """A run that last wrote so many days ago."""
    made = work / name
    file = made / inside
    (file.parent / "checkpoints").mkdir(parents=True)
    file.touch()
    for path in (file, file.parent / "checkpoints", file.parent, made):
        os.utime(path, (time.time() - days * DAY,) * 2)
    return made


def test_runs_before_the_newest_are_deleted_if_nobody_uses_them(tmp_path: Path) -> None:
    for name, days in (("own", 9.0), ("newer", 2.0), ("older", 3.0), ("oldest", 400.0)):
        folder(tmp_path, name, days)
    folder(tmp_path, "of-an-earlier-version", 500.0, inside="metrics.jsonl")
    foreign = folder(tmp_path, "models", 500.0, inside="model.onnx")
    outside = folder(tmp_path.parent, f"{tmp_path.name}-outside", 500.0)
    (tmp_path / "link").symlink_to(outside)
    (folder(tmp_path, "linked", 500.0, "model.onnx") / "train").symlink_to(outside / "train")
    assert run("own", "local", {"keep_runs": 2}, str(tmp_path)) == "deleted 3 older run(s)"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("own", "newer", "models", "link", "linked")
    }
    assert foreign.exists()
    assert (outside / "train/metrics.jsonl").exists()


def test_a_run_that_failed_before_it_made_a_folder_leaves_none_to_delete(tmp_path: Path) -> None:
    missing = str(tmp_path / "work")
    assert run("own", "local", {"keep_runs": 2}, missing) == "nothing was left to end"


def test_a_run_that_a_step_uses_is_kept_however_long_it_was_silent(tmp_path: Path) -> None:
    folder(tmp_path, "own", 0.0)
    waiting = folder(tmp_path, "waiting", 30.0)
    with leases.folder_lease(RunFolder(waiting / "train").leases, "evaluate"):
        assert run("own", "local", {"keep_runs": 1}, str(tmp_path)) == "nothing was left to end"
    assert run("own", "local", {"keep_runs": 1}, str(tmp_path)) == "deleted 1 older run(s)"
    assert not waiting.exists()


def test_a_run_whose_ranks_work_on_this_machine_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path, "own", 0.0)
    working = folder(tmp_path, "working", 30.0)
    monkeypatch.setattr(local, "_works_in", lambda pid, run_dir: True)
    local.record(working / "train", os.getpid())
    assert run("own", "local", {"keep_runs": 1}, str(tmp_path)) == "nothing was left to end"
    assert working.exists()


def test_a_run_that_the_cluster_still_has_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "live_runs", lambda: {"queued"}.__contains__)
    folder(tmp_path, "own", 0.0)
    for name in ("queued", "over"):
        folder(tmp_path, name, 30.0)
    assert run("own", "local", {"keep_runs": 1}, str(tmp_path)) == "deleted 1 older run(s)"
    assert {path.name for path in tmp_path.iterdir()} == {"own", "queued"}


def test_where_it_cannot_be_seen_which_runs_live_all_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    kube_config = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(kube_config, str(tmp_path / "none"))  # read from KUBECONFIG by its import
    for name in ("own", "old"):
        folder(tmp_path, name, 30.0)
    said = run("own", "local", {"keep_runs": 1}, str(tmp_path))
    assert said.startswith("retained 1 older run(s): which runs live cannot be seen: ")
    assert (tmp_path / "old").exists()


@pytest.fixture
def unprivileged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user whom modes bind, as the current folder, so that no parent is asked."""
    monkeypatch.chdir(tmp_path)
    before = os.geteuid()
    if before == 0:
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
    yield tmp_path
    os.seteuid(before)


def test_what_cannot_be_looked_into_is_passed_over(unprivileged: Path) -> None:
    for name in ("own", "old"):
        folder(Path(), name, 30.0)
    closed = Path("lost+found")
    closed.mkdir(mode=0)
    partly = folder(Path(), "partly", 40.0)
    (partly / "private").mkdir(mode=0)
    assert run("own", "local", {"keep_runs": 1}, ".") == "deleted 1 older run(s)"
    assert sorted(os.listdir()) == ["lost+found", "own", "partly"]


@pytest.mark.parametrize("run_id", ["../other/run-b", "a/b", "", "."])
def test_a_run_id_that_leads_elsewhere_ends_nothing(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(SystemExit, match="cannot name a folder"):
        run(run_id, "local", {}, str(tmp_path))


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


def begun(work: Path, name: str, days: float, held_by: str = "") -> None:
    """A run below an address, begun so many days ago."""
    task = work / name / "train"
    for file in (f".begun/{time.time() - days * DAY:.0f}", "checkpoints/step-00000001/state.pt"):
        (task / file).parent.mkdir(parents=True)
        (task / file).touch()
    if held_by:
        (task / ".leases").mkdir()
        (task / ".leases" / held_by).touch()


def test_in_a_bucket_too_runs_before_the_newest_are_deleted_if_nobody_uses_them(
    tmp_path: Path,
) -> None:
    lasting = f"evaluate.ab.{time.time():.0f}"
    over = f"evaluate.cd.{time.time() - DAY:.0f}"
    begun(tmp_path, "own", 9.0)
    for name, days, held_by in (
        *(("newer", 2.0, ""), ("older", 3.0, over)),
        *(("used", 400.0, lasting), ("oldest", 500.0, "")),
    ):
        begun(tmp_path, name, days, held_by)
    foreign = tmp_path / "models/x/model.onnx"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    work = f"file://{tmp_path}"
    assert run("own", "local", {"keep_runs": 2}, work) == "deleted 2 older run(s)"
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"own", "newer", "used", "models"}
    assert run("own", "local", {"keep_runs": 2}, work) == "nothing was left to end"
