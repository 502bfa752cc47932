"""The pipelines retrain, finetune, evaluate_checkpoint, sync_dataset through kfp.local, in turn."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.local import results
from tests.local_pipeline import pipeline
from tests.photographs import plain

pytestmark = pytest.mark.slow
COMPILED = Path(__file__).parents[2] / "compiled"
TRAINING = {"image_size": 16, "workers": 0, "val_fraction": 0.25, "warmup_epochs": 0.0}


class Place:
    """Photographs, a destination and runs below one folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.source = root, plain(root / "photographs", 16)
        self.models = root / "models" / "shades"

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


def nightly(place: Place, **changed: Any) -> None:
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
    place.run("retrain", **{**arguments, **changed})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder after a first nightly run."""
    found = Place(tmp_path_factory.mktemp("place"))
    nightly(found)
    return found


def test_first_nightly_run_exports_the_champion(place: Place) -> None:
    assert {"train", "evaluate", "gate", "export", "teardown"} <= place.steps
    assert place.outputs("changes")["changed"] is True
    assert (place.models / place.champion / "_SUCCESS").is_file()


def test_second_nightly_run_trains_nothing(place: Place) -> None:
    before = place.champion
    nightly(place)
    assert place.steps == {"preflight", "data-sync", "changes", "teardown"}
    assert place.outputs("changes")["reason"].startswith("nothing new: dataset ")
    assert f"exported as {before}" in place.outputs("changes")["reason"]
    assert place.champion == before


def test_champion_is_fine_tuned(place: Place) -> None:
    place.run(
        "finetune",
        pretrained=str(place.models),
        model="cifar_resnet8",
        epochs=1,
        training={**TRAINING, "batch_size": 16, "freeze_epochs": 0},
        backend="local",
        gate={"min_accuracy": 1.0, "champion_must_exist": True},
        champion=str(place.models),
        job={"nproc_per_node": 1},
    )
    assert {"train", "evaluate", "gate"} <= place.steps
    configs = [path.read_text() for path in place.root.glob("work/*/train*/config.json")]
    assert sum(bool(re.search(r"initial-weights/\w+/shades", text)) for text in configs) == 1


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
