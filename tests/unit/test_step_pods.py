"""The pods of compiled steps: resources, eviction, credentials."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.checks.form import EVALUATE_ASKS, LAUNCHER_ASKS, SYNC_ASKS, StepResources
from kfp_ddp.pipelines.compiled import built_in, write

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
def test_steps_have_requests_and_limits(name: str) -> None:
    """A namespace with a ResourceQuota rejects a pod that lacks one of them."""
    resources = EXECUTORS[name]["container"]["resources"]
    assert all(resources.get(part) for part in PARTS), resources
    asks = ASKS.get(name, {"cpu": "100m", "memory": "256Mi"})
    requests = (resources["resourceCpuRequest"], resources["resourceMemoryRequest"])
    assert requests == (*asks.values(),)
    assert ("accelerator" in resources) == (name in ("exec-evaluate", "exec-export"))


def test_limits_are_outputs_of_preflight_that_reach_the_step() -> None:
    """KFP's driver looks for them in the inputs of each group around the step."""
    for name in ASKS:
        component = name.replace("exec-", "comp-")
        (task,) = [
            task
            for group in [DOCUMENT["root"], *DOCUMENT["components"].values()]
            for task in group.get("dag", {}).get("tasks", {}).values()
            if task["componentRef"]["name"] == component
        ]
        for part in PARTS[1::2]:
            limit = EXECUTORS[name]["container"]["resources"][part]
            channel = limit.partition("'")[2].partition("'")[0]
            assert channel.startswith("pipelinechannel--preflight-"), limit
            assert channel in task["inputs"]["parameters"]


def test_resources_of_the_launcher_are_not_passed_to_workers() -> None:
    """KFP removes resources that it passes through from the pod itself."""
    passed = DOCUMENT["components"]["comp-train"]["taskConfigPassthroughs"]
    assert "RESOURCES" not in {item["field"] for item in passed}
    assert len(passed) == 5


def test_no_step_runs_as_root_if_compiled_as_restricted(tmp_path: Path) -> None:
    pipelines = built_in(["train_resnet"])
    for restricted in (True, False):
        (path,) = write(pipelines, tmp_path, restricted=restricted)
        _, platform = yaml.safe_load_all(path.read_text())
        executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        contexts = [executors.get(name, {}).get("securityContext") for name in EXECUTORS]
        assert contexts == [{"runAsNonRoot": True} if restricted else None] * len(EXECUTORS)


@every
def test_long_steps_are_not_evicted(name: str) -> None:
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


def test_default_resources_are_not_empty() -> None:
    """KFP's driver fails a run for an empty quantity."""
    assert "" not in {field.default for field in StepResources.model_fields.values()}
