"""The evaluate step on several ranks of this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage

from kfp_ddp.evaluation.ranks import Evaluated
from kfp_ddp.evaluation.request import Request
from kfp_ddp.jobs.local import EVALUATION
from kfp_ddp.models import bundle, weights
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.runs import checkpoints as bucketed
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training import checkpoint as checkpoints
from tests.evaluations import evaluate
from tests.serving import free_port
from tests.training_ranks import forked

OF_A_RUN = ("seconds", "world_size", "hardware", "written")
"""Fields of the record that differ between evaluations of one checkpoint."""

STEP = """
import json, sys
from pathlib import Path
from tests.evaluations import run_step
inputs = json.loads(sys.argv[1])
folders = [Path(inputs.pop(name)) for name in ("out", "checkpoint", "run_dir", "dataset")]
folder, record, filled = run_step(*folders, **inputs)
print("OUTPUTS", json.dumps([record.accuracy, str(folder), filled["confusion_matrix"].metadata]))
"""


def start(ranks: int, tmp_path: Path, **inputs: Any) -> "subprocess.Popen[str]":
    """Start the step in another process."""
    inputs = {"job": {"nproc_per_node": ranks}, "out": tmp_path, **inputs}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", STEP, json.dumps(inputs, default=str)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def figures(run_dir: Path) -> dict[str, Any]:
    record = json.loads((run_dir / "evaluation" / "evaluation.json").read_text())
    return {name: value for name, value in record.items() if name not in OF_A_RUN}


@pytest.mark.slow
def test_two_ranks_of_the_step_write_the_files_of_one_process(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    inputs = (trained_checkpoint, trained_run, trained_dataset)
    folders = ("checkpoint", "run_dir", "dataset")
    step = start(2, tmp_path, **dict(zip(folders, inputs, strict=True)), batch_size=7)
    output, _ = step.communicate(timeout=300)
    assert step.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 on" in output
    folder = trained_run / "evaluation"
    names = ("predictions.csv", "labels_to_check.csv")
    tables, by_ranks = [(folder / name).read_text() for name in names], figures(trained_run)
    record = Evaluation.read(folder / "evaluation.json")
    accuracy, path, charts = json.loads(output.split("OUTPUTS ")[1].splitlines()[0])
    assert (accuracy, path) == (record.accuracy, str(folder))
    assert (record.world_size, record.samples) == (2, 48)
    assert charts["confidenceMetrics"]
    assert not (folder / "process.json").exists()

    evaluate(*inputs, batch_size=7)
    assert [(folder / name).read_text() for name in names] == tables
    assert figures(trained_run) == by_ranks


def _rank(argv: list[str], rank: int, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_PORT=str(port))
    from kfp_ddp.evaluation import node

    sys.exit(node.rank(argv))


def ranks(request: Request, world: int) -> None:
    """Evaluate with forked ranks, without their launcher."""
    port = free_port()
    processes = [forked(_rank, request.to_argv(), rank, world, port) for rank in range(world)]
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * world


@pytest.mark.slow
def test_test_split_and_champion_are_evaluated_on_the_same_ranks(
    trained_checkpoint: Path,
    blurred_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
) -> None:
    """The champion's own evaluation is of a split with one image less."""
    evaluate(blurred_checkpoint, tmp_path / "before", trained_dataset)
    champion = tmp_path / "champion"
    champion.mkdir()
    for name, other in (("evaluation.json", "metrics.json"), ("predictions.csv",) * 2):
        shutil.copy(tmp_path / "before" / "evaluation" / name, champion / other)
    weights.write(*checkpoints.load_model(blurred_checkpoint), champion / "model.safetensors")
    bundle.seal(champion)
    dataset = tmp_path / "data"
    shutil.copytree(trained_dataset, dataset)
    shutil.copy(dataset / "val" / "red" / "000.png", dataset / "val" / "red" / "more.png")
    shutil.copytree(dataset / "val", dataset / "test")
    request = Request.create(
        checkpoint=str(trained_checkpoint),
        run_dir=str(trained_run),
        data=str(dataset),
        batch_size=9,
        champion=str(champion),
        device="cpu",
    )
    written = []
    for world in (3, 1):
        ranks(request, world)
        files = {
            name: (trained_run / name).read_text()
            for folder in ("evaluation", "evaluation-test", "evaluation/champion")
            for name in (f"{folder}/predictions.csv", f"{folder}/evaluation.json")
        }
        for name in (name for name in files if name.endswith(".json")):
            record = json.loads(files[name])
            files[name] = json.dumps({k: v for k, v in record.items() if k not in OF_A_RUN})
        written.append(files)
    assert written[0] == written[1]
    assert json.loads(written[0]["evaluation/champion/evaluation.json"])["samples"] == 49


@pytest.mark.soak
def test_a_pod_without_a_pvc_uploads_its_evaluation(
    trained_checkpoint: Path,
    trained_dataset: Path,
    emulator: storage.Client,
    tmp_path: Path,
) -> None:
    run_dir = "gs://models/runs/r/train"
    name = f"checkpoints/{trained_checkpoint.name}"
    bucketed.upload(open_store(run_dir), name, trained_checkpoint)
    request = Request.create(
        checkpoint=f"{run_dir}/{name}", run_dir=run_dir, data=str(trained_dataset), device="cpu"
    )
    command = [sys.executable, "-m", EVALUATION, "--nproc-per-node=2", "--", *request.to_argv()]
    environment = {**os.environ, "KFP_DDP_SCRATCH_DIR": str(tmp_path / "scratch")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    with open_workspace(run_dir, "test") as folder:
        folder.download_below("evaluation/")
        result = Evaluated.read(folder.path / "evaluation").result
    assert (result.samples, result.world_size) == (48, 2)
