"""Trainings that are interrupted, restored and resumed."""

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.training.prepare import resolve
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import step_dir
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.checkpoint import Writer, verify
from kfp_ddp.training.state.learner import Learner
from kfp_ddp.training.trainer import Trainer
from tests.tolerance import assert_trained_alike
from tests.training_ranks import (
    ALONE,
    Ranks,
    config,
    dataset,
    newest,
    output_of,
    state_hash,
    train_until_killed,
    trainer,
)


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = config(data, tmp_path_factory.mktemp("resume") / "whole", checkpoint_steps=3)
    output_of(run, 2)
    return state_hash(run)


def _interrupt_and_resume(data: Path, output: Path, number: int) -> str:
    """Kill one rank or all by a signal of chance, up to three times, then let the run end."""
    draw = random.Random(number)
    run = config(data, output, checkpoint_steps=3, log_steps=1)
    for _ in range(draw.randint(1, 3)):
        ranks = Ranks(run, 2)
        if draw.random() < 0.8:  # the others while they start
            ranks.wait_for_steps(draw.randint(1, 5))
        time.sleep(draw.uniform(0.0, 0.01))
        how = draw.choice((signal.SIGTERM, signal.SIGKILL))
        victims = draw.choice(((0,), (1,), (0, 1)))
        for victim in victims:
            ranks.kill(victim, how)
        codes = ranks.wait()
        if not any(codes):  # the run had ended
            return state_hash(run)
        assert all(codes[victim] for victim in victims), ranks.output()
        if how == signal.SIGTERM:
            # Before the handler is in place a rank dies of the signal, and its peer of the loss.
            assert set(codes) <= {0, 143, -signal.SIGTERM, 1}, ranks.output()
    output_of(run, 2)
    return state_hash(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_killed_at_any_instant(number: int, data: Path, uninterrupted: str, tmp_path: Path) -> None:
    assert _interrupt_and_resume(data, tmp_path / "run", number) == uninterrupted


@pytest.mark.soak
@pytest.mark.parametrize("number", range(100, 200))
def test_killed_in_the_soak(number: int, data: Path, uninterrupted: str, tmp_path: Path) -> None:
    assert _interrupt_and_resume(data, tmp_path / "run", number) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("point", ["torch.save", "os.replace"])
def test_killed_inside_a_save(point: str, data: Path, uninterrupted: str, tmp_path: Path) -> None:
    run = config(data, tmp_path / "run", checkpoint_steps=3)
    train_until_killed(run, 2, point)
    last = newest(tmp_path / "run")
    assert last.step == 3
    output_of(run, 2)
    assert state_hash(run) == uninterrupted


@pytest.mark.slow
def test_other_world_sizes_see_the_same_batches(data: Path, tmp_path: Path) -> None:
    """2 ranks, then 4: the weights differ from those of 1 by the order of float sums only."""
    whole = config(data, tmp_path / "whole", micro_batch_size=2, epochs=2, checkpoint_steps=4)
    output_of(whole, 1)
    parts = config(data, tmp_path / "parts", micro_batch_size=2, epochs=2, checkpoint_steps=4)
    train_until_killed(parts, 2, "torch.save")
    output_of(parts, 4)
    one, other = (
        checkpoint.load_model(tmp_path / name / "checkpoints" / "step-00000024")[0]
        for name in ("whole", "parts")
    )
    assert_trained_alike(other.state_dict(), one.state_dict())


def test_run_resumes_without_its_initial_weights(photos: Path, tmp_path: Path) -> None:
    """Their run may have been removed meanwhile; the network is the one that they named."""
    fit(photos, tmp_path / "first", ema_decay=0)
    shutil.copytree(newest(tmp_path / "first").path, tmp_path / "weights")
    unnamed = config(photos, tmp_path / "run", epochs=1, warmup_epochs=0).explicit()
    unnamed.update(pretrained=str(tmp_path / "weights"), deterministic=False)
    del unnamed["model"]
    assert trainer(TrainConfig.create(**unnamed)).fit()
    shutil.rmtree(tmp_path / "weights")
    assert trainer(TrainConfig.create(**{**unnamed, "epochs": 2})).fit()
    assert newest(tmp_path / "run").step == 4
    with pytest.raises(InputError, match="weights is missing"):
        trainer(TrainConfig.create(**{**unnamed, "resume": "never"}))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return dataset(tmp_path / "data", train=16, val=4, classes=2)


def fit(photos: Path, output: Path, **fields: Any) -> None:
    settings = {"epochs": 1, "warmup_epochs": 0, "deterministic": False, **fields}
    assert trainer(config(photos, output, **settings)).fit()


def resumed(photos: Path, output: Path, **fields: Any) -> Trainer:
    """A run that has restored its checkpoint."""
    loop = trainer(config(photos, output, deterministic=False, **fields))
    try:
        assert loop.saving.resume() == 2
    finally:
        loop.report.metrics.close()
    return loop


def groups(photos: Path, output: Path, **fields: Any) -> list[dict[str, Any]]:
    return resumed(photos, output, **fields).learner.optimizer.param_groups


def test_decay_and_momentum_are_those_of_the_configuration(photos: Path, tmp_path: Path) -> None:
    fit(photos, tmp_path / "run", weight_decay=0.5, momentum=0.8)
    decayed, plain = groups(photos, tmp_path / "run")
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert [group["momentum"] for group in (decayed, plain)] == [0.8] * 2
    resolved = resolve(config(photos, tmp_path / "run", deterministic=False), ALONE, 16)
    assert (resolved.weight_decay, resolved.momentum) == (0.5, 0.8)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["weight_decay"], written["momentum"]) == (0.5, 0.8)
    more = {"weight_decay": 0.25, "momentum": 0.0}
    decayed, plain = groups(photos, tmp_path / "run", **more)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    states = [(group["momentum"], group["nesterov"]) for group in (decayed, plain)]
    assert states == [(0, False)] * 2
    assert trainer(config(photos, tmp_path / "run", deterministic=False, **more)).fit()


