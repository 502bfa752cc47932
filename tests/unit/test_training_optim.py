"""The optimizer's groups, its rate at each step, and averaged weights, against their formulas."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from kfp_ddp.training import learner, model
from kfp_ddp.training.config import TrainConfig


def run(**fields: Any) -> TrainConfig:
    settings: dict[str, Any] = {"data": "/d", "output_dir": "/o", "model": "cifar_resnet8"}
    return TrainConfig.create(**{**settings, **fields})


def test_groups_have_the_settings_of_the_configuration() -> None:
    network = model.build("cifar_resnet8", 3)
    fields = {"weight_decay": 0.25, "momentum": 0.5, "learning_rate": 0.75}
    optimizer = learner.optimizer_of(network, run(**fields))
    decayed, plain = learner.options_of(optimizer)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    for group in (decayed, plain):
        assert (group["momentum"], group["lr"]) == (0.5, 0.75)
        assert (group["nesterov"], group["fused"]) == (True, True)
        assert "params" not in group
    kinds = [{p.ndim for p in group["params"]} for group in optimizer.param_groups]
    assert kinds == [{2, 4}, {1}]
    still = learner.options_of(learner.optimizer_of(network, run(momentum=0.0)))
    assert [(group["momentum"], group["nesterov"]) for group in still] == [(0.0, False)] * 2
    slow = learner.options_of(learner.optimizer_of(network, run(momentum=0.01)))
    assert [group["nesterov"] for group in slow] == [True, True]
    sharded = learner.options_of(learner.optimizer_of(network, run(strategy="fsdp")))
    assert [group["fused"] for group in sharded] == [None, None]


def test_the_highest_rate_follows_the_batch_where_asked() -> None:
    fields = {"learning_rate": 0.5, "batch_size": 1024}
    assert learner.peak(run(**fields)) == 0.5
    assert learner.peak(run(**fields, lr_reference_batch=256)) == 2.0
    assert learner.peak(run(**fields, lr_reference_batch=4096)) == 0.125


@pytest.mark.parametrize("warmup", [0, 1, 2.5])
def test_the_rate_at_each_step_is_the_formula(warmup: float) -> None:
    config = run(epochs=4, warmup_epochs=warmup, learning_rate=0.3, batch_size=512)
    config = config.model_copy(update={"lr_reference_batch": 256})
    rates = [learner.learning_rate(config, step, 6) for step in range(24)]
    rising = round(6 * warmup)
    for step in range(rising):
        assert rates[step] == pytest.approx(0.6 * (step + 1) / rising)
    for step in range(rising, 24):
        share = (step - rising) / (24 - rising)
        assert rates[step] == pytest.approx(0.3 * (1 + math.cos(math.pi * share)))
    assert rates[rising] == pytest.approx(0.6)
    assert 0 < rates[-1] < 0.02


def two() -> nn.Sequential:
    """Two weights and the statistics of a BatchNorm."""
    return nn.Sequential(nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2))


def test_averages_are_copies_that_nobody_trains() -> None:
    network = two().train()
    ema = learner.Ema(network, 0.9)
    assert not ema.model.training
    assert network.training
    assert not any(weight.requires_grad for weight in ema.model.parameters())
    assert all(weight.requires_grad for weight in network.parameters())
    assert (ema.decay, len(list(ema.model.parameters()))) == (0.9, 3)


@pytest.mark.parametrize(
    ("decay", "step", "kept"),
    [
        (0.5, 0, 0.1),
        (0.5, 1, 2 / 11),
        (0.5, 8, 0.5),
        (0.5, 9, 0.5),
        (0.9, 90, 0.9),
        (0.9, 7, 8 / 17),
    ],
)
def test_an_average_moves_faster_at_first(decay: float, step: int, kept: float) -> None:
    network = two()
    trained = next(network.parameters())
    nn.init.constant_(trained, 3.0)
    ema = learner.Ema(network, decay)
    nn.init.constant_(trained, 5.0)
    ema.update(step)
    weight = next(ema.model.parameters())
    assert weight.tolist() == [[pytest.approx(3 * kept + 5 * (1 - kept))]] * 2
    assert trained.tolist() == [[5.0]] * 2


def test_statistics_are_taken_over_as_they_are() -> None:
    network = two()
    ema = learner.Ema(network, 0.9)
    network.train()(torch.randn(8, 1))
    ema.copy_buffers(network)
    for mine, theirs in zip(ema.model.buffers(), network.buffers(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine is not theirs
