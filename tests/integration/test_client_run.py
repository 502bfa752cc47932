import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client import follow
from tests.kfp_server.server import KfpServer, serving
from tests.schedules import OWN, Call

FLOWERS = "gs://bucket/flowers"
COMPILED = Path(__file__).parents[2] / "kfp_ddp" / "compiled"


def _sent(server: KfpServer) -> dict[str, Any]:
    (request,) = server.requests_for("create_run")
    body = request.body
    assert isinstance(body, dict)
    return body


def test_a_source_is_trained_on_with_what_was_set(call: Call, kfp_server: KfpServer) -> None:
    done = call("run", FLOWERS, "--gpus", "2", "--set", "epochs=30", "--set", "seed=7")
    assert done.exit_code == 0, done.output
    run_id = next(iter(kfp_server.store.runs))
    assert f"{kfp_server.url}/#/runs/details/{run_id}" in done.output
    sent = _sent(kfp_server)
    assert re.fullmatch(r"flowers-\d{8}-\d{6}", sent["display_name"])
    assert sent["runtime_config"]["parameters"] == {
        "source": FLOWERS,
        "gpus_per_node": 2,
        "epochs": 30,
        "training": {"seed": 7},
    }
    file = list(yaml.safe_load_all((COMPILED / "train_resnet.yaml").read_text()))
    assert sent["pipeline_spec"] == {"pipeline_spec": file[0], "platform_spec": file[1]}


def test_options_override_the_file_and_that_the_configuration(call: Call) -> None:
    Path("kfp-ddp.yaml").write_text("destination: gs://once/models\n")
    Path("file.yaml").write_text(
        "source: gs://file/x\ngpus_per_node: 8\ndestination: gs://file/models\n"
    )

    def sent(*words: str) -> Any:
        return json.loads(call("run", *words, "--dry-run", "--json").stdout)["parameters"]

    typed = ("gs://typed/x", "--gpus", "1", "-f", "file.yaml")
    expected = {"source": "gs://typed/x", "gpus_per_node": 1, "destination": "gs://file/models"}
    assert sent(*typed) == expected
    expected["destination"] = "gs://typed/models"
    assert sent(*typed, "--destination", "gs://typed/models") == expected
    assert sent("gs://typed/x")["destination"] == "gs://once/models"


def test_images_come_from_the_configured_registry(call: Call, kfp_server: KfpServer) -> None:
    Path("kfp-ddp.yaml").write_text("registry: registry.example.com/ml\nexperiment: flowers\n")
    first = call("run", FLOWERS)
    text = json.dumps(_sent(kfp_server))
    assert "registry.example.com/ml/launcher:" in text
    assert "ghcr.io" not in text
    names = [each["display_name"] for each in kfp_server.store.experiments.values()]
    assert "flowers" in names
    assert "the experiment flowers is new" in first.stderr
    assert "is new" not in call("run", FLOWERS).stderr


def test_dry_run_shows_what_will_run(call: Call, kfp_server: KfpServer) -> None:
    words = ("run", FLOWERS, "--gpus", "2", "--pipeline", "sweep", "--dry-run")
    shown = json.loads(call(*words, "--json").stdout)
    assert shown["runs"].startswith("a network with settings by images")
    assert (shown["trials"], shown["gate"]) == (3, {"majority_class": "must be beaten"})
    assert re.fullmatch(r"sweep-[0-9a-f]{12}", shown["version"])
    assert [image.partition(":")[0] for image in shown["images"]] == [
        "ghcr.io/kfp-ddp/launcher",
        "ghcr.io/kfp-ddp/trainer",
    ]
    assert not kfp_server.requests


