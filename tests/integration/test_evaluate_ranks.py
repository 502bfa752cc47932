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

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.evaluate.engine import evaluate as engine
from kfp_ddp.components.shared.evaluation import Evaluation
from kfp_ddp.training import checkpoint as checkpoints
from kfp_ddp.training.model import build

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
    for name in ("seconds", "world_size", "hardware", "written"):
        record.pop(name, None)
    return dict(record)


def test_three_ranks_write_what_one_writes(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    given = {"checkpoint": str(trained_checkpoint), "dataset_path": str(trained_dataset)}
    given |= {"run_dir": str(trained_run)}
    three = start(3, tmp_path, **given, batch_size=7)
    output, _ = three.communicate(timeout=300)
    assert three.returncode == 0, output
    for rank in range(3):
        assert f"rank {rank} of 3 on" in output
    folder = trained_run / "evaluation"
    predictions, found = (folder / "predictions.csv").read_text(), figures(trained_run)
    record = Evaluation.read(folder / "evaluation.json")
    accuracy, path, charts = json.loads(output.split("OUTPUTS ")[1].splitlines()[0])
    assert (accuracy, path) == (record.accuracy, str(folder / "evaluation.json"))
    assert record.world_size == 3
    assert charts["confidenceMetrics"]
    assert not (folder / "process.json").exists()

    engine(trained_checkpoint, trained_run, trained_dataset, "val", 7, 24)
    assert (folder / "predictions.csv").read_text() == predictions
    assert figures(trained_run) == found
    assert len(list(csv.DictReader(predictions.splitlines()))) == 48


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
                is_rank = "kfp_ddp.components.evaluate.rank" in each.cmdline()
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
        ("another network", "holds other weights than a cifar_resnet8 has"),
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
