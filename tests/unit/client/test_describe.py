"""Runs described and compared, their logs and their downloads."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kfp_ddp import Client
from kfp_ddp.client.kfp import pods
from kfp_ddp.client.kfp.steps import Step
from kfp_ddp.client.run import follow, run_info
from kfp_ddp.client.run.compared import setting_text
from kfp_ddp.client.run.download import download
from kfp_ddp.client.run.run_files import StoredFiles
from kfp_ddp.core import packed
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.failure import Failure
from kfp_ddp.core.files import sha256
from kfp_ddp.k8s.pods import waiting_reason
from kfp_ddp.local.folder import read_local_run
from kfp_ddp.models import bundle
from kfp_ddp.runs.trials import TrialRecord, Trials
from tests import run_output
from tests.commands import call, document, output, refused
from tests.files import write

KUBECONFIG = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
TRAIN = f"work/{run_output.RUN_ID}/train"
CAUSE = "error: rank 1: it broke; mend it"
STEP = Step("train", "train", "FAILED", pods=("wf-abc-1", "wf-abc-22"), driver="wf-abc-3")


def pod(name: str, node: str = "", **status: Any) -> dict[str, Any]:
    """Return a pod of the node with this id or name."""
    key = "workflows.argoproj.io/node-" + ("name" if "." in node else "id")
    return {"metadata": {"name": name, "annotations": {key: node}}, "status": status}


def terminated(reason: str) -> dict[str, Any]:
    return {"name": "main", "state": {"terminated": {"reason": reason}}}


def name_of(pod: dict[str, Any] | None) -> str:
    return str(pod["metadata"]["name"]) if pod else ""


def test_a_failed_run_has_a_step_a_cause_and_next_commands(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", error=CAUSE)
    described = document("describe", run)
    assert (described["state"], described["step"]) == ("FAILED", "train")
    assert described["cause"] == "rank 1: it broke; mend it"
    assert described["trainings"][0]["checkpoint"] == 40
    assert described["trainings"][0]["gpu_hours"] > 0
    assert "cost " in output("describe", run)
    assert described["next"][0] == f"kfp-ddp logs {run} train"
    assert described["next"][1] == "kfp-ddp run SOURCE --local …"
    assert output("logs", run, "train") == f"{CAUSE}\n"
    assert output("logs", run) == f"[train] {CAUSE}\n"
    assert "no step 'trian': it has preflight, data-sync, " in refused("logs", run, "trian")


def test_without_an_error_in_the_log_the_cause_is_that_of_the_ranks(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", error="Killed")
    for name, at, error in (("failure-a", 20.0, "later"), ("failure-b", 10.0, "out of memory")):
        record = Failure(1, 3, error, retryable=False, time=at)
        write(run / TRAIN / "logs" / f"{name}.json", record.to_json())
    assert document("describe", run)["cause"] == "out of memory"


def test_without_an_error_the_cause_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate", error="Segmentation fault")
    assert document("describe", run)["cause"] == "Segmentation fault"
    run = run_output.make(tmp_path / "hostile", failed="gate", error="error: \x1b[2Jcleared")
    assert "\\x1b[2Jcleared" in output("describe", run)


def test_a_run_without_an_end_is_unfinished(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    record = json.loads((run / "run.json").read_text())
    train = {**record["steps"][3], "state": "RUNNING", "end": 0.0}
    ended = {"steps": [*record["steps"][:3], train], "state": "", "end": 0.0}
    (run / "run.json").write_text(json.dumps({**record, **ended}))
    described = document("describe", run)
    assert [described[name] for name in ("state", "step", "ended")] == ["UNFINISHED", "train", None]


def test_a_successful_run_has_a_verdict_and_next_commands(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    task = run / TRAIN
    (task / "evaluation" / "verdict.json").write_text('{"blessed": true, "reason": "blessed: ok"}')
    (task / "exported.json").write_text('{"uri": "gs://models/abc", "champion": true}')
    text = output("describe", run)
    assert "run  SUCCEEDED" in text
    assert "gate        blessed: ok" in text
    assert "checkpoint  step 40 of train; val accuracy 90.0%" in text
    assert "bundle      gs://models/abc (champion)" in text
    assert "predict" not in text
    (run / "bundle").mkdir()
    text = output("describe", run)
    assert f"next        kfp-ddp predict {run} PICTURE" in text
    assert "cause" not in text
    for name in ("config.json", "metrics.jsonl", "checkpoints", "evaluation"):
        (task / name).rename(tmp_path / name)
    assert "checkpoint" not in output("describe", run)


def test_runs_of_this_folder_are_listed_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "none"))
    monkeypatch.delenv("KFP_DDP_HOST", raising=False)
    assert document("runs") == []
    below = run_output.make(tmp_path / "run-output" / "photos")
    (below.parent / "latest").symlink_to("photos")
    run_output.make(tmp_path / "broken", failed="train", error=CAUSE)
    summary = {"accuracy": 0.75, "blessed": False, "bundle": str(below / "bundle")}
    (below / "summary.json").write_text(json.dumps(summary))
    unfinished = Client().get_run(below)
    assert unfinished.summary == {}  # that of an earlier run in this folder
    record = read_local_run(below)
    assert record is not None
    record.replace(complete=True, start=2e9).write()
    assert [one["folder"] for one in document("runs")] == ["run-output/photos", "broken"]
    assert document("runs", "--local", "--state", "failed")[0]["name"] == "broken"
    first, second = output("runs").splitlines()[1:]
    assert "75.0%" in first
    assert "not blessed" in first
    assert "run-output/photos" in first
    assert "broken" in second
    run = Client().get_run(below)
    assert run.summary == summary
    assert run.metrics["accuracy"] == 0.9
    assert str(run.describe()).splitlines() == output("describe", below).splitlines()
    table = str(Client().compare(below)).split()
    assert table == output("compare", below).split()
    assert "KUBECONFIG" in refused("runs", "--experiment", "x")
    (tmp_path / "none").write_text("a: [")  # a kubeconfig that is wrong is not passed over
    assert "KUBECONFIG" in refused("runs")
    assert len(document("runs", "--local")) == 2
    (below / "summary.json").write_text('{"accuracy": "high", "blessed": []}')
    assert "high" not in output("runs", "--local")


def test_trials_of_a_sweep_are_ranked_and_compared(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    work = run / "work" / run_output.RUN_ID
    (work / "train").rename(work / "tune.0")
    for number in (1, 2):
        run_output.task(work / f"tune.{number}", (), 50, {"learning_rate": 0.1 * number})
    rows = [("tune.2", 1, 0.9), ("tune.0", 2, 0.8), ("tune.1", 0, None)]
    trials = [TrialRecord(task=task, rank=rank, accuracy=value) for task, rank, value in rows]
    (work / "tune").mkdir()
    Trials(trials=tuple(trials)).write(work / "tune")
    assert [one["rank"] for one in document("describe", run)["trials"]] == [1, 2, 0]
    lines = output("describe", run).splitlines()
    assert [line.split()[0] for line in lines if "%  " in line or "–" in line] == ["1", "2", "–"]
    assert sum(line.startswith("  checkpoint") for line in lines) == 1  # of the one evaluated
    compared = document("compare", run)
    assert [one["name"] for one in compared["runs"]] == [f"run/{task}" for task, *_ in rows]
    figures = compared["metrics"]["accuracy_in_training"]
    assert [figure and figure["value"] for figure in figures] == [0.9, 0.8, None]


def test_lines_of_kfp_and_argo_are_left_out(tmp_path: Path) -> None:
    executor = "    [KFP Executor 2026-11-22 07:12:21,481 INFO]: "
    lines = [f"{executor}Got executor_input:", "    {", '        "inputs": {', "        }", "    }"]
    lines += ["    hello", "    }", f"{executor}Wrote executor output file to x."]
    lines += ["    I1123 08:20:37.123456      12 launcher_v2.go:185] publish success."]
    lines += ['    time=2026-11-23T08:20:37.1Z level=INFO msg="sub-process exited" argo=true']
    launcher = "    I1127 19:04:57.730295      15 launcher_v2.go:1230] ExecutorOutput: "
    lines += [f"{launcher}{{", '      "parameterValues": {', '        "x": "}"', "      }", "    }"]
    lines += ["    {", '      "mine": 1', "    }", f"{launcher}{{", '      "cut": [', "    end"]
    run = run_output.make(tmp_path / "run", failed="gate", error="\n".join(lines))
    assert output("logs", run, "gate") == 'hello\n}\n{\n  "mine": 1\n}\nend\n'
    assert len(output("logs", run, "--all").splitlines()) == len(lines)


def test_the_newest_pod_of_a_step_is_found_by_its_node() -> None:
    nodes = {"other": "wf-xyz-22", "first": "wf-abc-1", "main": "wf-abc-22", "driver": "wf-abc-3"}
    items = [pod(name, node) for name, node in nodes.items()]
    assert name_of(pods.find_pod(items, STEP)) == "main"
    assert name_of(pods.find_pod(items, STEP, driver=True)) == "driver"
    assert pods.find_pod(items[:1], STEP) is None
    flat = Step("train", "train", "FAILED")
    group = "wf(0).root(0).exit-handler-1(0)"
    ends = ("train-driver(0)", "train(0).executor(0)", "train(0).executor(1)", "data-train(0).exec")
    items = [pod(end, f"{group}.{end}") for end in ends]
    assert name_of(pods.find_pod(items, flat)) == "train(0).executor(1)"
    assert name_of(pods.find_pod(items, flat, driver=True)) == "train-driver(0)"


@pytest.mark.parametrize(
    ("namespace", "multi_user", "used"),
    [("", False, "kubeflow"), ("", True, "of-the-context"), ("mine", False, "mine")],
)
def test_pods_of_a_single_user_kfp_are_in_its_own_namespace(
    monkeypatch: pytest.MonkeyPatch, namespace: str, multi_user: bool, used: str
) -> None:
    monkeypatch.setattr(run_info, "own_namespace", lambda context: "of-the-context")
    monkeypatch.setattr("kfp_ddp.k8s.api.Api.connect", lambda namespace, context: namespace)
    finder = run_info.RunFinder(Connection(namespace=namespace))
    vars(finder)["client"] = SimpleNamespace(multi_user=multi_user)
    assert str(finder.api()) == used


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"containerStatuses": [terminated("Completed"), terminated("OOMKilled")]},
            "out of memory (OOMKilled): give the step more memory",
        ),
        ({"reason": "Evicted", "message": "low on disk"}, "Evicted: low on disk"),
        ({"containerStatuses": [{"name": "main", "state": {}}]}, ""),
    ],
)
def test_the_reason_of_a_killed_pod(status: dict[str, Any], reason: str) -> None:
    assert pods.kill_reason(pod("p", phase="Failed", **status)) == reason


def test_a_pod_without_a_node_has_a_reason() -> None:
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    other = {"type": "Ready", "status": "False", "message": "not ready"}
    cases = [("Pending", [other, why]), ("Pending", [other]), ("Running", [why])]
    reasons = [waiting_reason(pod("p", phase=phase, conditions=met)) for phase, met in cases]
    assert [reason and reason.text for reason in reasons] == [
        *("cannot be scheduled (0/3 nodes are available)", "waiting for a node", None)
    ]


def test_only_settings_that_differ_are_compared(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", learning_rate=0.1, epochs=2, mixup=0.0, cutmix=0.5)
    two = run_output.make(tmp_path / "two", learning_rate=0.2, epochs=2, ema_decay=0.9)
    compared = document("compare", one, two)
    assert compared["settings"] == {
        "learning_rate": [0.1, 0.2],
        "ema_decay": [0.0, 0.9],  # an old run had the default
        "cutmix": [0.5, 0.0],
    }
    assert [run["letter"] for run in compared["runs"]] == ["A", "B"]
    assert setting_text(packed.pack(b"pass")) == "a file of 4 bytes, sha256 d74ff0ee8da3"


def test_accuracies_have_intervals_and_notes(tmp_path: Path) -> None:
    sides = [run_output.make(tmp_path / str(n), correct=n) for n in (90, 93, 60)]
    compared = document("compare", *sides)
    first = compared["metrics"]["accuracy"][0]
    assert first["value"] == 0.9
    assert 0.82 < first["low"] < 0.9 < first["high"] < 0.95
    assert compared["notes"] == ["A and B: the intervals of their accuracies overlap"]
    other = run_output.evaluation(90, samples_digest="other").model_dump_json()
    (sides[1] / TRAIN / "evaluation/evaluation.json").write_text(other)
    assert document("compare", *sides[:2])["notes"] == [
        "A and B are evaluated on other samples: their metrics cannot be compared"
    ]


def test_the_time_between_two_starts_is_not_training_time(tmp_path: Path) -> None:
    folder = run_output.make(tmp_path / "one")
    file = folder / TRAIN / "metrics.jsonl"
    again = [{"event": "start", "time": 9000.0}, {"event": "end", "time": 9005.0}]
    file.write_text(file.read_text() + "".join(json.dumps(e) + "\n" for e in again))
    metrics = document("compare", folder)["metrics"]
    assert metrics["training_seconds"][0]["value"] == 25
    assert metrics["images_per_s"][0]["value"] == 100


def test_runs_without_a_training_or_an_evaluation_are_compared(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", correct=90)
    two = run_output.make(tmp_path / "two", failed="evaluate")
    three = run_output.make(tmp_path / "three", correct=70)
    for name in ("config.json", "metrics.jsonl"):
        (three / TRAIN / name).unlink()
    compared = document("compare", one, two, three)
    accuracy = [figure and figure["value"] for figure in compared["metrics"]["accuracy"]]
    assert accuracy == [0.9, None, 0.7]
    assert compared["metrics"]["ranks"][2] is None
    assert "B: not evaluated" in compared["notes"]
    assert [run["state"] for run in compared["runs"]] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]


def test_each_training_of_a_run_has_a_column(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", epochs=2)
    run_output.task(one / f"{TRAIN}.2", (), 50, {"epochs": 3})
    compared = document("compare", one)
    assert [run["name"] for run in compared["runs"]] == ["one/train", "one/train.2"]
    assert compared["settings"]["epochs"] == [2, 3]


@pytest.mark.parametrize(("count", "tables"), [(2, 1), (5, 1), (6, 2)])
def test_table_fits_in_80_columns_and_marks_the_best(
    count: int, tables: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "console", lambda: Console(highlight=False, width=80))
    correct = (60, 80, 95, 70, 90, 85)[:count]
    sides = [
        run_output.make(tmp_path / f"run[{n}]", correct=n, epochs=n, mixup=0.25) for n in correct
    ]
    table = output("compare", *sides)
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    rows: dict[str, list[str]] = {}
    for line in lines:
        name, *cells = re.split(r" {2,}", line.strip())
        rows[name] = rows.get(name, []) + cells
    best = max(correct)
    assert rows["accuracy"] == [f"{n}.0% *" if n == best else f"{n}.0%" for n in correct]
    assert rows["95 % interval"][:2] == ["50.2–69.1%", "71.1–86.7%"]
    assert rows["epochs"] == list(map(str, correct))
    assert "mixup" not in rows
    assert sum(line.startswith("accuracy") for line in lines) == tables


def test_figures_of_other_samples_have_no_best(tmp_path: Path) -> None:
    sides = [run_output.make(tmp_path / str(n), correct=n) for n in (90, 60)]
    assert "90.0% *" in output("compare", *sides)
    other = run_output.evaluation(90, samples_digest="other").model_dump_json()
    (sides[0] / TRAIN / "evaluation/evaluation.json").write_text(other)
    table = output("compare", *sides)
    assert "90.0%" in table
    assert "*" not in table


def test_invalid_input_is_an_error_of_one_line(tmp_path: Path) -> None:
    early = run_output.make(tmp_path / "early", failed="data-sync")
    (tmp_path / "empty").mkdir()
    messages = {
        (str(early),): "early has no training to compare: see kfp-ddp describe",
        (str(tmp_path / "empty"),): "contains no run: ",
        (str(tmp_path / "gone"),): "not found: give one of run --local",
    }
    for words, message in messages.items():
        assert message in str(call("compare", *words).exception)
    for command in ("cancel", "retry"):
        assert "is not a run of KFP: Ctrl-C" in str(call(command, str(early)).exception)


@pytest.mark.parametrize(
    "torn", ["[" * 200_000 + "\n", '{"event": "st', "[1]\n", '{"event": "step", "step": 3}\n']
)
def test_invalid_events_are_ignored(tmp_path: Path, torn: str) -> None:
    one = run_output.make(tmp_path / "one")
    metrics = one / TRAIN / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + torn)
    assert document("compare", one)["metrics"]["step"][0]["value"] == 40


def test_a_run_is_downloaded_with_bundle_and_reports(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    target = tmp_path / "deep" / "here"
    (task,) = document("download", run, "-o", target)["tasks"]
    assert task["bundle"] == str(target / "bundle")
    assert bundle.version(target / "bundle") == bundle.version(run / TRAIN / "bundle") != ""
    assert (target / "evaluation/report.html").read_text() == "<p>report</p>"
    assert "<svg" in (target / "loss_curve.html").read_text()
    assert sha256(target / "metrics.jsonl") == sha256(run / TRAIN / "metrics.jsonl")
    assert task["checkpoint"] is None
    assert not (target / "checkpoints").exists()


def test_the_newest_checkpoint_is_downloaded_on_request(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    checkpoints = run / TRAIN / "checkpoints"
    for name in ("step-99999999", "step-100000000"):
        shutil.copytree(checkpoints / "step-00000040", checkpoints / name)
    download(StoredFiles(str(run / "work" / run_output.RUN_ID)), tmp_path / "x", checkpoint=True)
    names = [path.name for path in (tmp_path / "x" / "checkpoints").iterdir()]
    assert names == ["step-100000000"]
    assert (tmp_path / "x/checkpoints/step-100000000/state.pt").read_bytes() == b"state 40"


def test_each_task_has_a_folder(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    shutil.copytree(run / TRAIN, run / f"{TRAIN}.2")
    output("download", run, "-o", tmp_path / "to")
    assert (tmp_path / "to/train/bundle/_SUCCESS").exists()
    assert (tmp_path / "to/train.2/bundle/_SUCCESS").exists()


def test_a_damaged_bundle_leaves_no_files(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    (run / TRAIN / "bundle" / "model.onnx").write_bytes(b"damaged")
    answer = call("download", run, "-o", tmp_path / "to" / "it")
    assert isinstance(answer.exception, StorageError)
    assert "is damaged" in str(answer.exception)
    assert list((tmp_path / "to").iterdir()) == []


def test_a_run_without_a_bundle_is_downloaded(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    text = output("download", run, "-o", tmp_path / "to")
    assert "no bundle: the run exported none" in text
    assert "predict" not in text


@pytest.mark.parametrize(
    ("word", "target", "line"),
    [("run", "taken", "already exists"), ("early", "to", "there are no results")],
)
def test_invalid_input_writes_nothing(tmp_path: Path, word: str, target: str, line: str) -> None:
    run_output.make(tmp_path / "run")
    run_output.make(tmp_path / "early", failed="preflight")
    write(tmp_path / "taken" / "mine", "mine")
    before = sorted(tmp_path.rglob("*"))
    assert line in refused("download", tmp_path / word, "-o", tmp_path / target)
    assert sorted(tmp_path.rglob("*")) == before