def test_any_pipeline_is_run_from_its_file(call: Call, kfp_server: KfpServer) -> None:
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    Path("set.yaml").write_text("rounds: 2\ntraining: {b: 2}\n")
    done = call("run", "own.yaml", "-f", "set.yaml", "--set", "rounds=3", "--name", "third")
    assert done.exit_code == 0, done.output
    sent = _sent(kfp_server)
    assert sent["display_name"] == "third"
    assert sent["runtime_config"]["parameters"] == {"rounds": 3, "training": {"b": 2}}
    assert sent["pipeline_spec"] == OWN


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([FLOWERS, "--set", "pretrained=weights.pth"], "pretrained=weights.pth is no address"),
        (
            [FLOWERS, "--set", "batch_size=100", "--gpus", "8"],
            "batch_size=100 cannot be divided evenly among 8 ranks",
        ),
        ([FLOWERS, "--set", "source=gs://x"], "it is the argument SOURCE"),
        (["bucket/flowers"], "for a bucket write gs://bucket/flowers"),
        (["https://console.cloud.google.com/storage/browser/b/f;tab=x"], "write gs://b/f"),
        (["https://eu.console.aws.amazon.com/s3/buckets/b?region=eu&prefix=f/"], "write s3://b/f/"),
        ([FLOWERS, "--set", "bucket_secret="], "bucket_secret='' cannot be used"),
        ([FLOWERS, "--set", "work_claim=MyClaim"], "work_claim='MyClaim' cannot be used"),
        (["photos"], "is a folder of this machine, which a cluster cannot read"),
        ([FLOWERS, "--ranks", "2"], "--ranks is for a run with --local"),
        ([FLOWERS, "--pipeline", "retrian"], "not built in; did you mean 'retrain'?"),
        (["--pipeline", "train-resnet-bucket"], "source is missing: give --set source=… (Where"),
        (["own.yaml", "--set", "rounds=1", "--gpus", "1"], "own has no parameter gpus_per_node"),
        (["own.yaml", "--pipeline", "retrain"], "are two pipelines: give one of them"),
        (["junk.yaml"], "junk.yaml is not YAML"),
        (["mine.py"], "mine.py is not compiled: kfp-ddp compile mine.py"),
    ],
)
def test_invalid_input_is_one_line_and_starts_no_run(
    call: Call, kfp_server: KfpServer, words: list[str], line: str
) -> None:
    Path("photos").mkdir()
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    Path("junk.yaml").write_bytes(b"\x00\x01{{{")
    Path("set.yaml").write_text("rounds: 2\n")
    refused = call("run", *words)
    assert line in str(refused.exception)
    assert "\n" not in str(refused.exception)
    assert getattr(refused.exception, "exit_code", None) == 2
    created = [each for each in kfp_server.requests if each.method == "POST"]
    assert created == []


@pytest.mark.parametrize(
    "words",
    [
        ("https://me:hunter2@data.example.com/flowers",),
        ("https://data.example.com/m.jsonl?X-Amz-Signature=hunter2",),
        (FLOWERS, "--set", "destination=https://hunter2@x/y"),
        ("own.yaml", "--set", "training={log: ['https://x?sig=hunter2']}"),
        (FLOWERS, "--name", "https://me:hunter2@x"),
    ],
)
def test_a_secret_is_not_sent(call: Call, kfp_server: KfpServer, words: tuple[str, ...]) -> None:
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    refused = call("run", *words)
    assert "which KFP would store and show" in str(refused.exception)
    assert "hunter2" not in f"{refused.exception}{refused.output}"
    assert not kfp_server.requests


def test_an_uploaded_pipeline_is_run_in_a_version(call: Call, kfp_server: KfpServer) -> None:
    own = yaml.safe_dump(OWN).encode()
    pipeline = kfp_server.store.upload_pipeline(own, {"name": "mine"})
    versions = kfp_server.store.upload_pipeline_version
    versions(own, {"pipelineid": pipeline["pipeline_id"], "name": "second"})
    for name, version in (("mine", "second"), ("mine@mine", "mine")):
        done = call("run", "--pipeline", name, "--set", "rounds=1")
        assert done.exit_code == 0, done.output
        sent = kfp_server.requests_for("create_run")[-1].body
        assert isinstance(sent, dict)
        chosen = kfp_server.store.versions[
            sent["pipeline_version_reference"]["pipeline_version_id"]
        ]
        assert chosen["display_name"] == version
        assert "pipeline_spec" not in sent


def test_a_multi_user_run_has_a_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with serving(multi_user=True) as server:
        options = ["--host", server.url, "-n", "kubeflow-user"]
        run = ["run", FLOWERS, "--registry", "registry.example.com/ml"]
        done = CliRunner().invoke(app, [*run, *options])
        assert done.exit_code == 0, done.output
        (experiment,) = server.store.experiments.values()
        assert experiment["namespace"] == "kubeflow-user"
        found = CliRunner().invoke(app, ["status", "last", *options])
        assert found.exit_code == 0, found.output
        assert server.violations == []


def test_the_exit_code_of_wait_is_that_of_the_run(
    call: Call, kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(server: KfpServer, state: str) -> None:
        (run_id,) = (one for one, run in server.store.runs.items() if run["state"] == "PENDING")
        server.put_run(run_id, state, {"preflight": state})

    for state, code in (("SUCCEEDED", 0), ("FAILED", 1)):
        monkeypatch.setattr(follow, "sleep", lambda _, to=state: end(kfp_server, to))
        done = call("run", FLOWERS, "--wait", "--json")
        assert json.loads(done.stdout)["state"] == state
        assert getattr(done.exception, "exit_code", 0) == code
