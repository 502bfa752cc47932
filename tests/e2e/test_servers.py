"""Real servers without a cluster: alerts and dashboard in Prometheus, a training in MLflow."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import requests
import yaml

from kfp_ddp.core.run_folder import MLFLOW
from kfp_ddp.training.report.trackers import MlflowRun
from tests.serving import free_port
from tests.stores import mlflow, prometheus, prometheus_program
from tests.training_ranks import Ranks, config, dataset, events, output_of
from tests.waiting import until

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
ON_A_GPU = {"kfp_ddp_step_memory_gb", "kfp_ddp_step_mfu"}
LABEL = "kfp_ddp_run_id"
# Values of a minute each, of a run that is well and of one that is not, by alert.
SERIES = {
    "TrainingStandsStill": ("kfp_ddp_step_step", "0+9x80", "0+9x20 180x60"),
    "TrainingDiverges": ("kfp_ddp_step_loss", "1x10 3x70", "1x10 4x70"),
    "TrainingWaitsForData": ("kfp_ddp_step_data_wait_fraction", "0.3x80", "0.4x80"),
    "TrainingHasASlowRank": ("kfp_ddp_step_slowest_ratio", "1.3x80", "1.4x80"),
    "TrainingSkipsImages": ("kfp_ddp_step_skipped_images", "100x80", "101x80"),
    "CheckpointsAreSlow": ("kfp_ddp_checkpoint_seconds", "60x80", "61x80"),
    "TrainingJobsFail": ("training_operator_jobs_failed_total", "1x20 2x60", "1x20 4x60"),
}


def rules_of(name: str, folder: Path) -> Path:
    """The alerts of a file, as the operator gives them to Prometheus."""
    manifest = yaml.safe_load((MONITORING / "alerts" / name).read_text())
    (folder / "rules.yaml").write_text(json.dumps(manifest["spec"]))
    return folder / "rules.yaml"


def check(
    rules: Path, by: str, firing: set[tuple[str, str]], series: dict[str, str], step: str, at: str
) -> None:
    """Check which alerts fire, by a label, at a time of series that have a value each step."""
    samples = [
        {"labels": f"{{alertname='{alert}', {by}='{name}'}}", "value": 1} for alert, name in firing
    ]
    expected = {
        "expr": f"count by (alertname, {by}) (ALERTS{{alertstate='firing'}})",
        "eval_time": at,
        "exp_samples": samples,
    }
    listed = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": step, "input_series": listed, "promql_expr_test": [expected]}
    test = rules.with_name("test.yaml")
    test.write_text(json.dumps({"rule_files": [str(rules)], "tests": [case]}))
    promtool = prometheus_program("promtool")
    subprocess.run([promtool, "check", "rules", rules], check=True)
    subprocess.run([promtool, "test", "rules", test], check=True)


@pytest.mark.slow
def test_each_alert_fires_for_the_runs_that_it_is_about(tmp_path: Path) -> None:
    series = {}
    for metric, good, bad in SERIES.values():
        ended = f"{bad} stale".replace("x60", "x10").replace("x70", "x20").replace("x80", "x30")
        for name, values in (("good", good), ("bad", bad), ("ended", ended)):
            series[f"{metric}{{run='{name}'}}"] = values
    firing = {(alert, "bad") for alert in SERIES}
    firing.add(("TrainingJobsFail", "ended"))  # the operator counts what failed before
    rules = rules_of("prometheusrule.yaml", tmp_path)
    check(rules, "run", firing, series, "1m", "55m")


@pytest.mark.slow
def test_nights_without_a_run_or_a_model_are_reported(tmp_path: Path) -> None:
    """Of four namespaces: all is well, no model, no run, and one installed yesterday."""
    installed = 'kube_poddisruptionbudget_created{poddisruptionbudget="kfp-ddp",namespace="%s"}'
    hours = 24 * 4
    since = {"well": 0, "none": 0, "stopped": 0, "new": 80 * 3600}
    series = {installed % name: f"{at}x{hours * 12}" for name, at in since.items()}
    # A pod remains for an hour: of the first night in `stopped`, of the last in the others.
    night = {"stopped": 2, "well": 90, "none": 90}
    for name, hour in night.items():
        values = f"_x{hour * 12} 1x12 _x{(hours - hour) * 12}"
        for step in ("preflight", "publish")[: 1 + (name != "none")]:
            pod = f'namespace="{name}",pod="{step}"'
            series[f'kube_pod_labels{{{pod},label_kfp_ddp_step="{step}"}}'] = values
            series[f'kube_pod_status_phase{{{pod},phase="Succeeded"}}'] = values
    firing = {("NoBlessedModel", "none"), ("NoBlessedModel", "stopped")}
    firing.add(("ScheduleDidNotFire", "stopped"))
    rules = rules_of("nightlyrule.yaml", tmp_path)
    check(rules, "namespace", firing, series, "5m", f"{hours}h")


@pytest.mark.slow
def test_each_query_has_series_of_two_trainings_of_a_run(tmp_path: Path) -> None:
    port, rules = free_port(), rules_of("prometheusrule.yaml", tmp_path)
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {LABEL: "1f0c", "kfp_ddp_task": task}}
        for task in ("train", "train-2")
    ]
    scrape = {"job_name": "runs", "scrape_interval": "500ms", "static_configs": targets}
    settings = {"global": {"evaluation_interval": "500ms"}, "scrape_configs": [scrape]}
    file = tmp_path / "prometheus.yaml"
    file.write_text(json.dumps({**settings, "rule_files": [str(rules)]}))
    board = json.loads((MONITORING / "dashboard" / "trainings.json").read_text())
    queries = {target["expr"] for panel in board["panels"] for target in panel["targets"]}
    assert len(queries) > 15
    queries |= set(re.findall(r"kfp_ddp_\w+", rules.read_text())) - {LABEL}
    served = {"epochs": 10_000, "log_steps": 1, "prometheus_port": port}
    run = config(dataset(tmp_path / "data"), tmp_path / "run", **served)
    ranks = Ranks(run, 2)
    try:
        with prometheus(file) as url:

            def series(query: str) -> int:
                answer = requests.get(f"{url}/api/v1/query", {"query": query}).json()
                return len(answer["data"]["result"])

            until(lambda: series("kfp_ddp_checkpoint_seconds") == 2, ranks.output)
            for query in queries:
                expected = 0 if ON_A_GPU & set(re.findall(r"\w+", query)) else 2
                assert series(re.sub(r"\$\w+", ".*", query)) == expected, query
            (group,) = requests.get(f"{url}/api/v1/rules").json()["data"]["groups"]
            assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(SERIES)
    finally:
        ranks.kill(0, signal.SIGTERM)
        ranks.wait()


@pytest.mark.slow
def test_mlflow_server_gets_each_event_of_a_stopped_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    login = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "a long password"}
    with mlflow(tmp_path, login["MLFLOW_TRACKING_PASSWORD"]) as url:
        uri = {"mlflow_uri": url, "mlflow_experiment": "flowers", "log_steps": 1}
        data = dataset(tmp_path / "data")
        run = config(data, tmp_path / "run", run_id="1f0c/train", **uri)
        Path(run.output_dir).mkdir()
        with pytest.raises(Exception, match="401"):
            MlflowRun(run)
        for name, value in login.items():
            monkeypatch.setenv(name, value)
        before = MlflowRun(run)
        Path(run.output_dir, MLFLOW).unlink()
        stopped = Ranks(run, 2, env=login)
        stopped.wait_for_steps(2)
        stopped.kill(0, signal.SIGTERM)
        stopped.wait()
        output_of(run, 2, env=login)
        server = MlflowClient(url)
        (experiment,) = server.search_experiments(filter_string="name = 'flowers'")
        (tracked,) = server.search_runs([experiment.experiment_id])
        for event, field in (("step", "loss"), ("eval", "accuracy")):
            written = events(tmp_path / "run", event)
            history = server.get_metric_history(tracked.info.run_id, f"{event}/{field}")
            assert [(point.step, point.value) for point in history] == [
                (one["step"], one[field]) for one in written
            ]
        # In a run that KFP's plugin made, which the step has recorded.
        given = server.create_run(experiment.experiment_id).info
        of_kfp = config(data, tmp_path / "of_kfp", log_steps=1)
        record = {"uri": url, "run_id": given.run_id, "is_ours": False}
        Path(of_kfp.output_dir).mkdir()
        Path(of_kfp.output_dir, MLFLOW).write_text(json.dumps(record))
        output_of(of_kfp, 2, env=login)
        history = server.get_metric_history(given.run_id, "step/loss")
        assert [point.value for point in history] == [
            one["loss"] for one in events(tmp_path / "of_kfp", "step")
        ]
        assert server.get_run(given.run_id).info.status == "RUNNING"
        assert len(server.search_runs([experiment.experiment_id])) == 2
    assert (tracked.info.run_id, tracked.info.status) == (before.run_id, "FINISHED")
    assert tracked.data.params["batch_size"] == "8"
    assert tracked.data.tags["kfp_ddp.world_size"] == "2"
    assert int(tracked.data.tags["kfp_ddp.resumed_from_step"]) > 2
