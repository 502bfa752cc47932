"""The compiled pipelines: fresh, with short forms, the images of a registry, and their pods."""

import importlib
import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp.components import load_component_from_file

from kfp_ddp.core.container_images import PUBLIC
from kfp_ddp.core.step import SECRET
from kfp_ddp.jobs.identity import STEP
from kfp_ddp.jobs.shipping.own_package import API
from kfp_ddp.k8s import api
from kfp_ddp.pipelines import NAMES, compiled
from kfp_ddp.pipelines.document import read
from kfp_ddp.plan.form import EVALUATE_REQUESTS, LAUNCHER_REQUESTS, SYNC_REQUESTS
from kfp_ddp.training.spec.recipes import RECIPES

REPOSITORY = Path(__file__).parents[3]
NAME = NAMES[0]


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    """One pipeline: compiling all of them takes long."""
    return compiled.built_in([NAME])


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPOSITORY / "compiled", tmp_path / "compiled"))


def test_stale_missing_and_orphaned_are_listed(pipelines: dict[str, Any], committed: Path) -> None:
    path = committed / f"{NAME}.yaml"
    text = path.read_text()
    path.write_text(text.replace("sdkVersion: kfp-", "sdkVersion: kfp-9."))
    assert compiled.differences(pipelines, committed) == [], "another SDK is not a difference"
    for stale in (text.replace("defaultValue: -1.0", "defaultValue: 1.0"), "a: ["):
        path.write_text(stale)
        (line,) = compiled.differences(pipelines, committed)
        assert line.startswith(f"{path}: differs")
    assert compiled.orphans(committed) == []
    path.rename(committed / "old.yaml")
    assert compiled.differences(pipelines, committed) == [f"{path}: missing"]
    assert compiled.orphans(committed) == [f"{committed / 'old.yaml'}: has no pipeline"]


COMPONENTS = sorted(path.parent.name for path in REPOSITORY.glob("components/*/component.py"))


@pytest.mark.parametrize("name", COMPONENTS)
def test_component_of_a_file_has_images_that_exist(name: str) -> None:
    """And the inputs and outputs of the function; it reads the source itself."""
    path = REPOSITORY / "components" / name / "component.yaml"
    module = importlib.import_module(f"kfp_ddp.components.{name}.component")
    ours = getattr(module, name).component_spec
    theirs = load_component_from_file(str(path)).component_spec
    assert theirs.inputs.keys() == ours.inputs.keys()
    assert (theirs.outputs or {}).keys() == (ours.outputs or {}).keys()
    optional = [name for name, one in ours.inputs.items() if one.optional]
    assert [name for name in ours.inputs if theirs.inputs[name].optional] == optional
    assert set(read(path).images()) <= {*PUBLIC.values()}
    container = theirs.implementation.container
    lock = "trainer" if "/trainer:" in ours.implementation.container.image else "launcher"
    assert container.image == PUBLIC[lock]
    assert container.command[5:] == [lock, *compiled.PROGRAM]
    assert container.args[-1] == name
    assert API in container.command[2]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_artifacts_are_unique(name: str) -> None:
    document = documents(name)[0]
    steps = [step for step in document["components"].values() if "executorLabel" in step]
    outputs = [step.get("outputDefinitions", {}).get("artifacts", {}) for step in steps]
    names = [name for artifacts in outputs for name in artifacts]
    assert len(names) == len(set(names)) > 1


@pytest.mark.parametrize(
    ("name", "claims"), [("train_resnet_bucket", ["/data"]), ("train_resnet_claimless", [])]
)
def test_runs_in_a_bucket_mount_no_pvc(name: str, claims: list[str]) -> None:
    assert "work_claim" not in form_of(name)
    executors = documents(name)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    mounted = {m["mountPath"] for one in executors.values() for m in one.get("pvcMount", [])}
    assert sorted(mounted) == claims
    for step in ("evaluate", "export", "train"):
        (scratch,) = executors[f"exec-{step}"]["emptyDirMounts"]
        assert scratch["mountPath"] == "/scratch"
    # The workers get what is set on the step that launches them.
    buckets = [executors[f"exec-{step}"]["secretAsVolume"][0] for step in ("train", "evaluate")]
    assert buckets[0] == buckets[1]


