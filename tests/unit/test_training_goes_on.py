"""What a run that goes on takes from its checkpoint, and what from its configuration."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.training import checkpoint, resume
from kfp_ddp.training.checkpoint import Writer, newest_valid, verify
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.learner import Learner
from kfp_ddp.training.manifest import MANIFEST, step_dir
from kfp_ddp.training.prepare import prepare, resolve
from kfp_ddp.training.trainer import Trainer
from tests.training_ranks import config, dataset

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return dataset(tmp_path / "data", train=16, val=4, classes=2)


def trainer(run: TrainConfig) -> Trainer:
    resolved, train, val = prepare(run, ALONE)
    return Trainer(resolved, ALONE, train, val)


def trained(data: Path, output: Path, **fields: Any) -> None:
    settings = {"epochs": 1, "warmup_epochs": 0, "deterministic": False, **fields}
    assert trainer(config(data, output, **settings)).fit()


def groups(run: TrainConfig) -> list[dict[str, Any]]:
    """The optimizer's settings once the run has taken over its checkpoint."""
    loop = trainer(run)
    try:
        step = loop.saving.resume()
    finally:
        loop.report.metrics.close()
    assert step == 2
    return loop.learner.optimizer.param_groups


def test_decay_and_momentum_are_those_of_the_configuration(data: Path, tmp_path: Path) -> None:
    trained(data, tmp_path / "run", weight_decay=0.5, momentum=0.8)
    more = config(data, tmp_path / "run", weight_decay=0.25, momentum=0.0, deterministic=False)
    decayed, plain = groups(more)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert [(group["momentum"], group["nesterov"]) for group in (decayed, plain)] == [
        (0, False)
    ] * 2
    assert trainer(more).fit()


def test_decay_and_momentum_that_nobody_set_stay(data: Path, tmp_path: Path) -> None:
    trained(data, tmp_path / "run", weight_decay=0.5, momentum=0.8)
    unset = config(data, tmp_path / "run", deterministic=False)
    decayed, plain = groups(unset)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert [group["momentum"] for group in (decayed, plain)] == [0.8] * 2
    resolved = resolve(unset, ALONE, 16)
    assert (resolved.weight_decay, resolved.momentum) == (0.5, 0.8)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["weight_decay"], written["momentum"]) == (0.5, 0.8)


def test_a_checkpoint_is_of_its_step_however_late_it_is_copied(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step's forward pass goes on meanwhile, and its update waits."""
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
        trained(data, output, checkpoint_steps=1, keep_checkpoints=9, ema_decay=0.9)
        states.append(verify(step_dir(output / "checkpoints", 1)).state())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def _same_number(data: Path) -> None:
    """Another image under another name, in place of one."""
    image = next((data / "train" / "class1").iterdir())
    image.rename(image.with_name("another.png"))


def _same_name(data: Path) -> None:
    """Another image of another size, under the name of one."""
    image = next((data / "train" / "class1").iterdir())
    image.write_bytes(image.read_bytes() + b"more")


@pytest.mark.parametrize("change", [_same_number, _same_name])
def test_a_run_does_not_go_on_with_other_images(
    data: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    trained(data, tmp_path / "run")
    change(data)
    longer = config(data, tmp_path / "run", deterministic=False)
    with pytest.raises(InputError, match="paths and sizes of the training images") as caught:
        groups(longer)
    assert "\n" not in str(caught.value)
    assert "resume=never" in str(caught.value)


def test_the_images_may_lie_elsewhere(data: Path, tmp_path: Path) -> None:
    trained(data, tmp_path / "run")
    data.rename(tmp_path / "moved")
    assert len(groups(config(tmp_path / "moved", tmp_path / "run", deterministic=False))) == 2


def test_a_checkpoint_that_does_not_know_its_images_is_resumed(data: Path, tmp_path: Path) -> None:
    """As earlier versions wrote it, without digests of the images and of the manifest itself."""
    trained(data, tmp_path / "run")
    newest = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest is not None
    about = json.loads((newest.path / MANIFEST).read_text())
    del about["images"], about["sha256"]
    (newest.path / MANIFEST).write_text(json.dumps(about))
    _same_name(data)
    assert len(groups(config(data, tmp_path / "run", deterministic=False))) == 2


def test_beginning_anew_finds_a_free_name(tmp_path: Path) -> None:
    """Also where one of those that were kept is gone."""
    run = config(tmp_path, tmp_path, resume="never")
    for number in range(4):
        about = {**checkpoint.manifest_of(run, ("a", "b")), "samples": 4}
        checkpoint.write(tmp_path / "checkpoints", number, {"model": {}}, about)
        resume.begin(run, [str(number)])
        if number == 1:
            (tmp_path / "checkpoints.old-0").rename(tmp_path / "moved")
    kept = sorted(path.name for path in tmp_path.glob("checkpoints*"))
    assert kept == ["checkpoints.old-0", "checkpoints.old-1", "checkpoints.old-2"]
    assert not checkpoint.steps(tmp_path / "checkpoints")


def newest_state(output: Path) -> dict[str, Any]:
    newest = newest_valid(output / "checkpoints")
    assert newest is not None
    return newest.state()


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_the_averaged_weights_and_a_run_goes_on_with_them(
    data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    trained(data, output, ema_decay=0.9)
    state = newest_state(output)
    assert state["ema"] is not None
    assert state["ema"].keys() == state["model"].keys()
    assert not torch.equal(state["ema"]["fc.weight"], state["model"]["fc.weight"])
    statistics = [name for name in state["model"] if "running" in name]
    assert statistics
    assert all(torch.equal(state["ema"][name], state["model"][name]) for name in statistics)
    network, _ = checkpoint.load_model(output / "checkpoints" / "step-00000002")
    assert same(network.state_dict(), state["ema"])
    loop = trainer(config(data, output, ema_decay=0.9, deterministic=False))
    loop.saving.resume()
    loop.report.metrics.close()
    assert loop.learner.ema is not None
    assert same(loop.learner.ema.model.state_dict(), state["ema"])
    assert same(loop.learner.network.state_dict(), state["model"])


def test_averaging_begins_with_the_weights_of_a_checkpoint_without_averages(
    data: Path, tmp_path: Path
) -> None:
    trained(data, tmp_path / "run", ema_decay=0.0)
    state = newest_state(tmp_path / "run")
    assert state["ema"] is None
    loop = trainer(config(data, tmp_path / "run", ema_decay=0.9, deterministic=False))
    loop.saving.resume()
    loop.report.metrics.close()
    assert loop.learner.ema is not None
    assert same(loop.learner.ema.model.state_dict(), state["model"])


@pytest.mark.parametrize("where", ["network", "averages"])
def test_the_loop_keeps_no_weights_that_are_no_numbers(
    data: Path, tmp_path: Path, where: str
) -> None:
    loop = trainer(config(data, tmp_path / "run", ema_decay=0.9, deterministic=False))
    assert loop.learner.ema is not None
    broken = loop.learner.network if where == "network" else loop.learner.ema.model
    with torch.no_grad():
        next(broken.parameters())[0] = float("nan")
    loop.step = 1
    loop._save()
    with pytest.raises(JobError, match=r"after step 1 .* is NaN or infinite"):
        loop.saving.writer.wait()
    loop.report.metrics.close()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_the_loop_saves_nothing_after_a_loss_that_is_no_number(data: Path, tmp_path: Path) -> None:
    loop = trainer(config(data, tmp_path / "run", deterministic=False))
    loop.step = 1
    loop.divergence.first_bad_step.fill_(0)
    loop._save()
    loop.saving.writer.wait()
    loop.report.metrics.close()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []
