import shutil
from pathlib import Path

import pytest
import yaml

from kfp_ddp import __version__
from kfp_ddp.pipelines import NAMES, compiled
from kfp_ddp.pipelines.compiled import Images
from kfp_ddp.training.recipes import RECIPES

REPOSITORY = Path(__file__).parents[2]
ONE = NAMES[:1]
"""What tests of the compiler itself compile: each pipeline takes seconds."""


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPOSITORY / "compiled", tmp_path / "compiled"))


def test_a_committed_document_is_fresh(committed: Path) -> None:
    """As `make check` holds all of them to be."""
    assert compiled.differences(committed, ONE) == []


def test_two_compiles_are_the_same_bytes(tmp_path: Path) -> None:
    first, second = (compiled.write(tmp_path / side, names=ONE) for side in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_another_sdk_version_is_no_difference(committed: Path) -> None:
    path = committed / f"{NAMES[0]}.yaml"
    path.write_text(path.read_text().replace("sdkVersion: kfp-", "sdkVersion: kfp-9."))
    assert compiled.differences(committed, ONE) == []


def test_a_changed_default_is_found(committed: Path) -> None:
    path = committed / f"{NAMES[0]}.yaml"
    path.write_text(path.read_text().replace("defaultValue: -1.0", "defaultValue: 1.0"))
    assert compiled.differences(committed, ONE) == [f"{path}: differs from pipelines/{NAMES[0]}.py"]


def test_missing_broken_and_orphaned_documents_are_found(committed: Path) -> None:
    path = committed / f"{NAMES[0]}.yaml"
    path.write_text("a: [")
    assert compiled.differences(committed, ONE) == [f"{path}: differs from pipelines/{NAMES[0]}.py"]
    path.rename(committed / "old.yaml")
    assert compiled.differences(committed, ONE) == [
        f"{path}: missing",
        f"{committed / 'old.yaml'}: has no pipeline",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_two_artifacts_have_one_name(name: str) -> None:
    document = next(yaml.safe_load_all((REPOSITORY / "compiled" / f"{name}.yaml").read_text()))
    steps = [each for each in document["components"].values() if "executorLabel" in each]
    outputs = [each.get("outputDefinitions", {}).get("artifacts", {}) for each in steps]
    names = [artifact for each in outputs for artifact in each]
    assert len(names) == len(set(names)) > 1


def test_another_registry_is_that_of_every_image(tmp_path: Path) -> None:
    path, *_ = compiled.write(tmp_path, Images("registry.example.com/team/"), names=ONE)
    assert "ghcr.io" not in path.read_text()
    document = next(yaml.safe_load_all(path.read_text()))
    executors = document["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"] for executor in executors} == {
        f"registry.example.com/team/launcher:{__version__}",
        f"registry.example.com/team/trainer:{__version__}",
    }
    workers = document["components"]["comp-preflight"]["inputDefinitions"]["parameters"]["image"]
    assert workers["defaultValue"] == f"registry.example.com/team/trainer:{__version__}"


@pytest.mark.parametrize(
    ("name", "claims"), [("train_resnet_bucket", ["/data"]), ("train_resnet_claimless", [])]
)
def test_with_runs_in_a_bucket_the_form_asks_for_it_and_no_step_mounts_a_claim_for_them(
    committed: Path, name: str, claims: list[str]
) -> None:
    document, platform = yaml.safe_load_all((committed / f"{name}.yaml").read_text())
    form = document["root"]["inputDefinitions"]["parameters"]
    assert {name for name, box in form.items() if not box.get("isOptional")} == {"source", "work"}
    assert len(form) <= 18
    assert "work_claim" not in form
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    mounted = {m["mountPath"] for each in executors.values() for m in each.get("pvcMount", [])}
    assert sorted(mounted) == claims
    for step in ("evaluate", "export", "train"):
        (scratch,) = executors[f"exec-{step}"]["emptyDirMounts"]
        assert scratch["mountPath"] == "/scratch"
    # The workers get what is set on the step that launches them.
    assert executors["exec-train"]["secretAsVolume"] == executors["exec-evaluate"]["secretAsVolume"]


def test_the_form_is_short_and_its_closed_choices_are_menus(committed: Path) -> None:
    document = next(yaml.safe_load_all((committed / "train_resnet.yaml").read_text()))
    form = document["root"]["inputDefinitions"]["parameters"]
    assert len(form) <= 18
    assert {name for name, box in form.items() if not box.get("isOptional")} == {"source"}
    assert all(box["description"] for box in form.values())
    menus = {name: box["literals"] for name, box in form.items() if "literals" in box}
    assert menus == {
        "backend": ["pytorchjob", "trainjob", "local"],
        "recipe": [*RECIPES],
    }
    assert all(form[name]["defaultValue"] in choices for name, choices in menus.items())