@cache
def documents(name: str) -> list[dict[str, Any]]:
    """Return KFP's specification of a compiled pipeline and its platform document."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all((REPOSITORY / "compiled" / f"{name}.yaml").read_text(), loader))


def form_of(name: str) -> dict[str, Any]:
    return dict(documents(name)[0]["root"]["inputDefinitions"]["parameters"])


@pytest.mark.parametrize("name", NAMES)
def test_forms_are_short_and_described(name: str) -> None:
    form = form_of(name)
    assert len(form) <= 18
    assert all(parameter.get("description") for parameter in form.values())
    more = {"retrain": "destination", "evaluate_checkpoint": "checkpoint"}
    more |= {"train_resnet_bucket": "work", "train_resnet_claimless": "work"}
    more |= {"own_script": "script", "batch_predict": "bundle table"}
    required = {key for key, parameter in form.items() if not parameter.get("isOptional")}
    assert required == {"source", *more.get(name, "").split()}
    if name == "retrain":
        ours = form_of("train_resnet")
        shared = form.keys() & ours.keys() - {"gate", "destination"}
        assert {key: form[key] for key in shared} == {key: ours[key] for key in shared}


def test_closed_choices_are_menus_of_the_form() -> None:
    form = form_of("train_resnet")
    menus = {name: field["literals"] for name, field in form.items() if "literals" in field}
    assert menus == {"backend": ["pytorchjob", "trainjob", "local"], "recipe": [*RECIPES]}
    assert all(form[name]["defaultValue"] in choices for name, choices in menus.items())


@pytest.mark.parametrize("name", NAMES)
def test_steps_that_may_use_a_bucket_mount_its_secret(name: str) -> None:
    executors = documents(name)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    names = documents(name)[0]["deploymentSpec"]["executors"].keys()
    for executor in names - {"exec-dataset-volume"}:
        secrets = executors[executor]["secretAsVolume"]
        assert secrets[0]["mountPath"] == SECRET, executor
        assert {one["mountPath"] for one in secrets} <= {SECRET, api.LAUNCHER_DIR}
        assert all(one["optional"] for one in secrets)


ALWAYS = {"preflight", "dataset-volume", "deploy", "teardown"}
"""Steps that create or delete, and run no network of a user's own."""
BY_BACKEND = {"train": "train", "tune": "train", "evaluate": "evaluate"}
"""Steps that do so unless they compute themselves, by the prefix of preflight's output."""


@pytest.mark.parametrize("name", NAMES)
def test_only_steps_that_launch_mount_the_launchers_token(name: str) -> None:
    executors = documents(name)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    tokens = {
        executor.removeprefix("exec-"): secret["secretNameParameter"]
        for executor, settings in executors.items()
        for secret in settings["secretAsVolume"]
        if secret["mountPath"] == api.LAUNCHER_DIR
    }
    steps = {executor.removeprefix("exec-") for executor in executors}
    assert tokens.keys() == steps & (ALWAYS | BY_BACKEND.keys())
    for step, secret in tokens.items():
        if step in ALWAYS:
            assert secret == {"runtimeValue": {"constant": api.LAUNCHER}}
        else:
            channel = f"pipelinechannel--preflight-{BY_BACKEND[step]}_token"
            assert secret == {"componentInputParameter": channel}


@pytest.mark.parametrize("name", NAMES)
def test_workflow_is_small_enough_for_task_details(name: str) -> None:
    """KFP's API stops updating the tasks of a run whose Workflow's nodes come near 1 MB.

    KFP 2.17 and its Argo keep two nodes for the driver of a task with the documents of the task,
    two for the task, two for the pod of a step. The last four have the patch of the pod as input,
    the first two as output. The bytes of a node are those of all else in it. A recorded run of
    train_resnet came to 977 kB, for which this sum is 966 kB.
    """
    spec, platform = documents(name)
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    total = 2 * in_json(spec["root"]) + 4 * NODE
    for content in (spec["root"], *spec["components"].values()):
        for task in content.get("dag", {}).get("tasks", {}).values():
            component = spec["components"][task["componentRef"]["name"]]
            size = 2 * (in_json(task) + in_json(component)) + 4 * NODE
            if label := component.get("executorLabel"):
                container = spec["deploymentSpec"]["executors"][label]["container"]
                mounts = executors.get(label, {})
                names = task.get("inputs", {}).get("parameters", {})
                given = executor_input(component, names, mounts)
                texts = [*map(compact, (given, component)), *container["command"]]
                size += 2 * (in_json(container) + in_json(mounts) + NODE)
                size += 6 * (in_json([texts, mounts]) + LAUNCHER)
            assert "parameterIterator" not in task  # its size would depend on the iterations
            total += size
    # 280 bytes of each command, which is there eight times, check the source and the image.
    assert total < {"retrain": 640_000}.get(name, 570_000)


