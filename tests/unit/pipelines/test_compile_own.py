"""`kfp-ddp compile my_pipeline.py`: pipelines of a user's file, with configured images."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp import __version__
from kfp_ddp.core.errors import KfpDdpError
from tests.commands import call, output, refused
from tests.files import write

OWN = """
from kfp import dsl
from kfp_ddp.components.gate.component import gate
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.pipelines.train_resnet import train_resnet
from words import HELLO

@dsl.component(base_image="python:3.11")
def say(words: str) -> float:
    print(words)
    return 0.5

@dsl.pipeline(name="flowers")
def flowers(backend: str = "mine"):
    evaluate(checkpoint="/a", run_dir="/b", dataset_path="/c")
    gate(accuracy=say(words=HELLO).output)

@dsl.container_component
def date():
    return dsl.ContainerSpec(image="alpine", command=["date"])

@dsl.pipeline(name="birds")
def birds():
    gate(accuracy=1.0)
    date()
    dsl.importer(artifact_uri="gs://bucket/x", artifact_class=dsl.Dataset)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    write(tmp_path / "project" / "words.py", 'HELLO = "hello"\n')
    return write(tmp_path / "project" / "mine.py", OWN)


def images(path: Path) -> dict[str, str]:
    document = next(yaml.safe_load_all(path.read_text()))
    executors = document["deploymentSpec"]["executors"]
    return {name: executor["container"]["image"] for name, executor in executors.items()}


def test_pipelines_of_a_file_are_compiled_to_its_folder(own: Path) -> None:
    written = [str(own.parent / f"{name}.yaml") for name in ("flowers", "birds")]
    assert output("compile", own).split() == written
    document = next(yaml.safe_load_all((own.parent / "flowers.yaml").read_text()))
    assert document["pipelineInfo"]["name"] == "flowers"
    # A parameter of the same name as one of ours has no choices.
    assert "literals" not in document["root"]["inputDefinitions"]["parameters"]["backend"]


