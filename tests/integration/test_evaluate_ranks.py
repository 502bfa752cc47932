"""The evaluate step on several ranks of this machine."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from google.cloud import storage

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import evaluate as engine
from kfp_ddp.evaluation.ranks import Evaluated
from kfp_ddp.evaluation.request import Request
from kfp_ddp.jobs.local import EVALUATION
from kfp_ddp.models import bundle, weights
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.runs import checkpoints as bucketed
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training import checkpoint as checkpoints
from kfp_ddp.training.model import build
from tests.serving import free_port
from tests.training_ranks import forked

OF_A_RUN = ("seconds", "world_size", "hardware", "written")
"""Of a record, what differs between two evaluations of one checkpoint."""

STEP = """
import json, sys, warnings
from kfp import dsl
from kfp_ddp.components.evaluate.component import evaluate
kinds = {"evaluation_metrics": dsl.Metrics, "confusion_matrix": dsl.ClassificationMetrics}
kinds |= {"evaluation_report": dsl.HTML, "evaluation_summary": dsl.Markdown}
given = json.loads(sys.argv[1])
out = given.pop("out")
filled = {name: kind(name=name, uri=f"{out}/{name}") for name, kind in kinds.items()}
accuracy, path = evaluate.python_func(**given, **filled)
print("OUTPUTS", json.dumps([accuracy, path, filled["confusion_matrix"].metadata]))
"""


def start(ranks: int, tmp_path: Path, **given: Any) -> "subprocess.Popen[str]":
    """The step in a process of its own."""
    given = {"job": {"nproc_per_node": ranks}, "out": str(tmp_path), **given}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", STEP, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def figures(run_dir: Path) -> dict[str, Any]:
    """The record, without what differs between any two evaluations."""
    record = json.loads((run_dir / "evaluation" / "evaluation.json").read_text())
    return {name: value for name, value in record.items() if name not in OF_A_RUN}


@pytest.mark.slow
def test_two_ranks_of_the_step_write_what_one_process_writes(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    given = {"checkpoint": str(trained_checkpoint), "dataset_path": str(trained_dataset)}
    given |= {"run_dir": str(trained_run)}
    step = start(2, tmp_path, **given, batch_size=7)
    output, _ = step.communicate(timeout=300)
    assert step.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 on" in output
    folder = trained_run / "evaluation"
    predictions, found = (folder / "predictions.csv").read_text(), figures(trained_run)
    record = Evaluation.read(folder / "evaluation.json")
    accuracy, path, charts = json.loads(output.split("OUTPUTS ")[1].splitlines()[0])
    assert (accuracy, path) == (record.accuracy, str(folder / "evaluation.json"))
    assert record.world_size == 2
    assert charts["confidenceMetrics"]
    assert not (folder / "process.json").exists()

    engine(trained_checkpoint, trained_run, trained_dataset, "val", 7, 24)
    assert (folder / "predictions.csv").read_text() == predictions
    assert figures(trained_run) == found
    assert len(list(csv.DictReader(predictions.splitlines()))) == 48


def _rank(argv: list[str], rank: int, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_PORT=str(port))
    from kfp_ddp.evaluation import rank as program

    sys.argv = ["rank", *argv]
    sys.exit(program.main())


def ranks(request: Request, world: int) -> None:
    """Evaluate with ranks that are forked from a server, without their launcher."""
    port = free_port()
    processes = [forked(_rank, request.to_argv(), rank, world, port) for rank in range(world)]
    for each in processes:
        each.join(240)
    assert [each.exitcode for each in processes] == [0] * world


@pytest.mark.slow
def test_test_split_and_champion_are_evaluated_on_the_same_ranks(
    trained_checkpoint: Path,
    blurred_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
) -> None:
    """The champion's own evaluation is of a split that lacks an image of today's."""
    engine(blurred_checkpoint, tmp_path / "before", trained_dataset, "val", 64, 0)
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
def test_what_a_pod_evaluates_without_a_claim_is_kept_in_the_bucket(
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
        found = Evaluated.read(folder.path / "evaluation")
    assert (found.result.samples, found.result.world_size) == (48, 2)


@pytest.mark.soak
def test_what_one_rank_finds_wrong_is_the_steps_one_line(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    """The image is in the share of the second; no evaluation is left, not even the last one."""
    dataset = tmp_path / "data"
    shutil.copytree(trained_dataset, dataset)
    (dataset / "val" / "red" / "000.png").write_bytes(b"no image")
    evaluation = trained_run / "evaluation" / "evaluation.json"
    engine(trained_checkpoint, trained_run, trained_dataset, "val", 40, 0)
    assert evaluation.exists()
    step = start(
        2,
        tmp_path,
        checkpoint=str(trained_checkpoint),
        dataset_path=str(dataset),
        run_dir=str(trained_run),
        batch_size=31,
    )
    output, _ = step.communicate(timeout=300)
    assert step.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("error: ")
    assert "000.png" in last
    assert not evaluation.exists()


@pytest.mark.soak
def test_a_rank_that_is_killed_leaves_no_evaluation_and_another_try_makes_one(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    given = {"checkpoint": str(trained_checkpoint), "dataset_path": str(trained_dataset)}
    given |= {"run_dir": str(trained_run)}
    step, killed = start(2, tmp_path, **given), 0
    until = time.monotonic() + 200
    while not killed and time.monotonic() < until:
        for each in psutil.Process(step.pid).children(recursive=True):
            try:
                is_rank = "kfp_ddp.evaluation.rank" in each.cmdline()
                if is_rank and each.environ().get("RANK") == "1":
                    killed = each.pid
                    each.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        time.sleep(0.05)
    output, _ = step.communicate(timeout=300)
    assert step.returncode == 1, output
    assert "error: evaluation failed: rank 1: ended by SIGKILL" in output.splitlines()[-1]
    assert not (trained_run / "evaluation" / "evaluation.json").exists()
    engine(trained_checkpoint, trained_run, trained_dataset, "val", 64, 0)
    assert figures(trained_run)["samples"] == 48


def spoilt(kind: str, trained: Path, folder: Path) -> Path:
    """A checkpoint that verifies, of weights that are none of its network."""
    manifest = checkpoints.verify(trained).manifest
    state = checkpoints.verify(trained).state()
    network = state["ema"] or state["model"]
    if kind == "another network":
        network = build("cifar_resnet14", 3).state_dict()
    elif kind == "NaN":
        network["fc.weight"].fill_(torch.nan)
    else:
        network = {f"{kind}{name}": value for name, value in network.items()}
    keep = {k: v for k, v in manifest.items() if k not in ("files", "step")}
    return checkpoints.write(folder, 41, {"model": network, "ema": None}, keep)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_weights_saved_from_a_wrapper_are_those_of_the_network(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path, prefix: str
) -> None:
    wrapped = spoilt(prefix, trained_checkpoint, tmp_path)
    found, *_ = engine(wrapped, trained_run, trained_dataset, "val", 64, 0)
    plain, *_ = engine(trained_checkpoint, trained_run, trained_dataset, "val", 64, 0)
    assert found.confusion == plain.confusion


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("another network", "do not fit a cifar_resnet8"),
        ("NaN", "fc.weight is NaN or infinite: training diverged"),
    ],
)
def test_weights_that_cannot_be_used_are_one_line(
    trained_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
    kind: str,
    says: str,
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        engine(
            spoilt(kind, trained_checkpoint, tmp_path), trained_run, trained_dataset, "val", 9, 0
        )
    assert "\n" not in str(caught.value)
