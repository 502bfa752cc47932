"""The evaluate step with a job of two pods: its results."""

# ruff: noqa: F811 (a fixture that is imported)

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import step_pod, workflow
from tests.e2e.harness.grounds import Folder, Grounds, claim
from tests.e2e.harness.launch_step import TRAINER, Step
from tests.e2e.harness.namespace import namespace
from tests.e2e.test_launch_train_step import JOB, work  # noqa: F401

MODEL = "/work/model/checkpoints/step-00000001"

# Images, an untrained network, and its evaluation by one process.
FILL = """
from pathlib import Path
import torch
from PIL import Image
from kfp_ddp.evaluation.ranks import evaluate_share
from kfp_ddp.evaluation.request import EvaluationRequest
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.model.networks import build

draw = torch.Generator().manual_seed(1)
for folder in ("train", "val"):
    for number in range(21):
        name = Path("/data", folder, ("dark", "light")[number % 2], f"{number:02}.png")
        name.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (8, 8, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(name)
torch.manual_seed(1)
config = TrainConfig.create(
    data="/data", output_dir="/work/model", model="cifar_resnet8", image_size=8
)
state = {"model": build("cifar_resnet8", 2).state_dict(), "ema": None}
manifest = checkpoint.manifest_of(config, ("dark", "light"))
path = checkpoint.write(Path("/work/model/checkpoints"), 1, state, manifest)
folders = {"checkpoint": str(path), "run_dir": "/work/single", "data": "/data"}
evaluate_share(EvaluationRequest.create(**folders, batch_size=4, worst=3))
"""

EVALUATE = """
import json, sys
from types import SimpleNamespace
from kfp_ddp.components.evaluate.component import evaluate

def artifact(name):
    result = SimpleNamespace(path=f"/tmp/{name}", metadata={})
    result.log_metric = lambda key, value: result.metadata.__setitem__(key, value)
    result.log_confusion_matrix = lambda names, counts: result.metadata.update(counts=counts)
    result.log_roc_curve = lambda *curve: result.metadata.update(roc=len(curve))
    return result

names = ("evaluation_metrics", "confusion_matrix", "evaluation_report", "evaluation_summary")
filled = {name: artifact(name) for name in names}
done = evaluate.python_func(**filled, task_config=None, **json.loads(sys.argv[1]))
print("OUTPUTS", json.dumps([*done, filled["evaluation_metrics"].metadata]))
"""


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    workflow.define(cluster)
    with namespace(cluster) as space:
        claim(space, "data")
        claim(space, "work")
        command = ["python3", "-c", FILL]
        step_pod.run(space, "fill", command, TRAINER, data="data", work="work")
        yield space


class EvaluateStep(Step):
    """The component in its pod, with both PVCs mounted as by mount_pvc."""

    def __init__(self, grounds: Grounds, backend: str) -> None:
        super().__init__(grounds, "train", image=TRAINER, claims={"/work": "work", "/data": "data"})
        settings = {
            "checkpoint": MODEL,
            "run_dir": f"/work/{self.run_id}/train",
            "dataset_path": "/data",
            "run_id": self.run_id,
            "task_name": "evaluate",
            "batch_size": 4,
            "backend": backend,
            "job": {**JOB, "nodes": 2, "grace_seconds": 5, "retries": 0},
        }
        self.program(EVALUATE, settings)


def results(work: Folder, run: str) -> tuple[str, dict[str, Any]]:
    """Return predictions and record, without fields that differ between evaluations."""
    predictions = work.read(f"{run}/evaluation/predictions.csv")
    record = work.read(f"{run}/evaluation/evaluation.json")
    assert predictions is not None
    assert record is not None
    excluded = ("seconds", "world_size", "hardware", "written")
    fields = {name: value for name, value in json.loads(record).items() if name not in excluded}
    return bytes(predictions).decode(), fields


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
def test_pods_have_the_results_of_one(grounds: Grounds, work: Folder, backend: str) -> None:
    step = EvaluateStep(grounds, backend)
    step.start()
    assert step.wait() == "Succeeded", step.log()
    for rank in (0, 1):
        assert f"rank {rank} of 2 on" in step.log()
    assert results(work, f"{step.run_id}/train") == results(work, "single")
    accuracy, path, metrics = json.loads(step.log().split("OUTPUTS ")[1].splitlines()[0])
    assert path == f"/work/{step.run_id}/train/evaluation/evaluation.json"
    assert metrics["samples"] == 21
    assert metrics["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    for pod in step.workers():
        mounts = {m.mount_path: m.read_only for m in pod.spec.containers[0].volume_mounts}
        assert mounts["/data"] is True
