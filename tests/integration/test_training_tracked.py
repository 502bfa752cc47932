"""A run at MLflow, over a training that is killed and goes on, and the steps after it."""

from pathlib import Path
from typing import Any

import pytest

from tests.training_ranks import config, dataset, train, train_until_killed

FILE_STORE = ("MLFLOW_ALLOW_FILE_STORE", "true")


def tracked(store: Path) -> list[Any]:
    """The runs of the experiment, with their client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{store}")
    experiment = client.get_experiment_by_name("flowers")
    assert experiment is not None
    return [client, *client.search_runs([experiment.experiment_id])]


@pytest.mark.slow
def test_killed_training_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*FILE_STORE)
    env = dict([FILE_STORE])  # ranks have the environment of the server that forks them
    data, store = dataset(tmp_path / "data", train=24, val=6), tmp_path / "mlflow"
    settings = {"mlflow_uri": f"file://{store}", "mlflow_experiment": "flowers", "log_steps": 1}
    run = config(data, tmp_path / "run", run_id="1f0c/train", **settings)
    train_until_killed(run, 1, "torch.save", env=env)
    assert train(run, 1, env=env) == [0]
    client, found = tracked(store)
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "step/loss")
    assert {each.step for each in history} == set(range(1, 10))
    assert [m.step for m in client.get_metric_history(found.info.run_id, "eval/accuracy")][-1] == 9
    assert found.data.params["batch_size"] == "8"
