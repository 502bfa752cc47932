"""Commands of a user who has KFP and a profile, but no cluster."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.client import logs, tensorboard
from kfp_ddp.client.run_info import RunFinder
from kfp_ddp.client.steps import Step, every_step
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.pipelines.document import read
from kfp_ddp.storage.kinds import open_store
from tests import run_output
from tests.commands import call, document, output
from tests.exports import exported
from tests.kfp_server import faults
from tests.kfp_server.server import MULTI_USER, KfpServer, serving
from tests.run_output import RUN_ID

COMPILED = Path(__file__).parents[2] / "kfp_ddp" / "compiled"
DONE = ("preflight", "data-sync", "dataset-volume", "train", "evaluate", "export", "gate")
BUCKET = "mlpipeline/v2/artifacts"


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KfpServer]:
    """A server of several users, one of whom has a cookie and no kubeconfig."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with serving(multi_user=True) as server:
        server.cookie = "authservice_session=alice"
        server.store.namespaces = ["team-a"]
        server.store.create_experiment({"display_name": "Default", "namespace": "team-a"}, {})
        monkeypatch.setenv("KFP_DDP_HOST", server.url)
        monkeypatch.setenv("KFP_DDP_COOKIE", server.cookie)
        monkeypatch.setenv("KFP_DDP_NAMESPACE", "team-a")
        yield server
    assert not server.violations


@pytest.fixture
def run_id(profile: KfpServer) -> str:
    """A run that has just been created."""
    (experiment,) = profile.store.experiments.values()
    body = {
        "display_name": "flowers",
        "experiment_id": experiment["experiment_id"],
        "pipeline_spec": read(COMPILED / "train_resnet.yaml").body(),
        "runtime_config": {"parameters": {"source": "gs://bucket/flowers"}},
    }
    return str(profile.store.create_run(body, {})["run_id"])


def steps(run: str) -> dict[str, Step]:
    with RunFinder(Connection(os.environ["KFP_DDP_HOST"], "team-a")) as finder:
        return {step.name: step for step in every_step(finder.find(run).steps)}


def write(server: KfpServer, run: str, step: str, *lines: str, level: int = -1) -> str:
    """Write the log of a step, under the id of its pod; return the id."""
    node = steps(run)[step].nodes[0][level]
    server.logs[node] = "".join(f"{line}\n" for line in lines).encode()
    return node


def launched(parameters: dict[str, Any], *names: str, **artifacts: dict[str, Any]) -> str:
    """Return what the launcher logs at the end of a step."""
    artifacts |= {name: {} for name in names}
    listed = {
        name: {
            "artifacts": [{"name": name, "metadata": {}, "uri": f"minio://{BUCKET}/{name}"} | own]
        }
        for name, own in artifacts.items()
    }
    content = json.dumps({"parameterValues": parameters, "artifacts": listed}, indent=2)
    return f"I1127 19:04:57.730295      15 launcher_v2.go:1230] ExecutorOutput: {content}"


def results(server: KfpServer, run: str, source: Path) -> None:
    """Let a run have the artifacts of the training in a folder."""
    server.put_run(run, "SUCCEEDED", dict.fromkeys((*DONE, "publish", "teardown"), "SUCCEEDED"))
    folder = f"/work/{run}/train"
    trained = ("train_metrics", "trained_model", "loss_curve")
    write(server, run, "train", "step 40/40", launched({"run_dir": folder}, *trained))
    evaluated = {"evaluation": f"{folder}/evaluation/evaluation.json"}
    names = ("evaluation_metrics", "evaluation_report")
    write(server, run, "evaluate", launched(evaluated, *names))
    verdict = {"metadata": {"blessed": True, "reason": "blessed: as good"}}
    write(server, run, "gate", launched({}, "gate_report", gate_verdict=verdict))
    settings = json.loads((source / "config.json").read_text())
    server.artifacts = {
        f"{BUCKET}/train_metrics": (source / "metrics.jsonl").read_bytes(),
        f"{BUCKET}/trained_model": json.dumps({"settings": settings}).encode(),
        f"{BUCKET}/loss_curve": b"<p>curve</p>",
        f"{BUCKET}/evaluation_metrics": (source / "evaluation/evaluation.json").read_bytes(),
        f"{BUCKET}/evaluation_report": b"<p>before the gate</p>",
        f"{BUCKET}/gate_report": b"<p>report</p>",
    }


def test_the_log_of_a_recorded_run_is_without_the_lines_of_kfp(profile: KfpServer) -> None:
    run = profile.record("multi_user/run_get")
    recorded = json.loads((MULTI_USER / "node_log.json").read_text())
    profile.logs[recorded["request"]["path"].split("/")[-2]] = recorded["body"].encode()
    blessed = "blessed: accuracy 0.5889 >= 0.2; can be served: model.onnx\n"
    assert output("logs", run, "gate") == blessed
    assert output("logs", run, "gate", "--all") == recorded["body"]
    assert {one.headers["cookie"] for one in profile.requests} == {profile.cookie}
    answer = call("logs", run, "train")
    assert isinstance(answer.exception, StorageError)
    assert "KUBECONFIG" in str(answer.exception)
    assert "NotFound" in str(answer.exception)


@pytest.mark.parametrize("level", [-1, 0])
def test_the_cause_of_a_failure_is_read_in_the_log(
    profile: KfpServer, run_id: str, level: int
) -> None:
    profile.put_run(run_id, "FAILED", {"preflight": "SUCCEEDED", "data-sync": "FAILED"})
    write(profile, run_id, "data-sync", "found 3", "error: no images in gs://b", level=level)
    described = document("describe", run_id)
    assert (described["step"], described["cause"]) == ("data-sync", "no images in gs://b")
    profile.put_run(run_id, "FAILED", {"preflight": "UNDRIVEN"})
    write(profile, run_id, "preflight", "error: of the driver", level=level)
    assert document("describe", run_id)["cause"] == "of the driver"


