"""Commands of a user who has KFP and a profile, but no cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.client.kfp.steps import every_step
from kfp_ddp.client.run import logs
from kfp_ddp.client.run.run_info import RunFinder
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import KfpDdpError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.pipelines.document import read
from kfp_ddp.storage.kinds import open_store
from tests import run_output
from tests.commands import call, document, output, refused
from tests.exports import exported
from tests.kfp_server import faults
from tests.kfp_server.server import MULTI_USER, KfpServer, serving
from tests.run_output import RUN_ID, STEPS

COMPILED = Path(__file__).parents[3] / "kfp_ddp" / "compiled"
RUNNING = dict.fromkeys(STEPS[:3], "SUCCEEDED") | {"train": "RUNNING"}
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
    """The recorded run, as one of a pipeline of ours without a destination."""
    fields = {"display_name": "flowers", "runtime_config": {"parameters": {}}}
    fields["pipeline_spec"] = read(COMPILED / "train_resnet.yaml").body()
    return profile.record("multi_user/run_get", **fields)


def write(server: KfpServer, run: str, step: str, *lines: str, level: int = -1) -> str:
    """Write the log of a step, under the id of its pod; return the id."""
    with RunFinder(Connection(server.url, "team-a")) as finder:
        (found,) = (one for one in every_step(finder.find(run).steps) if one.name == step)
    node = found.nodes[0][level]
    server.logs[node] = "".join(f"{line}\n" for line in lines).encode()
    return node


def launched(parameters: dict[str, Any], *names: str, **metadata: Any) -> str:
    """Return what the launcher logs at the end of a step, whose artifacts have these metadata."""
    artifacts = {
        n: {"artifacts": [{"name": n, "metadata": metadata, "uri": f"minio://{BUCKET}/{n}"}]}
        for n in names
    }
    content = json.dumps({"parameterValues": parameters, "artifacts": artifacts}, indent=2)
    return f"I1127 19:04:57.730295      15 launcher_v2.go:1230] ExecutorOutput: {content}"


def finish(server: KfpServer, run: str, folder: Path, **settings: Any) -> Path:
    """Let a run have the artifacts of a training; return the folder of that, made in a folder."""
    source = run_output.make(folder, **settings) / "work" / RUN_ID / "train"
    server.put_run(run, "SUCCEEDED", dict.fromkeys((*STEPS, "teardown"), "SUCCEEDED"))
    place = f"/work/{run}/train"
    trained = ("train_metrics", "trained_model", "loss_curve")
    write(server, run, "train", "step 40/40", launched({"run_dir": place}, *trained))
    evaluated = {"evaluation": f"{place}/evaluation/evaluation.json"}
    names = ("evaluation_metrics", "evaluation_report")
    write(server, run, "evaluate", launched(evaluated, *names))
    verdict = {"blessed": True, "reason": "blessed: as good"}
    write(server, run, "gate", launched({}, "gate_report", "gate_verdict", **verdict))
    made = json.loads((source / "config.json").read_text())
    contents = {
        "train_metrics": (source / "metrics.jsonl").read_bytes(),
        "trained_model": json.dumps({"settings": made}).encode(),
        "loss_curve": b"<p>curve</p>",
        "evaluation_metrics": (source / "evaluation/evaluation.json").read_bytes(),
        "evaluation_report": b"<p>before the gate</p>",
        "gate_report": b"<p>report</p>",
    }
    server.artifacts = {f"{BUCKET}/{name}": content for name, content in contents.items()}
    return source


def test_the_log_of_a_recorded_run_is_without_the_lines_of_kfp(profile: KfpServer) -> None:
    run = profile.record("multi_user/run_get")
    recorded = json.loads((MULTI_USER / "node_log.json").read_text())
    profile.logs[recorded["request"]["path"].split("/")[-2]] = recorded["body"].encode()
    blessed = "blessed: accuracy 0.5889 >= 0.2; can be served: model.onnx\n"
    assert output("logs", run, "gate") == blessed
    assert output("logs", run, "gate", "--all") == recorded["body"]
    assert {one.headers["cookie"] for one in profile.requests} == {profile.cookie}
    problem = call("logs", run, "train").exception
    assert isinstance(problem, StorageError)
    assert "NotFound" in str(problem)


@pytest.mark.parametrize("level", [-1, 0])
def test_a_cause_is_read_in_the_log(profile: KfpServer, run_id: str, level: int) -> None:
    profile.put_run(run_id, "FAILED", {"preflight": "SUCCEEDED", "data-sync": "FAILED"})
    write(profile, run_id, "data-sync", "found 3", "error: no images in gs://b", level=level)
    described = document("describe", run_id)
    assert (described["step"], described["cause"]) == ("data-sync", "no images in gs://b")
    profile.put_run(run_id, "FAILED", {"preflight": "UNDRIVEN"})
    write(profile, run_id, "preflight", "error: of the driver", level=level)
    assert document("describe", run_id)["cause"] == "of the driver"


def test_logs_outlive_cut(profile: KfpServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    profile.put_run(run_id, "RUNNING", RUNNING)
    lines = [f"step {number}" for number in range(2, 50)]
    node = write(profile, run_id, "train", "step 1", launched({}), *lines)

    def cut(handler: Any, server: KfpServer) -> None:
        part = server.logs[node][:-100]
        handler.answer(200, part, Content_Type="text/plain", Content_Length="10000")
        handler.close_connection = True

    def end(_: Any, server: KfpServer) -> bool:
        server.put_run(run_id, "SUCCEEDED", RUNNING | {"train": "SUCCEEDED"})
        return True

    profile.fail("node_log", cut, times=2)
    profile.fail("node_log", end)
    assert output("logs", run_id, "train", "-f").splitlines() == ["step 1", *lines]
    assert profile.requests_for("node_log")[0].query == {"follow": "true"}


def test_results_are_downloaded_and_shown(profile: KfpServer, run_id: str, tmp_path: Path) -> None:
    local = run_output.make(tmp_path / "local", correct=80, epochs=2)
    source = finish(profile, run_id, tmp_path / "source", epochs=3)
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
    (training,) = document("describe", run_id)["trainings"]
    assert training["verdict"] == "blessed: as good"


def test_a_sweep_is_described_by_what_kfp_has(
    profile: KfpServer, run_id: str, tmp_path: Path
) -> None:
    finish(profile, run_id, tmp_path / "source")
    place = f"/work/{run_id}/train"
    ranked = [
        {"task": "train", "rank": 1, "settings": {"learning_rate": 0.1}, "accuracy": 0.9},
        {"task": "other", "rank": 2, "settings": {"learning_rate": 0.4}, "accuracy": 0.5},
    ]
    logged = launched({"run_dir": place}, "trained_model", "sweep_report", sweep={"trials": ranked})
    write(profile, run_id, "train", logged)
    described = document("describe", run_id)
    assert [(one["task"], one["rank"], one["settings"]) for one in described["trials"]] == [
        ("train", 1, {"learning_rate": 0.1}),
        ("other", 2, {"learning_rate": 0.4}),
    ]
    lines = output("describe", run_id).splitlines()
    assert sum("learning_rate=" in line for line in lines) == 2
    assert sum(line.startswith("  checkpoint") for line in lines) == 1
    compared = document("compare", run_id)
    assert compared["metrics"]["accuracy_in_training"][0]["value"] == 0.9


def test_a_destination_has_what_kfp_lacks(profile: KfpServer, run_id: str, tmp_path: Path) -> None:
    finish(profile, run_id, tmp_path / "source")
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
    profile.put_run(run_id, "RUNNING", RUNNING)
    for command in ("download", "compare"):
        assert "KUBECONFIG" in refused(command, run_id)
    finish(profile, run_id, tmp_path / "source")
    cases = {
        "GET viewers": faults.answer("no right to GET viewers", 403, "text/plain"),
        "UI": faults.status(404),
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
