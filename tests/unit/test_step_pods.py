"""The pods of a compiled run: what they ask for, and which of them must not be taken away."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.checks.form import (
    EVALUATE_ASKS,
    LAUNCHER_ASKS,
    SYNC_ASKS,
    StepResources,
)
from kfp_ddp.pipelines.compiled import write

COMPILED = Path(__file__).parents[2] / "compiled" / "train_resnet.yaml"
DOCUMENT, PLATFORM = yaml.safe_load_all(COMPILED.read_text())
EXECUTORS: dict[str, Any] = DOCUMENT["deploymentSpec"]["executors"]
PLATFORMS: dict[str, Any] = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
LAUNCHING = {"exec-data-sync", "exec-train"}
ASKS = {"exec-train": LAUNCHER_ASKS, "exec-data-sync": SYNC_ASKS}
ASKS |= dict.fromkeys(("exec-evaluate", "exec-export"), EVALUATE_ASKS)
PARTS = ("resourceCpuRequest", "resourceCpuLimit", "resourceMemoryRequest", "resourceMemoryLimit")

every = pytest.mark.parametrize("name", sorted(EXECUTORS))


@every
def test_every_step_says_what_it_takes(name: str) -> None:
    """A namespace with a ResourceQuota takes no pod that leaves one of them out."""
    given = EXECUTORS[name]["container"]["resources"]
    assert all(given.get(part) for part in PARTS), given
    asks = ASKS.get(name, {"cpu": "100m", "memory": "256Mi"})
    assert (given["resourceCpuRequest"], given["resourceMemoryRequest"]) == (*asks.values(),)


def test_what_a_step_takes_beside_constants_is_an_output_of_preflight() -> None:
    """And one that reaches the step, through every group around it: KFP's driver looks there."""
    for name in ASKS:
        component = name.replace("exec-", "comp-")
        (task,) = [
            task
            for group in [DOCUMENT["root"], *DOCUMENT["components"].values()]
            for task in group.get("dag", {}).get("tasks", {}).values()
            if task["componentRef"]["name"] == component
        ]
        for part in PARTS[1::2]:
            found = EXECUTORS[name]["container"]["resources"][part]
            channel = found.partition("'")[2].partition("'")[0]
            assert channel.startswith("pipelinechannel--preflight-"), found
            assert channel in task["inputs"]["parameters"]


def test_gpus_are_for_the_steps_that_compute() -> None:
    with_gpus = {n for n, e in EXECUTORS.items() if "accelerator" in e["container"]["resources"]}
    assert with_gpus == {"exec-evaluate", "exec-export"}


def test_what_is_set_on_the_launcher_is_not_its_workers() -> None:
    """KFP takes resources that it passes through away from the pod, which would have none then."""
    passed = DOCUMENT["components"]["comp-train"]["taskConfigPassthroughs"]
    assert "RESOURCES" not in {each["field"] for each in passed}
    assert len(passed) == 5


def test_compiled_for_restricted_every_step_says_that_it_is_not_root(tmp_path: Path) -> None:
    """And only then: an image of one's own may be root's where nothing forbids that."""
    for restricted in (True, False):
        path, *_ = write(tmp_path, restricted=restricted, names=["train_resnet"])
        _, platform = yaml.safe_load_all(path.read_text())
        executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        said = [executors.get(name, {}).get("securityContext") for name in EXECUTORS]
        assert said == [{"runAsNonRoot": True} if restricted else None] * len(EXECUTORS)


@every
def test_long_steps_ask_not_to_be_evicted(name: str) -> None:
    metadata = PLATFORMS.get(name, {}).get("podMetadata", {})
    if name not in LAUNCHING:
        assert metadata == {}
        return
    assert metadata["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    budget = yaml.safe_load(
        (COMPILED.parents[1] / "deploy/eviction/poddisruptionbudget.yaml").read_text()
    )
    assert metadata["labels"] == budget["spec"]["selector"]["matchLabels"]


def test_what_steps_take_is_a_quantity_that_is_not_empty() -> None:
    """KFP's driver fails a run for an empty one."""
    for name, field in StepResources.model_fields.items():
        assert field.default != "", name
