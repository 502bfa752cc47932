"""A run's folder: its names are a contract with what earlier versions wrote."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.core.run_folder import RunFolder, open_run_dir, task_title


def test_names_of_files_do_not_change() -> None:
    folder = RunFolder("/w/r")
    constants = {name for key, name in vars(RunFolder).items() if key.isupper()}
    assert {path.name for path in vars(folder).values()} | constants == {
        *("r", "config.json", "metrics.jsonl", "dataset.jsonl", "checkpoints", "begun-by", "logs"),
        *("tensorboard", "profile", "launcher.heartbeat", "process.json", "ranks", ".leases"),
        *("launcher.initial-weights", "bundle", "launcher.trace.json", "traces"),
    }
    assert folder.evaluation("val") == Path("/w/r/evaluation")
    assert folder.evaluation("test") == Path("/w/r/evaluation-test")
    assert folder.log_positions("job-1") == Path("/w/r/launcher.job-1.places.json")


@pytest.mark.parametrize("run_id", ["", "../other", "a/b", ".hidden", "x" * 129])
def test_invalid_run_id_is_an_error(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), run_id, "train")
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), "run", run_id)
    assert list(tmp_path.iterdir()) == []


def test_run_dir_is_created_or_an_error(tmp_path: Path) -> None:
    made = open_run_dir(str(tmp_path / "work"), "run", "train")
    assert made == (tmp_path / "work/run/train").resolve()
    assert list(made.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        open_run_dir(str(tmp_path / "file"), "run", "train")


TASK_NAME = st.text("abcXYZ019._-/ äß", max_size=90) | st.sampled_from(["a" * 41, "a" * 41 + "b"])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sets(st.tuples(TASK_NAME, st.sampled_from(["", "2", "16", "b", "x" * 40])), min_size=2))
def test_titles_of_tasks_and_iterations_are_unique(tasks: set[tuple[str, str]]) -> None:
    tasks |= {("train", ""), ("train-2", ""), ("train.2", ""), ("train", "2"), ("a.b", "")}
    titles = {task_title(*task) for task in tasks}
    assert len(titles) == len(tasks)
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", t) for t in titles)
    assert task_title("train", "") == "train"
    assert task_title("train", "16") == "train.16"


@pytest.mark.parametrize(
    ("function", "variable", "mount"),
    [(data_dir, "KFP_DDP_DATA_DIR", "/data"), (work_dir, "KFP_DDP_WORK_DIR", "/work")],
)
def test_setting_overrides_the_variable_and_that_the_mount(
    function: Callable[..., str], variable: str, mount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert function() == mount
    monkeypatch.setenv(variable, "/elsewhere")
    assert function() == "/elsewhere"
    assert function("/setting") == "/setting"