def test_logs_are_followed_over_cuts(
    profile: KfpServer, run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    states = dict.fromkeys(DONE[:3], "SUCCEEDED")
    profile.put_run(run_id, "RUNNING", states | {"train": "RUNNING"})
    node = write(profile, run_id, "train", "step 1", launched({}))
    profile.written = {node}

    def cut(handler: Any, server: KfpServer) -> None:
        handler.answer(200, server.logs[node], Content_Type="text/plain", Content_Length="10000")
        handler.close_connection = True

    profile.fail("node_log", cut, times=2)
    lines = [f"step {number}" for number in range(2, 50)]

    def train() -> None:
        while len(profile.requests_for("node_log")) < 3:  # both cuts
            profile.closing.wait(0.01)
        for line in lines:
            profile.logs[node] += f"{line}\n".encode()
        profile.put_run(run_id, "SUCCEEDED", states | {"train": "SUCCEEDED"})
        profile.written.clear()

    later = threading.Thread(target=train)
    later.start()
    followed = output("logs", run_id, "train", "-f")
    later.join()
    assert followed.splitlines() == ["step 1", *lines]


def test_results_are_downloaded_compared_and_shown(
    profile: KfpServer, run_id: str, tmp_path: Path
) -> None:
    local = run_output.make(tmp_path / "local", correct=80, epochs=2)
    source = run_output.make(tmp_path / "source", epochs=3) / "work" / RUN_ID / "train"
    results(profile, run_id, source)
    answer = call("download", run_id, "-o", tmp_path / "to", "--json")
    assert answer.exit_code == 0, answer.output
    assert "KUBECONFIG" in answer.stderr
    (task,) = json.loads(answer.stdout)["tasks"]
    assert (task["task"], task["bundle"], task["bytes"] > 1000) == ("train", None, True)
    assert (tmp_path / "to/evaluation/report.html").read_text() == "<p>report</p>"
    assert (tmp_path / "to/metrics.jsonl").read_bytes() == (source / "metrics.jsonl").read_bytes()
    assert "<svg" in (tmp_path / "to/loss_curve.html").read_text()
    compared = document("compare", run_id, local)
    assert compared["settings"] == {"epochs": [3, 2]}
    assert [one["value"] for one in compared["metrics"]["accuracy"]] == [0.9, 0.8]
    assert compared["runs"][0]["verdict"] == "blessed: as good"
    (training,) = document("describe", run_id)["trainings"]
    assert training["verdict"] == "blessed: as good"
    with RunFinder(Connection(profile.url, "team-a")) as finder:
        tensorboard.fetch_metrics(finder.find(run_id).files(), tmp_path / "board")
    assert (tmp_path / "board/train/metrics.jsonl").exists()


def test_what_an_older_run_did_not_store_comes_from_its_destination(
    profile: KfpServer, run_id: str, tmp_path: Path
) -> None:
    source = run_output.make(tmp_path / "source") / "work" / RUN_ID / "train"
    results(profile, run_id, source)
    for name in ("train_metrics", "trained_model", "evaluation_metrics"):
        del profile.artifacts[f"{BUCKET}/{name}"]
    answer = call("download", run_id, "-o", tmp_path / "without")
    assert "evaluation.json" in answer.stderr
    assert (tmp_path / "without/loss_curve.html").read_text() == "<p>curve</p>"
    assert not (tmp_path / "without/metrics.jsonl").exists()
    (tmp_path / "models").mkdir()
    models = open_store(str(tmp_path / "models"))
    version = exported(models, "flowers", tmp_path / "bundle", 12, Lineage(run_id))
    arguments = {"destination": models.uri, "model_name": "flowers"}
    profile.store.runs[run_id]["runtime_config"] = {"parameters": arguments}
    output("download", run_id, "-o", tmp_path / "to")
    assert bundle.version(tmp_path / "to/bundle") == version
    assert (tmp_path / "to/evaluation/report.html").read_text() == "<p>report</p>"
    compared = document("compare", run_id)
    assert compared["metrics"]["accuracy"][0]["value"] == 0.8
    for node in profile.logs:
        profile.logs[node] = b""
    assert document("compare", run_id)["metrics"] == compared["metrics"]


def test_what_is_not_allowed_is_one_line(profile: KfpServer, run_id: str, tmp_path: Path) -> None:
    profile.put_run(run_id, "RUNNING", dict.fromkeys(DONE[:3], "SUCCEEDED") | {"train": "RUNNING"})
    for command in ("download", "compare", "tensorboard"):
        answer = call(command, run_id)
        assert isinstance(answer.exception, InputError), answer.output
        assert "KUBECONFIG" in str(answer.exception)
        assert "work=" in str(answer.exception)
    source = run_output.make(tmp_path / "source") / "work" / RUN_ID / "train"
    results(profile, run_id, source)
    cases = {
        "GET viewers": faults.answer("no right to GET viewers", 403, "text/plain"),
        "500": faults.status(500),
        "a page": faults.page,
        "a redirect": faults.login_page,
        "cut off": faults.cut,
    }
    for words, fault in cases.items():
        profile.heal()
        profile.fail("artifact", fault)
        answer = call("download", run_id)
        assert isinstance(answer.exception, KfpDdpError), answer.output
        assert words in str(answer.exception)
        assert not (tmp_path / "flowers").exists()
    profile.heal()
    profile.ui = False
    assert "UI" in str(call("download", run_id).exception)
