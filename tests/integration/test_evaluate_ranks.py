"""The evaluate step on several ranks of this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kfp_ddp.models import bundle, weights
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.training import checkpoint as checkpoints
from tests.evaluations import Trained

OF_A_RUN = ("seconds", "world_size", "hardware", "written")
"""Fields of the record that differ between evaluations of one checkpoint."""

STEP = """
import json, sys
from pathlib import Path
from tests.evaluations import Trained, run_step
inputs = json.loads(sys.argv[1])
folders = [Path(inputs.pop(name)) for name in ("out", *Trained._fields)]
folder, record, filled = run_step(*folders, **inputs)
print("OUTPUTS", json.dumps([record.accuracy, str(folder), filled["confusion_matrix"].metadata]))
"""


@pytest.mark.slow
def test_two_ranks_of_the_step_write_the_files_of_one_process(
    trained: Trained, blurred_checkpoint: Path, tmp_path: Path
) -> None:
    """Also those of the test split and of a champion that was evaluated on one image less."""
    before = trained._replace(checkpoint=blurred_checkpoint, run_dir=tmp_path / "before")
    before.evaluate()
    champion = tmp_path / "champion"
    champion.mkdir()
    shutil.copy(before.evaluation, champion / "metrics.json")
    shutil.copy(before.evaluation.with_name("predictions.csv"), champion)
    weights.write(*checkpoints.load_model(blurred_checkpoint), champion / "model.safetensors")
    bundle.seal(champion)
    dataset = Path(shutil.copytree(trained.dataset, tmp_path / "data"))
    shutil.copy(dataset / "val" / "red" / "000.png", dataset / "val" / "red" / "more.png")
    shutil.copytree(dataset / "val", dataset / "test")
    given = trained._replace(dataset=dataset)
    more = {"batch_size": 7, "champion": str(champion)}
    inputs = {**given._asdict(), **more, "out": tmp_path, "job": {"nproc_per_node": 2}}
    step = subprocess.run(
        [sys.executable, "-u", "-c", STEP, json.dumps(inputs, default=str)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output = step.stdout
    assert step.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 on" in output
    folder = given.evaluation.parent
    record = Evaluation.read(given.evaluation)
    accuracy, path, charts = json.loads(output.split("OUTPUTS ")[1].splitlines()[0])
    assert (accuracy, path) == (record.accuracy, str(folder))
    assert (record.world_size, record.samples) == (2, 49)
    assert charts["confidenceMetrics"]
    assert not (folder / "process.json").exists()
    by_ranks = written(given.run_dir)
    assert json.loads(by_ranks["evaluation/champion/evaluation.json"])["samples"] == 49
    given.evaluate(**more)
    assert written(given.run_dir) == by_ranks


def written(run_dir: Path) -> dict[str, str]:
    """Return the tables and records of all evaluations, without what differs between two."""
    files = {}
    for folder in ("evaluation", "evaluation-test", "evaluation/champion"):
        record = json.loads((run_dir / folder / "evaluation.json").read_text())
        kept = {name: value for name, value in record.items() if name not in OF_A_RUN}
        files[f"{folder}/evaluation.json"] = json.dumps(kept)
        files[f"{folder}/predictions.csv"] = (run_dir / folder / "predictions.csv").read_text()
    files["labels"] = (run_dir / "evaluation" / "labels_to_check.csv").read_text()
    return files