NODE = 900
LAUNCHER = 1000
"""Bytes of a node, and of the other arguments that KFP's driver gives to its launcher."""
SETTINGS = {
    "training": max(RECIPES.values(), key=len),
    "job": {"image": "x" * 40, "nodes": 4, "gpus_per_node": 8, "cpu": "64", "memory": "256Gi"},
}


def executor_input(
    component: dict[str, Any], names: Iterable[str], mounts: dict[str, Any]
) -> dict[str, Any]:
    """Return a step's input as KFP's driver writes it, with the settings of the longest recipe."""
    inputs = component.get("inputDefinitions", {}).get("parameters", {})
    outputs = component.get("outputDefinitions", {})
    uri = f"minio://mlpipeline/v2/artifacts/train-resnet/{'-' * 36}/train/{'-' * 36}/"
    filled = (name for name in inputs if inputs[name]["parameterType"] == "TASK_CONFIG")
    values = dict.fromkeys(filled, mounts) | {name: SETTINGS.get(name, "x" * 24) for name in names}
    artifacts = {**outputs.get("artifacts", {}), "executor-logs": {"artifactType": {}}}
    written = {
        "parameters": {
            name: {"outputFile": f"/tmp/kfp/outputs/{name}"}
            for name in outputs.get("parameters", {})
        },
        "artifacts": {
            name: {"artifacts": [{"name": name, "uri": uri + name, **artifact}]}
            for name, artifact in artifacts.items()
        },
        "outputFile": f"{uri}output_metadata.json",
    }
    return {"inputs": {"parameterValues": values}, "outputs": written}


def compact(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))


def in_json(document: Any) -> int:
    """Return the characters of a document that is a text in a JSON document."""
    return len(json.dumps(compact(document)))


def test_retrain_looks_for_changes_before_it_publishes_or_trains() -> None:
    components = documents("retrain")[0]["components"]
    group = components["comp-exit-handler-1"]["dag"]["tasks"]
    (inner,) = (name for name in group if name.startswith("condition"))
    assert group.keys() - {inner} == {"data-sync", "changes"}
    changed = components[group[inner]["componentRef"]["name"]]["dag"]["tasks"]
    assert {"dataset-volume", "train", "evaluate", "gate"} <= changed.keys()
    assert {"attempt", "champion"} <= changed["gate"]["inputs"]["parameters"].keys()


DOCUMENT, PLATFORM = documents("train_resnet")
EXECUTORS: dict[str, Any] = DOCUMENT["deploymentSpec"]["executors"]
PLATFORMS: dict[str, Any] = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
LAUNCHING = {"exec-data-sync", "exec-train"}
ASKS = {"exec-train": LAUNCHER_REQUESTS, "exec-data-sync": SYNC_REQUESTS}
ASKS |= dict.fromkeys(("exec-evaluate", "exec-export"), EVALUATE_REQUESTS)
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
        assert not {"cpu_limit", "memory_limit"} & task["inputs"]["parameters"].keys()


@pytest.mark.parametrize("name", ["comp-train", "comp-evaluate"])
def test_resources_of_the_launcher_are_not_passed_to_workers(name: str) -> None:
    """KFP removes resources that it passes through from the pod itself."""
    component = DOCUMENT["components"][name]
    passed = {item["field"]: item["applyToTask"] for item in component["taskConfigPassthroughs"]}
    assert passed == {"ENV": True, "KUBERNETES_VOLUMES": True}
    assert "image" not in component["inputDefinitions"]["parameters"], "the plan's job has it"


@every
def test_long_steps_are_not_evicted(name: str) -> None:
    metadata = PLATFORMS[name]["podMetadata"]
    own = {STEP: name.removeprefix("exec-")}
    if name not in LAUNCHING:
        assert metadata == {"labels": own}
        return
    assert metadata["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    budget = yaml.safe_load((REPOSITORY / "deploy/eviction/poddisruptionbudget.yaml").read_text())
    assert metadata["labels"] == own | budget["spec"]["selector"]["matchLabels"]
