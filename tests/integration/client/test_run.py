"""Runs of a KFP server: started, refused and inspected."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.client.run import follow
from kfp_ddp.core import config
from kfp_ddp.core.container_images import PUBLIC, REGISTRY, Images
from kfp_ddp.core.errors import ServerError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.bundle import LINEAGE
from kfp_ddp.storage.kinds import open_store
from tests import run_output
from tests.commands import call, document, output, refused
from tests.exports import exported
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer, serving
from tests.schedules import OWN

pytestmark = pytest.mark.usefixtures("configured")
FLOWERS = "gs://bucket/flowers"
PREDICT = (FLOWERS, "--pipeline", "batch_predict", "--set")
COMPILED = Path(__file__).parents[3] / "kfp_ddp" / "compiled"
RUN = "8fa2b9a1-6d87-4473-ad43-69c2efa3bcc0"


def _sent(server: KfpServer) -> dict[str, Any]:
    (request,) = server.requests_for("create_run")
    body = request.body
    assert isinstance(body, dict)
    return body


def test_a_source_is_trained_on_with_what_was_set(kfp_server: KfpServer) -> None:
    shown = output("run", FLOWERS, "--gpus", "2", "--set", "epochs=30", "--set", "seed=7")
    run_id = next(iter(kfp_server.store.runs))
    assert f"{kfp_server.url}/#/runs/details/{run_id}" in shown
    sent = _sent(kfp_server)
    assert re.fullmatch(r"flowers-\d{8}-\d{6}", sent["display_name"])
    assert sent["runtime_config"]["parameters"] == {
        "source": FLOWERS,
        "gpus_per_node": 2,
        "epochs": 30,
        "training": {"seed": 7},
    }
    text = Images.create({"registry": REGISTRY}).put_into(
        (COMPILED / "train_resnet.yaml").read_text()
    )
    file = list(yaml.safe_load_all(text))
    assert sent["pipeline_spec"] == {"pipeline_spec": file[0], "platform_spec": file[1]}


def test_options_override_the_file_and_that_the_configuration() -> None:
    config.file().write_text("destination: gs://once/models\n")
    Path("file.yaml").write_text("gpus_per_node: 8\ndestination: gs://file/models")

    def sent(*words: str) -> Any:
        return document("run", *words, "--dry-run")["parameters"]

    typed = ("gs://typed/x", "--gpus", "1", "-f", "file.yaml")
    expected = {"source": "gs://typed/x", "gpus_per_node": 1, "destination": "gs://file/models"}
    assert sent(*typed) == expected
    expected["destination"] = "gs://typed/models"
    assert sent(*typed, "--destination", "gs://typed/models") == expected
    assert sent("gs://typed/x")["destination"] == "gs://once/models"


def test_images_come_from_the_configured_registry(kfp_server: KfpServer) -> None:
    config.file().write_text("registry: registry.example.com/ml\nexperiment: flowers\n")
    first = call("run", FLOWERS)
    text = json.dumps(_sent(kfp_server))
    assert "registry.example.com/ml/launcher:" in text
    assert "registry.example.com/ml/trainer:" in text
    assert "ghcr.io" not in text
    names = [one["display_name"] for one in kfp_server.store.experiments.values()]
    assert "flowers" in names
    assert "the experiment flowers is new" in first.stderr
    assert "is new" not in call("run", FLOWERS).stderr


def test_dry_run_shows_what_will_run(kfp_server: KfpServer) -> None:
    shown = document("run", FLOWERS, "--gpus", "2", "--pipeline", "sweep", "--dry-run")
    assert shown["runs"].startswith("a network with settings by images")
    assert (shown["trials"], shown["gate"]) == (3, {"majority_class": "must be beaten"})
    assert re.fullmatch(r"sweep-[0-9a-f]{12}", shown["version"])
    assert [image.partition(":")[0] for image in shown["images"]] == [
        "ghcr.io/kfp-ddp/launcher",
        "ghcr.io/kfp-ddp/trainer",
    ]
    assert not kfp_server.requests


def test_any_pipeline_is_run_from_its_file(kfp_server: KfpServer) -> None:
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    Path("set.yaml").write_text("rounds: 2\ntraining: {b: 2}\n")
    output("run", "own.yaml", "-f", "set.yaml", "--set", "rounds=3", "--name", "third")
    sent = _sent(kfp_server)
    assert sent["display_name"] == "third"
    assert sent["runtime_config"]["parameters"] == {"rounds": 3, "training": {"b": 2}}
    assert sent["pipeline_spec"] == OWN


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([FLOWERS, "--set", "pretrained=weights.pth"], "pretrained=weights.pth is no address"),
        ([FLOWERS, "--set", "batch_size=100", "--gpus", "8"], "cannot be divided evenly among 8"),
        ([FLOWERS, "--set", "source=gs://x"], "it is the argument SOURCE"),
        (["bucket/flowers"], "for a bucket write gs://bucket/flowers"),
        (["https://console.cloud.google.com/storage/browser/b/f;tab=x"], "write gs://b/f"),
        (["https://eu.console.aws.amazon.com/s3/buckets/b?region=eu&prefix=f/"], "write s3://b/f/"),
        ([FLOWERS, "--set", "bucket_secret="], "bucket_secret='' cannot be used"),
        (["photos"], "is a path of this machine, which a cluster cannot read"),
        (["~/photos"], "source='~/photos' is a path of this machine"),
        ([FLOWERS, "-f", "here.yaml"], "destination='./new' is a path of this machine"),
        ([FLOWERS, "--set", "champion=~/new"], "champion='~/new' is a path of this machine"),
        ([FLOWERS, "--set", "gate={tags: ~/t.csv}"], "tags='~/t.csv' is a path of this machine"),
        ([FLOWERS, "-f", "twice.yaml"], "source cannot be set too: it is the argument SOURCE"),
        (
            [*PREDICT, "bundle=gs://b/m", "--set", "table=./out.csv"],
            "table='./out.csv' is a path of this machine",
        ),
        ([*PREDICT, "bundle=photos", "--set", "table=gs://b/t.csv"], "bundle='photos' is"),
        ([FLOWERS, "--ranks", "2"], "--ranks is for a run with --local"),
        ([FLOWERS, "--pipeline", "retrian"], "not built in; did you mean 'retrain'?"),
        (["--pipeline", "train-resnet-bucket"], "source is missing: give --set source=… (Where"),
        (["own.yaml", "--set", "rounds=1", "--gpus", "1"], "own has no parameter gpus_per_node"),
        (["own.yaml", "--pipeline", "retrain"], "are two pipelines: give one of them"),
        (["junk.yaml"], "junk.yaml is not YAML"),
        (["mine.py"], "mine.py is not compiled: kfp-ddp compile mine.py"),
    ],
)
def test_invalid_input(kfp_server: KfpServer, words: list[str], line: str) -> None:
    Path("photos").mkdir()
    Path("here.yaml").write_text("destination: ./new\n")
    Path("twice.yaml").write_text("source: gs://bucket/other\n")
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    Path("junk.yaml").write_bytes(b"\x00\x01{{{")
    Path("set.yaml").write_text("rounds: 2\n")
    assert line in refused("run", *words)
    assert [request for request in kfp_server.requests if request.method == "POST"] == []


def test_without_a_registry_images_are_public(tmp_path: Path) -> None:
    (tmp_path / ".config" / "kfp-ddp" / "config.yaml").unlink()
    Path("photos").mkdir()
    assert "or run here with --local" in refused("run", "photos")
    assert document("run", FLOWERS, "--dry-run")["images"] == [*PUBLIC.values()]


@pytest.mark.parametrize(
    "words",
    [
        ("https://me:hunter2@data.example.com/flowers",),
        ("https://data.example.com/m.jsonl?X-Amz-Signature=hunter2",),
        (FLOWERS, "--set", "destination=https://hunter2@x/y"),
        ("own.yaml", "--set", "training={log: ['https://x?sig=hunter2']}"),
        (FLOWERS, "--name", "https://me:hunter2@x"),
        ("own.yaml", "--set", "training={a: {b: {'https://me:hunter2@x': 1}}}"),
        ("own.yaml", "--set", "words=AccountKey=hunter2"),
        ("constants.yaml",),
    ],
)
def test_a_secret_is_not_sent(kfp_server: KfpServer, words: tuple[str, ...]) -> None:
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    inputs = {"parameters": {"env": {"runtimeValue": {"constant": {"HF_TOKEN": "hunter2"}}}}}
    root = {**OWN["root"], "dag": {"tasks": {"job": {"inputs": inputs}}}}
    Path("constants.yaml").write_text(yaml.safe_dump({**OWN, "root": root}))
    done = call("run", *words)
    assert "which KFP would store and show" in str(done.exception)
    assert "hunter2" not in f"{done.exception}{done.output}"
    assert not kfp_server.requests


def test_an_uploaded_pipeline_is_run_in_a_version(kfp_server: KfpServer) -> None:
    own = yaml.safe_dump(OWN).encode()
    pipeline = kfp_server.store.upload_pipeline(own, {"name": "mine"})
    versions = kfp_server.store.upload_pipeline_version
    versions(own, {"pipelineid": pipeline["pipeline_id"], "name": "second"})
    for name, version in (("mine", "second"), ("mine@mine", "mine")):
        output("run", "--pipeline", name, "--set", "rounds=1")
        sent = kfp_server.requests_for("create_run")[-1].body
        assert isinstance(sent, dict)
        ran = kfp_server.store.versions[sent["pipeline_version_reference"]["pipeline_version_id"]]
        assert ran["display_name"] == version
        assert "pipeline_spec" not in sent


def test_a_multi_user_run_has_a_namespace() -> None:
    with serving(multi_user=True) as server:
        options = ["--host", server.url, "-n", "kubeflow-user"]
        output("run", FLOWERS, *options)
        (experiment,) = server.store.experiments.values()
        assert experiment["namespace"] == "kubeflow-user"
        output("status", "last", *options)
        assert server.violations == []


def test_wait_has_the_exit_code(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(server: KfpServer, state: str) -> None:
        (run_id,) = (one for one, run in server.store.runs.items() if run["state"] == "PENDING")
        server.put_run(run_id, state, {"preflight": state})

    for state, code in (("SUCCEEDED", 0), ("FAILED", 1)):
        monkeypatch.setattr(follow, "sleep", lambda _, to=state: end(kfp_server, to))
        done = call("run", FLOWERS, "--wait", "--json")
        assert json.loads(done.stdout)["state"] == state
        assert getattr(done.exception, "exit_code", 0) == code


def test_inspection_of_a_bucket(kfp_server: KfpServer, s3: Any, tmp_path: Path) -> None:
    run_output.task(tmp_path / "train", ("train", "evaluate", "export"), 80, {"epochs": 2})
    for path in filter(Path.is_file, (tmp_path / "train").rglob("*")):
        name = f"runs/{RUN}/{path.relative_to(tmp_path).as_posix()}"
        s3.upload_file(str(path), "bucket", name)
    parameters = {"work": "s3://bucket/runs"}
    kfp_server.record("run_get_failed", runtime_config={"parameters": parameters})
    here = run_output.make(tmp_path / "here", correct=90, epochs=3)

    described = document("describe", "shapes-1")
    assert (described["state"], described["step"]) == ("FAILED", "train")
    assert described["trainings"][0]["checkpoint"] == 40
    assert described["next"][-1] == "kfp-ddp retry 8fa2b9a1"
    assert "its pods were not read: no cluster is configured" in described["notes"][0]

    compared = document("compare", "last", str(here))
    assert [figure["value"] for figure in compared["metrics"]["accuracy"]] == [0.8, 0.9]
    assert compared["settings"]["epochs"] == [2, 3]

    output("download", "8fa2b9a1")
    assert (tmp_path / "shapes-1/bundle/model.onnx").stat().st_size == 100_000
    assert [path.name for path in tmp_path.glob(".*")] == [".config"]


def test_what_cannot_be_read_is_an_error_of_one_line(kfp_server: KfpServer) -> None:
    kfp_server.record("run_get_failed", runtime_config={"parameters": {}})
    messages = {
        ("compare", RUN): "its pipeline has no parameter work or work_claim",
        ("download", RUN): "its pipeline has no parameter work or work_claim",
        ("logs", RUN, "trian"): "shapes-1 has no step 'trian'",
        ("describe", "shapes-2"): "there is no run 'shapes-2'",
    }
    for words, message in messages.items():
        assert message in refused(*words)
    kfp_server.fail("*", faults.status(503, "no healthy upstream"))
    assert isinstance(call("describe", "last").exception, ServerError)


@pytest.mark.parametrize(
    ("recorded", "more", "cause"),
    [
        ("run_get_terminated", {}, "cancelled by a user"),
        ("run_get_failed", {}, "not known"),
        (
            "run_get_failed",
            {"run_details": {"task_details": []}, "error": {"code": 3, "message": "no such spec"}},
            "no such spec",
        ),
    ],
)
def test_a_failed_run_has_the_cause_of_the_server(
    kfp_server: KfpServer, recorded: str, more: dict[str, Any], cause: str
) -> None:
    run_id = kfp_server.record(recorded, **more)
    described = document("describe", run_id)
    assert described["cause"] == cause
    assert described["next"][-1] == f"kfp-ddp retry {run_id[:8]}"


def test_a_run_that_succeeded_needs_no_pods(kfp_server: KfpServer) -> None:
    kfp_server.record("run_get_succeeded")
    shown = output("describe", "shapes-2", "--no-files")
    assert "shapes-2  SUCCEEDED after 3:34, started 2026-11-21 22:56 UTC" in shown
    assert "next        kfp-ddp download 1cb3d7e4" in shown
    assert "note" not in shown


def test_a_bundle_of_the_destination(kfp_server: KfpServer, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    where = open_store(str(tmp_path / "models"))
    for number, run_id in enumerate(("another", RUN)):
        lineage = Lineage(run_id, f"{where.uri}/flowers", "")
        exported(where, "flowers", tmp_path / str(number), 7 + number, lineage)
    given = {"work_claim": "w", "destination": where.uri, "model_name": "flowers"}
    kfp_server.record("run_get_failed", runtime_config={"parameters": given})
    answer = call("download", RUN, "--output", "here", "--json")
    assert answer.exit_code == 0, answer.output
    assert "warning: no cluster is configured" in answer.stderr
    (task,) = json.loads(answer.stdout)["tasks"]
    lineage_file = json.loads((Path(task["bundle"]) / LINEAGE).read_text())
    assert lineage_file["run_id"] == RUN

    kfp_server.store.runs[RUN]["runtime_config"]["parameters"]["model_name"] = "trees"
    answer = call("download", RUN, "--output", "there")
    assert "no cluster is configured" in str(answer.exception)
    assert not (tmp_path / "there").exists()