def test_copy_is_of_its_step(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's forward pass continues meanwhile, and its update waits."""
    fill, backward, states = Writer._fill_later, Learner.backward, []
    passed = threading.Event()

    def noted(learner: Learner, loss: torch.Tensor) -> None:
        backward(learner, loss)
        passed.set()

    def late(writer: Writer) -> None:
        assert writer._later
        passed.clear()
        passed.wait(1)  # there is no other pass after the last save
        time.sleep(0.3)
        fill(writer)

    monkeypatch.setattr(Learner, "backward", noted)
    for name, how in (("at once", fill), ("late", late)):
        monkeypatch.setattr(Writer, "_fill_later", how)
        output = tmp_path / name
        fit(photos, output, checkpoint_steps=1, keep_checkpoints=9, ema_decay=0.9)
        states.append(verify(step_dir(output / "checkpoints", 1)).state())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def _other_name(photos: Path) -> None:
    image = next((photos / "train" / "class1").iterdir())
    image.rename(image.with_name("another.png"))


def _other_size(photos: Path) -> None:
    image = next((photos / "train" / "class1").iterdir())
    image.write_bytes(image.read_bytes() + b"more")


@pytest.mark.parametrize("change", [_other_name, _other_size])
def test_images_are_the_same(photos: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    fit(photos, tmp_path / "run")
    photos = photos.rename(tmp_path / "moved")  # the folder may change
    groups(photos, tmp_path / "run")
    change(photos)
    with pytest.raises(InputError, match="paths and sizes of the training images") as caught:
        groups(photos, tmp_path / "run")
    assert "resume=never" in str(caught.value)


def test_run_does_not_resume_with_other_images_of_equal_size(photos: Path, tmp_path: Path) -> None:
    """A version records the checksum of each file."""
    first, *_, second = sorted((photos / "train").rglob("*.png"))
    second.write_bytes(first.read_bytes())
    version = sync(str(photos), tmp_path / "claim", SyncOptions()).path
    fit(version, tmp_path / "run")
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    changed = sync(str(photos), tmp_path / "claim", SyncOptions()).path
    assert changed != version
    groups(version, tmp_path / "run")
    with pytest.raises(InputError, match="contents of the training images"):
        groups(changed, tmp_path / "run")


def test_best_accuracy_starts_again_with_other_validation_images(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(photos, tmp_path / "run", keep_best=True)
    assert resumed(photos, tmp_path / "run").saving.best is not None
    image = next((photos / "val" / "class1").iterdir())
    image.write_bytes(image.read_bytes() + b"more")
    loop = resumed(photos, tmp_path / "run")
    assert loop.saving.best is None
    assert "the validation images changed" in capsys.readouterr().out


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_averages_resume_or_start_anew(photos: Path, tmp_path: Path, decay: float) -> None:
    output = tmp_path / "run"
    fit(photos, output, ema_decay=decay)
    state = newest(output).state()
    average = state["ema"] if decay else state["model"]
    if decay:
        assert not torch.equal(average["fc.weight"], state["model"]["fc.weight"])
        statistics = [name for name in state["model"] if "running" in name]
        assert statistics
        assert all(torch.equal(average[name], state["model"][name]) for name in statistics)
        assert same(checkpoint.load_model(newest(output).path)[0].state_dict(), average)
    learner = resumed(photos, output, ema_decay=0.9).learner
    assert learner.ema is not None
    assert same(learner.ema.model.state_dict(), average)
    assert same(learner.network.state_dict(), state["model"])


def test_loop_saves_nothing_after_a_loss_that_is_not_finite(photos: Path, tmp_path: Path) -> None:
    loop = trainer(config(photos, tmp_path / "run", deterministic=False))
    loop.step = 1
    loop.divergence.first_bad_step.fill_(0)
    with pytest.raises(JobError, match="NaN or infinite at step 0"):
        loop._finish("preempted")
    loop.report.metrics.close()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []
