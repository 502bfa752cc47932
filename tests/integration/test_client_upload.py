import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from kfp_ddp.cli import app
from kfp_ddp.pipelines.document import read
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer

COMPILED = Path("kfp_ddp/compiled/train_resnet.yaml")


@pytest.fixture(autouse=True)
def _host(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_HOST", kfp_server.url)
    monkeypatch.setenv("KFP_DDP_TIMEOUT", "2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small pipeline of somebody's own."""
    spec = {
        "pipelineInfo": {"name": "mine"},
        "root": {
            "dag": {"tasks": {}},
            "inputDefinitions": {"parameters": {"rounds": {"parameterType": "NUMBER_INTEGER"}}},
        },
        "schemaVersion": "2.1.0",
        "sdkVersion": "kfp-2.17.0",
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def upload(*words: str) -> Result:
    return CliRunner().invoke(app, ["upload", *words])


def change(file: Path, description: str) -> None:
    spec = yaml.safe_load(file.read_text())
    spec["pipelineInfo"]["description"] = description
    file.write_text(yaml.safe_dump(spec))


def test_the_same_content_is_uploaded_once(kfp_server: KfpServer, file: Path) -> None:
    first = json.loads(upload(str(file), "--json").stdout)
    assert first["new"]
    assert first["version"].startswith("mine-")
    file.write_text("# a comment is no content\n" + file.read_text())
    again = json.loads(upload(str(file), "--json").stdout)
    assert again == first | {"new": False}
    assert upload(str(file)).stdout == (f"unchanged: mine already has version {first['version']}\n")
    assert len(kfp_server.asked("upload_pipeline_version")) == 1


def test_changed_content_is_a_new_version(kfp_server: KfpServer, file: Path) -> None:
    upload(str(file))
    change(file, "another")
    done = upload(str(file), "--description", "faster")
    names = [each["name"] for each in kfp_server.store.versions.values()]
    assert done.stdout == f"uploaded mine, version {names[1]}\n"
    assert len(set(names)) == 2
    assert [each.get("description") for each in kfp_server.store.versions.values()] == [
        None,
        "faster",
    ]


def test_content_of_before_is_the_newest_again(kfp_server: KfpServer, file: Path) -> None:
    before = file.read_text()
    upload(str(file))
    change(file, "another")
    upload(str(file))
    file.write_text(before)
    assert json.loads(upload(str(file), "--json").stdout)["new"]
    first, _, third = (each["name"] for each in kfp_server.store.versions.values())
    assert third == f"{first}-2"
    assert not json.loads(upload(str(file), "--json").stdout)["new"]


def test_ours_are_uploaded_by_name_with_the_images_that_are_set(
    kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_DDP_REGISTRY", "registry.example.com/ml")
    assert upload("train_resnet", "--name", "nightly").exit_code == 0
    assert [each["name"] for each in kfp_server.store.pipelines.values()] == ["nightly"]
    sent = json.dumps(next(iter(kfp_server.store.versions.values()))["pipeline_spec"])
    assert "registry.example.com/ml/launcher" in sent


def test_what_arrives_is_what_the_file_holds(kfp_server: KfpServer) -> None:
    assert upload(str(COMPILED)).exit_code == 0
    sent = next(iter(kfp_server.store.versions.values()))["pipeline_spec"]
    assert sent == read(COMPILED).body()


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\x00\x01{{{", "not YAML"), (b"a: 1\n", "not a compiled pipeline"), (b"", "it is empty")],
)
def test_what_is_no_pipeline_is_never_sent(
    kfp_server: KfpServer, tmp_path: Path, content: bytes, told: str
) -> None:
    (tmp_path / "junk.yaml").write_bytes(content)
    done = upload(str(tmp_path / "junk.yaml"))
    assert told in str(done.exception)
    assert not kfp_server.requests


def test_nothing_is_left_of_an_upload_that_fails(kfp_server: KfpServer, file: Path) -> None:
    kfp_server.fail("upload_pipeline_version", faults.stack_trace)
    assert "failed (500): Internal Server Error" in str(upload(str(file)).exception)
    assert not kfp_server.store.pipelines


def test_an_upload_whose_answer_is_lost_is_there(kfp_server: KfpServer, file: Path) -> None:
    kfp_server.fail("upload_pipeline_version", faults.lost)
    assert upload(str(file)).exit_code == 0
    assert len(kfp_server.store.pipelines) == 1
    assert upload(str(file)).exit_code == 0  # by what is there already, as uploads still fail


def test_why_an_upload_failed_is_told_also_where_no_cleaning_up_is_possible(
    kfp_server: KfpServer, file: Path
) -> None:
    kfp_server.fail("upload_pipeline_version", faults.stack_trace)
    kfp_server.fail("delete_pipeline", faults.status(400))
    assert "failed (500): Internal Server Error" in str(upload(str(file)).exception)


def test_another_who_uploads_the_same_is_told_of(kfp_server: KfpServer, file: Path) -> None:
    kfp_server.fail("upload_pipeline_version", faults.status(409))
    assert "another client is uploading mine-" in str(upload(str(file)).exception)


def test_a_name_that_is_none_of_ours(kfp_server: KfpServer) -> None:
    told = "train_resnett is not a YAML file, and not a built-in pipeline; did you mean "
    assert str(upload("train_resnett").exception) == f"{told}'train_resnet'?"
    assert not kfp_server.requests
