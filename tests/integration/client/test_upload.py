import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp import __version__
from kfp_ddp.core.container_images import REGISTRY, Images
from kfp_ddp.pipelines.document import read
from tests.commands import call, document, output, refused
from tests.files import write
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer
from tests.schedules import OWN

COMPILED = Path("kfp_ddp/compiled/train_resnet.yaml")


@pytest.fixture(autouse=True)
def _host(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_HOST", kfp_server.url)
    monkeypatch.setenv("KFP_DDP_TIMEOUT", "2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small compiled pipeline."""
    own = OWN | {"pipelineInfo": {"name": "mine"}}
    return write(tmp_path / "mine.yaml", yaml.safe_dump(own))


def test_the_same_content_is_uploaded_once(kfp_server: KfpServer, file: Path) -> None:
    first = document("upload", file)
    assert first["new"]
    assert first["version"].startswith("mine-")
    file.write_text("# a comment is no content\n" + file.read_text())
    again = document("upload", file)
    assert again == first | {"new": False}
    assert output("upload", file) == (f"unchanged: mine already has version {first['version']}\n")
    assert len(kfp_server.requests_for("upload_pipeline_version")) == 1


@pytest.mark.parametrize(
    "part",
    [
        {"training": {"parameterType": "STRUCT", "defaultValue": {"token": "hunter2"}}},
        {"address": {"parameterType": "STRING", "defaultValue": "https://h/x?sig=hunter2"}},
    ],
)
def test_a_secret_is_not_uploaded(part: dict[str, Any], kfp_server: KfpServer, file: Path) -> None:
    spec = yaml.safe_load(file.read_text())
    spec["root"]["inputDefinitions"]["parameters"] |= part
    file.write_text(yaml.safe_dump(spec))
    assert "hunter2" not in refused("upload", file)
    assert not kfp_server.requests


def test_changed_content_is_a_new_version(kfp_server: KfpServer, file: Path) -> None:
    before = file.read_text()
    output("upload", file)
    spec = yaml.safe_load(before)
    spec["pipelineInfo"]["description"] = "another"
    file.write_text(yaml.safe_dump(spec))
    shown = output("upload", file, "--description", "faster")
    first, second = kfp_server.store.versions.values()
    assert shown == f"uploaded mine, version {second['name']}\n"
    assert (first.get("description"), second["description"]) == (None, "faster")
    file.write_text(before)
    assert document("upload", file)["new"]
    *_, third = kfp_server.store.versions.values()
    assert third["name"] == f"{first['name']}-2"
    assert not document("upload", file)["new"]


def test_a_built_in_pipeline_is_uploaded_with_the_configured_images(
    kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output("upload", COMPILED)
    public = next(iter(kfp_server.store.versions.values()))["pipeline_spec"]
    assert public == read(COMPILED).body()
    monkeypatch.setenv("KFP_DDP_REGISTRY", "registry.example.com/ml")
    output("upload", "train_resnet", "--name", "nightly")
    assert [one["name"] for one in kfp_server.store.pipelines.values()][1:] == ["nightly"]
    sent = json.dumps(list(kfp_server.store.versions.values())[1]["pipeline_spec"])
    assert "registry.example.com/ml/launcher" in sent
    text = Images.create({"registry": REGISTRY}).put_into(COMPILED.read_text())
    file = write(tmp_path / "own.yaml", text)
    assert f"launcher:{__version__} is published nowhere" in refused("upload", file)
    monkeypatch.setenv("KFP_DDP_REGISTRY", REGISTRY)
    output("upload", file, "--name", "ours")


def test_an_invalid_file_or_name_is_not_sent(kfp_server: KfpServer, tmp_path: Path) -> None:
    assert "not YAML" in refused("upload", write(tmp_path / "junk.yaml", b"\x00\x01{{{"))
    assert "did you mean 'train_resnet'?" in refused("upload", "train_resnett")
    assert not kfp_server.requests


def test_a_failed_upload_is_reported_and_cleaned_up(kfp_server: KfpServer, file: Path) -> None:
    kfp_server.fail("upload_pipeline_version", faults.stack_trace)
    assert "failed (500): Internal Server Error" in str(call("upload", file).exception)
    assert not kfp_server.store.pipelines
    kfp_server.fail("delete_pipeline", faults.status(400))
    assert "failed (500): Internal Server Error" in str(call("upload", file).exception)


def test_an_upload_with_a_lost_answer_succeeds(kfp_server: KfpServer, file: Path) -> None:
    kfp_server.fail("upload_pipeline_version", faults.lost)
    output("upload", file)
    assert len(kfp_server.store.pipelines) == 1
    output("upload", file)  # finds the existing version


def test_a_concurrent_upload_of_one_content_is_an_error(kfp_server: KfpServer, file: Path) -> None:
    kfp_server.fail("upload_pipeline_version", faults.status(409))
    assert "another client is uploading mine-" in refused("upload", file)
