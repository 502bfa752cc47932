"""The folder of a local run: which one a command takes, and what it refuses to delete."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client.run_info import local_run
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.local import engine
from kfp_ddp.local.folder import LocalRun, begin, link_latest, locked, unfinished
from tests import run_output


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def complete(run: LocalRun) -> None:
    dataclasses.replace(run, complete=True).write()


def test_each_command_has_a_folder_until_it_is_complete(tmp_path: Path) -> None:
    first = begin(LocalRun("a", {"epochs": 3}), None, "photos")
    other = begin(LocalRun("b", {}), None, "photos")
    assert (first.folder.name, other.folder.name) == ("photos", "photos-2")
    assert first.data == other.data == tmp_path / "run-output" / "data"
    assert unfinished(None, "a") == first
    complete(first)
    assert unfinished(None, "a") is None
    link_latest(other)
    link_latest(first)
    assert (tmp_path / "run-output" / "latest").resolve() == first.folder
    assert begin(LocalRun("c", {}), None, "latest").folder.name == "latest-2"


def test_model_in_the_named_folder_is_only_replaced_on_request(tmp_path: Path) -> None:
    folder = run_output.make(tmp_path / "mine")
    with pytest.raises(InputError, match="--replace"):
        begin(LocalRun("a", {}), folder, "")
    run = begin(LocalRun("a", {}), folder, "", replace=True)
    assert (run.folder, run.data) == (folder, folder / "data")
    assert not (folder / "work").exists()
    assert unfinished(folder, "a") == run
    assert begin(LocalRun("b", {}), folder, "").seed != run.seed


def test_running_command_is_refused_and_keeps_its_cache(tmp_path: Path) -> None:
    run = begin(LocalRun("a", {}), None, "photos")
    (run.folder / "cache").mkdir()
    with locked(run.folder), pytest.raises(InputError, match="is running in"):
        engine.run(run, 0.0)
    assert (run.folder / "cache").is_dir()


def test_status_of_a_folder(tmp_path: Path) -> None:
    folder = run_output.make(tmp_path / "mine", failed="train")
    (tmp_path / "latest").symlink_to(folder.name)
    state = CliRunner().invoke(app, ["status", "latest", "--json"])
    document = json.loads(state.stdout)
    assert (document["name"], document["state"], state.exit_code) == ("mine", "FAILED", 0)
    assert "FAILED" in [step["state"] for step in document["steps"] if step["name"] == "train"]
    followed = CliRunner().invoke(app, ["status", "latest", "--follow"])
    assert isinstance(followed.exception, JobError)
    assert "mine" in followed.output
    stopped = begin(LocalRun("a", {}), None, "photos").folder
    (stopped / "pipeline.log").touch()
    assert local_run(stopped).state == "UNFINISHED"
    with locked(stopped):
        assert local_run(stopped).state == "RUNNING"
