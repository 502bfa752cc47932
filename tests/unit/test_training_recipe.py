"""What a recipe is made of: each piece resumes to the bit, and does what its source says."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.runs.train.outputs import chosen_checkpoint
from kfp_ddp.training import checkpoint, transforms
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.manifest import step_of
from kfp_ddp.training.prepare import prepare
from kfp_ddp.training.recipes import configured
from kfp_ddp.training.splits import Index
from kfp_ddp.training.trainer import Loss, Trainer, Validation, balanced
from kfp_ddp.training.transforms import mixed
from tests.training_ranks import config, dataset, state_hash

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 8 images an epoch."""
    return dataset(tmp_path_factory.mktemp("recipe") / "data", train=16, val=4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(data: Path, output: Path, **fields: Any) -> TrainConfig:
    settings = {"epochs": 3, "deterministic": False, "ema_decay": 0.0, **fields}
    return config(data, output, **settings)


def trainer(run: TrainConfig) -> Trainer:
    resolved, train, val = prepare(run, ALONE)
    return Trainer(resolved, ALONE, train, val)


def stopped_after(run: TrainConfig, step: int, patch: pytest.MonkeyPatch) -> None:
    """Train, and be told to stop in `step`."""
    loop = trainer(run)
    post = loop.stop.post

    def told(save: bool) -> None:
        if loop.step == step - 1:
            loop.stop.ask("the test")
        post(save)

    patch.setattr(loop.stop, "post", told)
    assert not loop.fit()
    assert loop.step == step


PIECES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "ema_decay": 0.9},
    "balanced": {"class_weights": "balanced", "randaugment": 9},
    "mixed": {"mixup": 0.4, "cutmix": 1.0},
    "fp16": {"precision": "fp16", "clip_norm": 1.0},
    "frozen": {"freeze_epochs": 1, "body_lr_factor": 0.1, "micro_batch_size": 4},
    "frozen-adamw": {"freeze_epochs": 2, "optimizer": "adamw", "test_time_flip": True},
}


