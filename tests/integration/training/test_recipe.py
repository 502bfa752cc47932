"""Features of the loop: each resumes to the bit, and does what its source describes."""

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kfp_ddp.runs.record import chosen_checkpoint
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import step_of
from kfp_ddp.training.spec.time_spent import cost_of
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.saving import Best
from kfp_ddp.training.trainer import Validation
from tests.training_ranks import config, dataset, events, newest, state_hash, trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 8 images an epoch."""
    return dataset(tmp_path_factory.mktemp("recipe") / "data", train=16, val=4)


def run(data: Path, output: Path, **fields: Any) -> TrainConfig:
    return config(data, output, **{"deterministic": False, "ema_decay": 0.0, **fields})


def stop_after(run: TrainConfig, step: int, patch: pytest.MonkeyPatch) -> None:
    """Train, and ask for a stop in `step`."""
    loop = trainer(run)
    post = loop.stop.post

    def ask(**requests: bool) -> None:
        if loop.step == step - 1:
            loop.stop.ask("the test")
        post(**requests)

    patch.setattr(loop.stop, "post", ask)
    assert not loop.fit()
    assert loop.step == step


FEATURES: dict[str, dict[str, Any]] = {
    "mixed": {"mixup": 0.4, "cutmix": 1.0},
    "fp16": {"precision": "fp16", "clip_norm": 1.0},
    "frozen": {"freeze_epochs": 1, "body_lr_factor": 0.1, "micro_batch_size": 4},
    "frozen-adamw": {"freeze_epochs": 2, "optimizer": "adamw", "test_time_flip": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_interrupted_run_ends_with_the_same_bits(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an epoch, at its end, and where the body begins to learn."""
    complete = run(data, tmp_path / "complete", **FEATURES[name])
    assert trainer(complete).fit()
    parts = run(data, tmp_path / "parts", **FEATURES[name])
    for step in (2, 3):
        stop_after(parts, step, monkeypatch)
    assert trainer(parts).fit()
    assert state_hash(parts) == state_hash(complete)


@pytest.mark.parametrize("epochs", [3, 1])
def test_frozen_body_keeps_its_statistics(data: Path, tmp_path: Path, epochs: int) -> None:
    """Then it learns more slowly than the classifier."""
    fields = {"freeze_epochs": epochs, "weight_decay": 0.1, "body_lr_factor": 0.25}
    loop = trainer(run(data, tmp_path / "run", **fields))
    before = {name: value.clone() for name, value in loop.learner.network.state_dict().items()}
    assert loop.fit()
    after: dict[str, Tensor] = loop.learner.network.state_dict()
    same = {name for name, value in before.items() if torch.equal(after[name], value)}
    body = {name for name in before if not name.startswith("fc.")}
    assert same == (body if epochs == 3 else set())
    rates = {group["lr"] for group in loop.learner.optimizer.param_groups}
    assert min(rates) == pytest.approx(max(rates) * 0.25)


def _accuracies(
    patch: pytest.MonkeyPatch, *accuracies: float, losses: Iterable[float] = ()
) -> None:
    """Set the results of evaluations, which chance decides with few images."""
    values, given = iter(accuracies), iter(losses)
    patch.setattr(
        Validation,
        "measure",
        lambda *_: {"loss": next(given, 1.0), "accuracy": next(values), "top5": 1.0},
    )


def test_a_stop_at_an_epoch_keeps_the_schedule_of_all(data: Path, tmp_path: Path) -> None:
    complete = run(data, tmp_path / "complete", **FEATURES["frozen"], epochs=3, eval_epochs=3)
    assert trainer(complete).fit()
    for stop in (1, 2, 2, 3):
        fields = {"epochs": 3, "eval_epochs": 3, "stop_epochs": stop, "checkpoint_epochs": 0}
        parts = run(data, tmp_path / "parts", **FEATURES["frozen"], **fields)
        loop = trainer(parts)
        assert loop.fit()
        assert (loop.step, newest(tmp_path / "parts").step) == (2 * stop, 2 * stop)
    ends = [event["reason"] for event in events(tmp_path / "parts") if event["event"] == "end"]
    assert ends == ["stop_epochs=1", "stop_epochs=2", "stop_epochs=2", ""]
    assert state_hash(parts) == state_hash(complete)


