"""`kfp-ddp compile my_pipeline.py`: pipelines of somebody's own, with images that are set once."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from kfp_ddp import __version__
from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError, KfpDdpError

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

@dsl.pipeline(name="birds")
def birds():
    gate(accuracy=1.0)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "words.py").write_text('HELLO = "hello"\n')
    (folder / "mine.py").write_text(OWN)
    return folder / "mine.py"


def compiled(*words: object) -> Result:
    return CliRunner().invoke(app, ["compile", *map(str, words)])


def images(path: Path) -> dict[str, str]:
    document = next(yaml.safe_load_all(path.read_text()))
    executors = document["deploymentSpec"]["executors"]
    return {name: each["container"]["image"] for name, each in executors.items()}


def test_each_pipeline_of_the_file_is_compiled_beside_it_and_what_it_imports_is_not(
    own: Path,
) -> None:
    done = compiled(own)
    assert done.output.split() == [
        str(own.parent / f"{name}.yaml") for name in ("flowers", "birds")
    ]
    document = next(yaml.safe_load_all((own.parent / "flowers.yaml").read_text()))
    assert document["pipelineInfo"]["name"] == "flowers"
    # A box of the same name as one of ours is its author's.
    assert "literals" not in document["root"]["inputDefinitions"]["parameters"]["backend"]


def test_our_images_are_from_the_registry_that_is_set_once_and_others_stay(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kfp-ddp.yaml").write_text("registry: registry.example.com/ml\n")
    assert compiled(own, "--directory", tmp_path).exit_code == 0
    assert images(tmp_path / "flowers.yaml") == {
        "exec-say": "python:3.11",
        "exec-gate": f"registry.example.com/ml/launcher:{__version__}",
        "exec-evaluate": f"registry.example.com/ml/trainer:{__version__}",
    }
    monkeypatch.setenv("KFP_DDP_TRAINER_IMAGE", "registry.example.com/me/trainer:2")
    compiled(own, "--directory", tmp_path, "--registry", "other.example.com")
    found = images(tmp_path / "flowers.yaml")
    assert found["exec-evaluate"] == "registry.example.com/me/trainer:2"
    assert found["exec-gate"] == f"other.example.com/launcher:{__version__}"


def test_check_tells_what_is_missing_and_what_is_stale(own: Path) -> None:
    compiled(own)
    assert compiled(own, "--check").exit_code == 0
    (own.parent / "birds.yaml").unlink()
    own.write_text(OWN.replace('"mine"', '"yours"'))
    found = compiled(own, "--check").exception
    assert isinstance(found, KfpDdpError)
    assert f"{own.parent / 'flowers.yaml'}: differs from {own}" in str(found)
    assert f"{own.parent / 'birds.yaml'}: missing" in str(found)
    assert not (own.parent / "birds.yaml").exists()


def test_restricted_holds_for_steps_of_ones_own_too(own: Path) -> None:
    compiled(own, "--restricted")
    _, platform = yaml.safe_load_all((own.parent / "flowers.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    contexts = {name: each["securityContext"] for name, each in executors.items()}
    assert set(contexts) == {"exec-say", "exec-gate", "exec-evaluate"}
    assert all(each == {"runAsNonRoot": True} for each in contexts.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "{} defines no pipeline: decorate a function with @dsl.pipeline"),
        ("x = (", "{}, line 1: SyntaxError: '(' was never closed"),
        ("x = 1\nraise ValueError('no\\nway')", "{}, line 2: ValueError: no way"),
        ("import sys\nsys.exit('done')", "{}, line 2: SystemExit: done"),
        (
            OWN.replace("gate(accuracy=1.0)", "gate()"),
            "{}, line 20: TypeError: gate() missing 1 required argument: accuracy.",
        ),
        (
            "from kfp_ddp.jobs.authoring import as_script\nas_script('gone.py')",
            "{}, line 2: gone.py cannot be packed: [Errno 2] No such file or directory",
        ),
    ],
)
def test_a_file_that_cannot_be_compiled_is_told_in_one_line(
    own: Path, text: str, said: str
) -> None:
    own.write_text(text)
    error = compiled(own).exception
    assert isinstance(error, InputError)
    assert str(error).startswith(said.format(own))
    assert "\n" not in str(error)
    assert list(own.parent.glob("*.yaml")) == []


def test_a_file_that_is_not_there_or_no_python_is_told(own: Path, tmp_path: Path) -> None:
    assert compiled(tmp_path / "gone.py").exit_code == 2
    (tmp_path / "notes.txt").write_text("notes")
    error = compiled(tmp_path / "notes.txt").exception
    assert str(error) == f"{tmp_path / 'notes.txt'} is not a Python file: give one that ends in .py"


def test_an_image_that_none_could_be_named_is_refused(own: Path) -> None:
    error = compiled(own, "--trainer-image", "https://registry.example.com/trainer:1").exception
    assert isinstance(error, InputError)
    assert "trainer image 'https://registry.example.com/trainer:1' is not an image" in str(error)