@pytest.mark.parametrize("name", PIECES)
def test_a_run_that_stops_and_goes_on_ends_with_the_same_bits(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an epoch, at its end, and where the body begins to learn."""
    whole = run(data, tmp_path / "whole", **PIECES[name])
    assert trainer(whole).fit()
    parts = run(data, tmp_path / "parts", **PIECES[name])
    for step in (2, 3):
        stopped_after(parts, step, monkeypatch)
    assert trainer(parts).fit()
    assert state_hash(parts) == state_hash(whole)


def tensors(state: dict[str, Tensor], head: bool) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("fc.") == head}


def test_a_frozen_body_stays_as_it_is_with_its_statistics(data: Path, tmp_path: Path) -> None:
    frozen = run(data, tmp_path / "run", freeze_epochs=3, weight_decay=0.1)
    loop = trainer(frozen)
    before = {name: value.clone() for name, value in loop.learner.network.state_dict().items()}
    assert loop.fit()
    after = loop.learner.network.state_dict()
    for name, value in tensors(before, head=False).items():
        assert torch.equal(after[name], value), name
    for name, value in tensors(before, head=True).items():
        assert not torch.equal(after[name], value), name


def test_the_body_learns_after_its_rest_and_more_slowly(data: Path, tmp_path: Path) -> None:
    loop = trainer(run(data, tmp_path / "run", freeze_epochs=1, body_lr_factor=0.25))
    before = {name: value.clone() for name, value in loop.learner.network.state_dict().items()}
    assert loop.fit()
    after = loop.learner.network.state_dict()
    still = [name for name, value in before.items() if torch.equal(after[name], value)]
    assert still == []
    rates = {group["lr"] for group in loop.learner.optimizer.param_groups}
    assert min(rates) == pytest.approx(max(rates) * 0.25)


def test_early_stopping_ends_a_run_that_no_longer_gets_better(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated after epochs 2, 4 and 6: the first is the best, which is 4 epochs ago after 6."""
    _accuracies(monkeypatch, 0.5, 0.4, 0.5, 0.9)
    waits = run(data, tmp_path / "run", epochs=8, eval_epochs=2, early_stop_epochs=3)
    stopped_after(waits, 11, monkeypatch)  # in epoch 6, three after the best, but not evaluated
    loop = trainer(waits)
    assert loop.fit()
    assert loop.step == 12
    newest = checkpoint.newest_valid(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.step == 12
    again = trainer(waits)
    assert again.fit()
    assert again.step == 12
    longer = trainer(run(data, tmp_path / "run", epochs=8, eval_epochs=2, early_stop_epochs=5))
    assert longer.fit()
    assert longer.step == 16


def test_the_best_checkpoint_stays_beside_the_newest(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _accuracies(monkeypatch, 0.5, 0.9, 0.6, 0.9, 0.8, 0.7)
    keeps = run(data, tmp_path / "run", epochs=6, keep_best=True, checkpoint_epochs=0)
    stopped_after(keeps, 9, monkeypatch)
    assert trainer(keeps).fit()
    kept = [step_of(path) for path in checkpoint.steps(tmp_path / "run" / "checkpoints")]
    assert kept == [12, 9, 4]
    best = checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert best.manifest["metrics"]["accuracy"] == 0.9
    assert _handed_on(tmp_path / "run") == 4
    shutil.rmtree(best.path)
    assert _handed_on(tmp_path / "run") == 12


def test_the_newest_checkpoint_is_handed_on_where_the_best_was_not_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _accuracies(monkeypatch, 0.9, 0.5)
    assert trainer(run(data, tmp_path / "run", epochs=2)).fit()
    assert _handed_on(tmp_path / "run") == 4


def _handed_on(run_dir: Path) -> int:
    chosen = chosen_checkpoint(run_dir)
    assert chosen is not None
    return chosen.step


def test_weights_to_begin_with_are_fine_tuned_unless_another_recipe_is_given() -> None:
    begun = {"data": "d", "output_dir": "o", "init_from": "w"}
    tuned = configured("none", begun)
    assert (tuned.freeze_epochs, tuned.body_lr_factor, tuned.keep_best) == (1, 0.1, True)
    assert tuned == configured("finetune", begun)
    assert configured("cifar", begun).freeze_epochs == 0
    assert configured("none", {"data": "d", "output_dir": "o"}).freeze_epochs == 0


def test_another_optimizer_does_not_take_the_rates_of_a_recipe() -> None:
    folders = {"data": "d", "output_dir": "o"}
    adamw = configured("imagenet-90", {**folders, "optimizer": "adamw", "weight_decay": 0.05})
    assert (adamw.learning_rate, adamw.lr_reference_batch, adamw.weight_decay) == (1e-3, 0, 0.05)
    assert adamw.warmup_epochs == 8
    assert configured("imagenet-90", {**folders, "optimizer": "sgd"}).learning_rate == 0.256


def test_gradients_that_overflow_change_the_scale_of_the_loss_alone(
    data: Path, tmp_path: Path
) -> None:
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


def _accuracies(patch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """What evaluations come to, one after the other: chance decides it with few images."""
    coming = iter(accuracies)
    patch.setattr(
        Validation, "measure", lambda *_: {"loss": 1.0, "accuracy": next(coming), "top5": 1.0}
    )


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"optimizer": "adamw"}, "optimizer was sgd and is now adamw"),
        ({"freeze_epochs": 1}, "freeze_epochs, body_lr_factor.* was False and is now True"),
    ],
)
def test_what_does_not_fit_the_state_of_the_optimizer_is_refused(
    data: Path, tmp_path: Path, now: dict[str, Any], told: str
) -> None:
    assert trainer(run(data, tmp_path / "run", epochs=1, warmup_epochs=0)).fit()
    loop = trainer(run(data, tmp_path / "run", **now))
    with pytest.raises(InputError, match=told) as caught:
        loop.saving.resume()
    loop.report.metrics.close()
    assert "\n" not in str(caught.value)


def test_rates_that_nobody_set_yield_to_adamw() -> None:
    plain = {"data": "d", "output_dir": "o"}
    adamw = TrainConfig.create(**plain, optimizer="adamw", weight_decay=0.05)
    assert (adamw.learning_rate, adamw.weight_decay) == (1e-3, 0.05)
    assert TrainConfig.create(**plain).learning_rate == 0.1


def index(*targets: int) -> Index:
    return Index(Path("/d"), ("a", "b", "c"), tuple(map(str, targets)), targets)


def test_balanced_classes_weigh_as_much_as_each_other() -> None:
    rare = index(0, 0, 0, 0, 1, 1, 1, 1, 2)
    assert balanced(rare) == pytest.approx([9 / 12, 9 / 12, 3.0])
    settings = {"data": "d", "output_dir": "o", "class_weights": "balanced", "label_smoothing": 0}
    loss = Loss(TrainConfig.create(**settings), rare, ALONE.device)
    logits, targets = torch.randn(9, 3), torch.tensor(rare.targets)
    each = F.cross_entropy(logits, targets, reduction="none")
    by_class = [each[targets == number].mean() for number in range(3)]
    assert float(loss(logits, targets)) == pytest.approx(float(sum(by_class)) / 3, rel=1e-5)


def test_the_loss_of_mixed_images_is_that_of_mixed_targets() -> None:
    config = TrainConfig.create(data="d", output_dir="o", label_smoothing=0.2)
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    hot = F.one_hot(targets, 3).float()
    soft = 0.3 * hot + 0.7 * hot.roll(1, 0)
    expected = F.cross_entropy(logits, soft, label_smoothing=0.2)
    loss = Loss(config, index(0, 1, 2), ALONE.device)
    torch.testing.assert_close(loss(logits, targets, 0.3), expected)


def mixing(**fields: float) -> TrainConfig:
    return TrainConfig.create(data="d", output_dir="o", **fields)


def test_mixup_takes_a_share_of_the_image_before() -> None:
    images = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    out, own = mixed(images, mixing(mixup=1.0), epoch=2, first=7)
    assert 0 < own < 1
    torch.testing.assert_close(out, own * images + (1 - own) * images.roll(1, 0))
    assert out.is_contiguous(memory_format=torch.channels_last)
    again, same = mixed(images, mixing(mixup=1.0), epoch=2, first=7)
    assert torch.equal(again, out)
    assert same == own
    shares = {mixed(images, mixing(mixup=1.0), e, f)[1] for e in (2, 3) for f in (7, 8)}
    assert len(shares) == 4


def test_cutmix_pastes_a_part_of_the_image_before() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    for first in range(40):
        out, own = mixed(images, mixing(cutmix=1.0), epoch=0, first=first)
        pasted = out != images
        assert torch.equal(out[pasted], images.roll(1, 0)[pasted])
        assert float((~pasted).float().mean()) == pytest.approx(own)
        rows, columns = pasted[0, 0].any(1).sum(), pasted[0, 0].any(0).sum()
        assert int(pasted[0, 0].sum()) == int(rows * columns)


def test_with_both_a_batch_gets_one_of_the_two() -> None:
    images = torch.rand(2, 3, 8, 8)
    both = [mixed(images, mixing(mixup=1.0, cutmix=1.0), 0, first)[0] for first in range(40)]
    pasted = sum(bool((out == images).any()) for out in both)
    assert 0 < pasted < 40
    assert mixed(images, mixing(), 0, 0) == (images, 1.0)


def test_randaugment_depends_on_seed_epoch_and_image_alone() -> None:
    settings = {"data": "d", "output_dir": "o", "image_size": 32, "augment": "none"}
    plain = TrainConfig.create(**settings)
    strong = TrainConfig.create(**settings, randaugment=20)
    image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)

    def of(config: TrainConfig, epoch: int, position: int) -> Tensor:
        torch.manual_seed(torch.seed() % 2**63)  # whatever torch drew before
        return transforms.finish(image, config, True, epoch, position, prepared=True)

    changed = [of(strong, 0, position) for position in range(8)]
    assert all(out.shape == image.shape and out.dtype == torch.uint8 for out in changed)
    assert all(torch.equal(out, of(strong, 0, at)) for at, out in enumerate(changed))
    assert any(not torch.equal(out, of(strong, 1, at)) for at, out in enumerate(changed))
    assert any(not torch.equal(out, image) for out in changed)
    assert torch.equal(of(plain, 0, 0), image)