def test_images_of_a_registry(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = write(tmp_path / "settings.yaml", "registry: registry.example.com/ml\n")
    monkeypatch.setenv("KFP_DDP_CONFIG", str(settings))
    output("compile", own, "--directory", tmp_path)
    assert images(tmp_path / "flowers.yaml") == {
        "exec-say": "python:3.11",
        "exec-gate": f"registry.example.com/ml/launcher:{__version__}",
        "exec-evaluate": f"registry.example.com/ml/trainer:{__version__}",
    }
    monkeypatch.setenv("KFP_DDP_TRAINER_IMAGE", "registry.example.com/me/trainer:2")
    output("compile", own, "--directory", tmp_path, "--registry", "other.example.com")
    names = images(tmp_path / "flowers.yaml")
    assert names["exec-evaluate"] == "registry.example.com/me/trainer:2"
    assert names["exec-gate"] == f"other.example.com/launcher:{__version__}"


def test_check_lists_missing_and_stale_files(own: Path) -> None:
    output("compile", own)
    output("compile", own, "--check")
    (own.parent / "birds.yaml").unlink()
    own.write_text(OWN.replace('"mine"', '"yours"'))
    error = call("compile", own, "--check").exception
    assert isinstance(error, KfpDdpError)
    assert f"{own.parent / 'flowers.yaml'}: differs" in str(error)
    assert f"{own.parent / 'birds.yaml'}: missing" in str(error)
    assert not (own.parent / "birds.yaml").exists()


def test_own_steps_of_a_file_run_as_root_unless_restricted(own: Path) -> None:
    ours = {"runAsUser": "1000", "runAsNonRoot": True}
    output("compile", own)
    assert contexts_of(own) == {"exec-say": {}, "exec-gate": ours, "exec-evaluate": ours}
    output("compile", own, "--restricted")
    theirs = {"runAsNonRoot": True}
    assert contexts_of(own) == {"exec-say": theirs, "exec-gate": ours, "exec-evaluate": ours}


def contexts_of(own: Path) -> dict[str, dict[str, Any]]:
    spec, platform = yaml.safe_load_all((own.parent / "flowers.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    names = spec["deploymentSpec"]["executors"]
    return {name: executors.get(name, {}).get("securityContext", {}) for name in names}


AUTHORING = "from kfp_ddp.jobs.shipping.authoring import as_script\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "{} defines no pipeline: decorate a function with @dsl.pipeline"),
        ("x = (", "{}, line 1: SyntaxError: '(' was never closed"),
        ("x = 1\nraise ValueError('no\\nway')", "{}, line 2: ValueError: no way"),
        ("import sys\nsys.exit('done')", "{}, line 2: SystemExit: done"),
        (OWN.replace("gate(accuracy=1.0)", "gate()"), "{}, line 24: TypeError: gate() missing 1 "),
        (f"{AUTHORING}as_script('gone.py')", "{}, line 2: gone.py cannot be packed: [Errno 2] No"),
    ],
)
def test_invalid_file_fails_with_one_line_error(own: Path, text: str, message: str) -> None:
    own.write_text(text)
    assert refused("compile", own).startswith(message.format(own))
    assert list(own.parent.glob("*.yaml")) == []


GIVEN = """
from kfp import dsl
from kfp_ddp.components.{function}.component import {function}

@dsl.component(base_image="python:3.11")
def last():
    pass

@dsl.pipeline(name="mine")
def mine(mapping: dict = {{"{key}": 1}}):
    with dsl.ExitHandler(last()):
        {function}({needed}, {name}={value})
"""
TRAIN = 'run_id="a", task_name="b", task_id="c", dataset_path="/d"'
KEYS = {
    ("train", "training", "epoch"): "did you mean 'epochs'?",
    ("train", "training", "learning_rate"): "",
    ("train", "job", "node"): "did you mean 'nodes'?",
    ("train", "job", "keep_runs"): "",
    ("train", "job", "evaluate_gpus"): "job of train in mine has no setting 'evaluate_gpus'",
    ("gate", "rules", "min_acuracy"): "did you mean 'min_accuracy'?",
    ("gate", "rules", "min_accuracy"): "",
    ("evaluate", "options", "tag"): "did you mean 'tags'?",
    ("evaluate", "job", "evaluate_gpu"): "did you mean 'evaluate_gpus'?",
    ("data_sync", "options", "workerz"): "options of data-sync in mine has no setting",
}
"""What a compilation says of a key in a mapping that a component gets."""
NEEDED = {
    "train": TRAIN,
    "gate": "accuracy=1.0",
    "evaluate": 'checkpoint="/a", run_dir="/b", dataset_path="/c"',
    "data_sync": 'source="gs://a", dataset="b", run_id="c"',
}


@pytest.mark.parametrize(("function", "name", "key"), KEYS)
@pytest.mark.parametrize("value", ["constant", "default of the form"])
def test_unknown_key_of_a_mapping_is_found(
    own: Path, function: str, name: str, key: str, value: str
) -> None:
    given = f'{{"{key}": 1}}' if value == "constant" else "mapping"
    words = {"needed": NEEDED[function], "name": name, "value": given, "key": key}
    own.write_text(GIVEN.format(function=function, **words))
    message = KEYS[function, name, key]
    if message:
        assert message in refused("compile", own)
    else:
        output("compile", own)


def test_missing_file_and_invalid_image_are_errors(own: Path, tmp_path: Path) -> None:
    assert call("compile", tmp_path / "gone.py").exit_code == 2
    notes = write(tmp_path / "notes.txt", "notes")
    message = f"{notes} is not a Python file: give one that ends in .py"
    assert refused("compile", notes) == message
    image = "https://registry.example.com/trainer:1"
    assert "is not an image" in refused("compile", own, "--trainer-image", image)
