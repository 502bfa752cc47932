"""The committed pipelines through kfp.local, also stopped in one step after the other."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kfp_ddp.local import demo, results
from kfp_ddp.local.results import outputs
from kfp_ddp.pictures.layout import lay_out
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.training.spec import model_file
from tests.local_pipeline import pipeline
from tests.photographs import plain, write

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[3]
COMPILED = REPOSITORY / "compiled"
TRAINING = {"image_size": 16, "workers": 0, "val_fraction": 0.25}
SETTINGS = ("model=cifar_resnet8", "image_size=16", "epochs=12", "checkpoint_steps=2")
PROGRAM = [sys.executable, "-m", "kfp_ddp", "run", "photos", "--local", "--ranks", "1"]
COMMAND = [*PROGRAM, *(word for one in SETTINGS for word in ("--set", one))]


class Place:
    """Photographs, a destination and runs below one folder, after a first nightly run."""

    def __init__(self, root: Path) -> None:
        self.root, self.source = root, plain(root / "photographs", 16)
        self.models = root / "models" / "shades"
        self.first_log = nightly(self).stdout
        (self.first_run,) = root.glob("work/*/*/")

    def run(self, name: str, **arguments: Any) -> "subprocess.CompletedProcess[str]":
        """Run a pipeline; `artifacts` is that of the last run."""
        shutil.rmtree(self.root / "artifacts", ignore_errors=True)
        given = {"source": str(self.source), "sync": {"dataset": "shades"}, **arguments}
        done = pipeline(given, self.root, COMPILED / f"{name}.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def outputs(self, step: str) -> dict[str, Any]:
        """Return the outputs of a step of the last run."""
        return results.outputs(self.root, step)

    @property
    def steps(self) -> set[str]:
        """Steps of the last run."""
        return {path.name for path in (self.root / "artifacts").glob("*/*")}

    @property
    def champion(self) -> str:
        return (self.models / "CHAMPION").read_text().strip()


def nightly(place: Place, **changed: Any) -> "subprocess.CompletedProcess[str]":
    arguments = {
        "destination": str(place.models.parent),
        "model_name": place.models.name,
        "model": "cifar_resnet8",
        "epochs": 2,
        "training": TRAINING,
        "backend": "local",
        "gate": {"min_accuracy": 0.4},
        "job": {"nproc_per_node": 1},
        "keep": 1,
    }
    return place.run("retrain", **{**arguments, **changed})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def test_first_nightly_run_fits_the_images_and_exports_the_champion(place: Place) -> None:
    """Warm-up and batch are sized by the images; the split is by name."""
    names = [path.relative_to(place.source).as_posix() for path in place.source.rglob("*.png")]
    sides = lay_out(names, LayoutRule(0.25))
    counts = f"2 classes, {len(sides.train)} to train on, {len(sides.val)} to validate"
    assert counts in place.first_log
    config = json.loads((place.first_run / "config.json").read_text())
    assert (config["epochs"], config["batch_size"]) == (2, 8)
    assert 0 < config["warmup_epochs"] < 2
    with (place.first_run / "evaluation" / "predictions.csv").open(newline="") as file:
        predictions = [row[0] for row in csv.reader(file)][1:]
    assert set(predictions) == {name for name, _ in sides.val}
    assert (place.first_run / "bundle" / "_SUCCESS").is_file()
    assert (place.models / place.champion / "_SUCCESS").is_file()


def test_second_nightly_run_trains_nothing(place: Place) -> None:
    before = place.champion
    nightly(place)
    assert place.steps == {"preflight", "data-sync", "changes", "teardown"}
    assert place.outputs("changes")["reason"].startswith("nothing new: dataset ")
    assert f"exported as {before}" in place.outputs("changes")["reason"]
    assert place.champion == before


def test_champion_is_fine_tuned_and_replaced(place: Place) -> None:
    """With the recipe auto and weights."""
    before = place.champion
    fine: dict[str, Any] = {"recipe": "auto", "pretrained": str(place.models), "epochs": 1}
    fine["training"] = {**TRAINING, "batch_size": 16, "freeze_epochs": 0}
    nightly(place, **fine, gate={"min_accuracy": 0.1, "min_improvement": -1.0})
    configs = [path.read_text() for path in place.root.glob("work/*/train*/config.json")]
    assert sum(bool(re.search(r"initial-weights/\w+/shades", text)) for text in configs) == 1
    versions = {path.parent.name for path in place.models.glob("*/_SUCCESS")}
    assert versions == {before, place.champion}, "keep=1 spares what was compared with"
    assert len(versions) == 2
    assert len(list(place.models.glob("tried/*.json"))) == 2


def test_champion_is_evaluated_on_current_images(place: Place) -> None:
    place.run(
        "evaluate_checkpoint",
        checkpoint=str(place.models),
        gate={"min_improvement": 0.01},
        champion=str(place.models),
    )
    assert place.steps == {
        *("preflight", "data-sync", "dataset-volume", "evaluate", "gate", "teardown")
    }
    assert place.outputs("evaluate")["samples"] > 0
    verdict = place.outputs("gate")
    assert (verdict["champion"], verdict["blessed"]) == (place.champion, False)


def test_sync_reuses_the_existing_version(place: Place) -> None:
    given = {"source": str(place.source), "dataset": "shades", "publish": "none"}
    shutil.rmtree(place.root / "artifacts")
    done = pipeline(given, place.root, COMPILED / "sync_dataset.yaml")
    assert done.returncode == 0, done.stdout
    assert place.steps == {"data-sync", "dataset-volume"}
    synced = place.outputs("data-sync")
    images = list(place.source.rglob("*.png"))
    assert (synced["files"], synced["downloaded"]) == (len(images), 0)
    assert (Path(synced["path"]) / "_SUCCESS").is_file()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("photographs"), 16)


def run(name: str, source: Path, folder: Path, **more: Any) -> None:
    arguments: dict[str, Any] = {
        "source": str(source),
        "backend": "local",
        "job": {"nproc_per_node": 1},
        "sync": {"dataset": "shades"},
        "model_name": "shades",
        "destination": str(folder / "models"),
        "gate": {"min_accuracy": 0.9},
        **more,
    }
    done = pipeline(arguments, folder, COMPILED / f"{name}.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_best_trial_is_exported_if_another_failed(photographs: Path, tmp_path: Path) -> None:
    run(
        "sweep",
        photographs,
        tmp_path,
        model="cifar_resnet8",
        epochs=2,
        training={**TRAINING, "warmup_epochs": 0.0},
        sweep={
            "trials": [
                {"model": "squeezenet1_1"},  # cannot take images of 16 px
                {"learning_rate": 0.05},
                {"learning_rate": 1e-9},
            ],
            "reduction_factor": 2,
        },
        gate={"min_accuracy": 0.4},
    )
    result = outputs(tmp_path, "tune")
    assert (result["trials"], result["failed"], result["ended_early"]) == (3, 1, 1)
    assert result["best_accuracy"] == pytest.approx(outputs(tmp_path, "evaluate")["accuracy"])
    config = json.loads((Path(result["run_dir"]) / "config.json").read_text())
    assert (config["epochs"], config["stop_epochs"]) == (2, 2)
    assert len(list((tmp_path / "models" / "shades").glob("*/_SUCCESS"))) == 1
    (page,) = tmp_path.glob("artifacts/*/*/sweep_report")
    assert "failed: training failed: rank 0: model=squeezenet1_1 cannot" in page.read_text()
    (table,) = tmp_path.glob("artifacts/*/*/sweep_summary")
    head, _, *rows = table.read_text().splitlines()
    assert head == "|  | learning&#95;rate | accuracy | loss | epochs | hours | ended |"
    assert [row[:4] for row in rows] == ["| 1 ", "| 2 ", "|  |"]


def test_own_script_is_evaluated_gated_and_exported(photographs: Path, tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / "own_script.py"
    run(
        "own_script",
        photographs,
        tmp_path,
        script=model_file.pack(script),
        model="own_script.py:build",
        epochs=12,
        training={
            "batch_size": 8,
            "learning_rate": 0.05,
            "image_size": 16,
            "val_fraction": 0.25,
            "script_args": "--momentum 0.8",
        },
    )
    assert outputs(tmp_path, "evaluate")["accuracy"] >= 0.9
    (bundle,) = (path.parent for path in (tmp_path / "models" / "shades").glob("*/_SUCCESS"))
    assert "def build(num_classes: int)" in (bundle / "network.py").read_text()
    assert (bundle / "model.onnx").is_file()


def test_demo_trains_evaluates_and_exports(tmp_path: Path) -> None:
    summary = demo.run(tmp_path, ranks=2, arguments={})
    assert summary["accuracy"] >= 0.97
    assert (summary["files"], summary["files_copied"]) == (1797, 1797)
    assert summary["blessed"] is True
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert all(name in Path(summary["report"]).read_text() for name in ("<svg", "data:image/"))
    assert "<svg" in Path(summary["loss_curve"]).read_text()
    lines = next(tmp_path.glob("work/*/*/metrics.jsonl")).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert next(event for event in events if event["event"] == "start")["world_size"] == 2
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "done")


def test_error_of_a_step_is_one_line(tmp_path: Path) -> None:
    done = pipeline({"source": "file:///nowhere/at/all", "backend": "local"}, tmp_path)
    assert done.returncode != 0
    errors = [text.strip() for text in done.stdout.splitlines() if "error: " in text]
    assert errors, done.stdout
    assert all("/nowhere/at/all" in text for text in errors), errors


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of all commands: one cleans up after another
    write(tmp_path / "photos", each=24)
    (tmp_path / "photos" / "bark" / "birds.ogg").write_text("no image")
    return tmp_path


def newest_step(run: Path) -> int:
    steps = (path.name[5:] for path in run.glob("work/*/*/checkpoints/step-*[0-9]"))
    return max(map(int, steps), default=0)


def stop(step: str, number: signal.Signals, home: Path) -> str:
    """Run the command, send it a signal in a step, and return what it wrote to stderr."""
    run = home / "run-output" / "photos"
    (run / "pipeline.log").unlink(missing_ok=True)
    trained = newest_step(run)
    with subprocess.Popen(COMMAND, cwd=home, stderr=subprocess.PIPE, text=True) as one:
        log = ""
        while f"Executing task '{step}'" not in log or (
            step == "train" and newest_step(run) == trained
        ):
            assert one.poll() is None
            time.sleep(0.02)
            log = (run / "pipeline.log").read_text() if (run / "pipeline.log").exists() else ""
        one.send_signal(number)
        errors = one.communicate()[1]
    if number != signal.SIGKILL:
        assert one.returncode == 130
        assert processes_in(home) == []
        assert left_in(home) == set()
    return errors


def left_in(home: Path) -> set[str]:
    """Return temporary files, of a run or next to it."""
    left = [*home.iterdir(), *home.glob("run-output/*/.tmp")]
    return {path.name for path in left} - {"photos", "run-output"}


def processes_in(folder: Path) -> list[int]:
    """Return the processes with a path in the folder on their command line."""
    return [
        process.info["pid"]
        for process in psutil.process_iter(["pid", "cmdline"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


def test_same_command_resumes(home: Path) -> None:
    assert "the same command resumes (step " in stop("train", signal.SIGINT, home)
    assert "(step 84 of 84)" in stop("evaluate", signal.SIGTERM, home)
    stop("export", signal.SIGKILL, home)
    done = subprocess.run([*COMMAND, "--json"], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming at step 84 of 84 " in done.stderr
    run = home / "run-output" / "photos"
    assert json.loads(done.stdout)["bundle"] == str(run / "bundle")
    assert (run.parent / "latest").resolve() == run
    assert left_in(home) == set()
    assert not list(run.parent.glob("data/*/versions/*/bark/*.ogg"))
    expected = {"photos", "data", "latest", ".kfp-ddp"}
    assert {path.name for path in run.parent.iterdir()} == expected
