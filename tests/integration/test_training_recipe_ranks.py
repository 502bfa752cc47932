"""What a recipe is made of, on several ranks: exact resume, and the same whatever their number."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.training import checkpoint
from tests.training_ranks import Ranks, config, dataset, output_of, state_hash, train_until_killed

ALL: dict[str, Any] = {
    "epochs": 2,
    "optimizer": "adamw",
    "sampling": "balanced",
    "mixup": 0.4,
    "cutmix": 1.0,
    "randaugment": 9,
    "freeze_epochs": 1,
    "body_lr_factor": 0.5,
    "keep_best": True,
    "early_stop_epochs": 2,
    "test_time_flip": True,
    "learning_rate": 0.002,
    "checkpoint_steps": 3,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of 8 images an epoch."""
    return dataset(tmp_path_factory.mktemp("recipes") / "data", train=32, val=8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_run_killed_in_a_save_keeps_the_bits(data: Path, tmp_path: Path, strategy: str) -> None:
    """While the body rests, so that it begins to learn once in one start, and once in each."""
    fields = {**ALL, "strategy": strategy, "ema_decay": 0.0 if strategy == "fsdp" else 0.9}
    whole = config(data, tmp_path / "whole", **fields)
    output_of(whole, 2)
    parts = config(data, tmp_path / "parts", **fields)
    train_until_killed(parts, 2, "torch.save")
    again = output_of(parts, 2)
    assert "resumed from" in again
    assert state_hash(parts) == state_hash(whole)


@pytest.mark.slow
def test_one_rank_and_two_differ_by_the_order_of_float_sums(data: Path, tmp_path: Path) -> None:
    ends = []
    for world in (1, 2):
        fields = {**ALL, "micro_batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05}
        run = config(data, tmp_path / str(world), **fields)
        ranks = Ranks(run, world)
        assert ranks.wait() == [0] * world, ranks.output()
        newest = checkpoint.newest_valid(tmp_path / str(world) / "checkpoints")
        assert newest is not None
        assert newest.step == 8
        ends.append(newest.state())
    counted = [name for name in ends[0]["model"] if not name.endswith("num_batches_tracked")]
    for name in counted:
        value = ends[0]["model"][name]
        torch.testing.assert_close(ends[1]["model"][name], value, rtol=1e-3, atol=1e-4, msg=name)
