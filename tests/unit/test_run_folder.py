"""A run's folder: its names are a contract with what earlier versions wrote."""

import re
from pathlib import Path
from random import Random

import pytest

from kfp_ddp.core.errors import InputError, StorageError
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
def test_a_run_id_that_is_no_plain_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), run_id, "train")
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), "run", run_id)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_and_left_empty_and_one_without_rights_is_one_line(tmp_path: Path) -> None:
    made = open_run_dir(str(tmp_path / "work"), "run", "train")
    assert made == (tmp_path / "work/run/train").resolve()
    assert list(made.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\)"):
        open_run_dir(str(tmp_path / "file"), "run", "train")


def test_no_two_tasks_and_no_two_iterations_have_one_title() -> None:
    random = Random(13)
    letters = "abcXYZ019._-/ äß"
    names = {"".join(random.choices(letters, k=length)) for length in range(90) for _ in range(40)}
    long = "a" * 41
    names |= {"train", "train-2", "train.2", "a", "a.b", long, f"{long}b", f"{long}c"}
    tasks = [(name, number) for name in sorted(names) for number in ("", "2", "16", "b", "x" * 40)]
    titles = {task_title(*task) for task in tasks}
    assert len(titles) == len(tasks)
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", t) for t in titles)
    assert task_title("train", "") == "train"
    assert task_title("train", "16") == "train.16"