def test_early_stopping_counts_from_the_best_evaluation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated after epochs 2, 4 and 6: the first is the best, which is 4 epochs ago after 6."""
    _accuracies(monkeypatch, 0.5, 0.4, 0.5, 0.9)
    fields = {"epochs": 8, "eval_epochs": 2}
    patient = run(data, tmp_path / "run", **fields, early_stop_epochs=3)
    stop_after(patient, 11, monkeypatch)  # in epoch 6, three after the best, but not evaluated
    for _ in range(2):
        loop = trainer(patient)
        assert loop.fit()
        assert loop.step == 12
        assert newest(tmp_path / "run").step == 12
    longer = trainer(run(data, tmp_path / "run", **fields, early_stop_epochs=5))
    assert longer.fit()
    assert longer.step == 16


def test_a_training_ends_cleanly_when_its_gpu_hours_are_over(data: Path, tmp_path: Path) -> None:
    """Within an epoch, evaluated and saved; a retry does not train, a higher limit does."""
    spent = run(data, tmp_path / "run", epochs=4, max_gpu_hours=1e-9)
    for _ in range(2):
        loop = trainer(spent)
        assert loop.fit()
        assert newest(tmp_path / "run").step == loop.step == 1
    assert newest(tmp_path / "run").fields["metrics"].keys() == {"loss", "accuracy", "top5"}
    (first, again) = events(tmp_path / "run", "end")
    assert (first["status"], "max_gpu_hours" in first["reason"]) == ("done", True)
    hours = cost_of(events(tmp_path / "run"), {}).gpu_hours
    assert 0 < hours < (again["time"] - events(tmp_path / "run", "start")[0]["time"] + 60) / 3600
    more = trainer(run(data, tmp_path / "run", epochs=4, max_gpu_hours=hours + 1))
    assert more.fit()
    assert more.step == 8


def _result(run_dir: Path) -> int:
    chosen = chosen_checkpoint(run_dir)
    assert chosen is not None
    return chosen.step


def test_best_is_the_result(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _accuracies(monkeypatch, 0.5, 0.9, 0.6, 0.9, 0.8, 0.7)
    keeps = run(data, tmp_path / "run", epochs=6, keep_best=True, checkpoint_epochs=0)
    stop_after(keeps, 9, monkeypatch)
    assert trainer(keeps).fit()
    directory = tmp_path / "run" / "checkpoints"
    assert [step_of(path) for path in checkpoint.steps(directory)] == [12, 9, 4]
    best = checkpoint.verify(directory / "step-00000004")
    assert best.fields["metrics"]["accuracy"] == 0.9
    assert _result(tmp_path / "run") == 4
    shutil.rmtree(best.path)
    assert _result(tmp_path / "run") == 12
    _accuracies(monkeypatch, 0.9, 0.5)
    assert trainer(run(data, tmp_path / "newest", epochs=2)).fit()
    assert _result(tmp_path / "newest") == 4


def test_lowest_loss_is_best(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = (math.nan, 0.9, 0.5, math.nan, 0.7)
    _accuracies(monkeypatch, 1.0, 0.9, 0.9, 1.0, 0.9, losses=losses)
    ties = run(data, tmp_path / "run", epochs=9, keep_best=True, early_stop_epochs=2)
    assert trainer(ties).fit()
    assert (_result(tmp_path / "run"), newest(tmp_path / "run").step) == (6, 10)
    kinds = [event["event"] for event in events(tmp_path / "run")]
    assert kinds[-3:] == ["checkpoint", "ranks", "end"]
    assert Best(step=4, epoch=2, accuracy=0.9, waited=0).loss == 0, "of an earlier version"


def test_overflowing_gradients_only_change_the_loss_scale(data: Path, tmp_path: Path) -> None:
    loop = trainer(run(data, tmp_path / "run", precision="fp16", clip_norm=1.0))
    loop.report.metrics.close()
    learner = loop.learner
    weights = [weight.detach().clone() for weight in learner.network.parameters()]
    for factor in (1e38, 1.0):
        learner.backward(learner.network(torch.randn(4, 3, 8, 8)).sum() * factor)
        learner.update(0)
        changed = [
            not torch.equal(before, after)
            for before, after in zip(weights, learner.network.parameters(), strict=True)
        ]
        assert any(changed) == (factor == 1)
        assert learner.scaler.get_scale() == 2.0**15
    other = trainer(run(data, tmp_path / "other", precision="fp16"))
    other.report.metrics.close()
    other.learner.restore(learner.state())
    assert other.learner.scaler.get_scale() == 2.0**15
