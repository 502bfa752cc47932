"""A run's folder: its names are a contract with what earlier versions wrote."""

from pathlib import Path

import pytest

from kfp_ddp.base.errors import InputError, StorageError
from kfp_ddp.base.run_folder import RunFolder, open_run_dir


def test_names_stay_as_earlier_versions_wrote_them() -> None:
    folder = RunFolder("/w/r")
    names = [path.name for path in vars(folder).values()]
    assert names == [
        *("r", "config.json", "metrics.jsonl", "checkpoints", "begun-by", "logs", "tensorboard"),
        *("profile", "launcher.heartbeat", "process.json", "bundle"),
    ]
    assert folder.evaluation("val") == Path("/w/r/evaluation")
    assert folder.evaluation("test") == Path("/w/r/evaluation-test")
    assert folder.log_positions("job-1") == Path("/w/r/launcher.job-1.places.json")


@pytest.mark.parametrize("run_id", ["", "../other", "a/b", ".hidden", "x" * 129])
def test_a_run_id_that_is_no_plain_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), run_id)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_and_left_empty_and_one_without_rights_is_one_line(tmp_path: Path) -> None:
    made = open_run_dir(str(tmp_path / "work"), "run")
    assert list(made.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\)"):
        open_run_dir(str(tmp_path / "file"), "run")
