"""micro_batch_size=auto on ranks whose memory is full."""

from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core import packed
from kfp_ddp.training.prepare import prepare
from kfp_ddp.training.spec.config import TrainConfig
from tests.training_ranks import ALONE, config, dataset, events, output_of, state_hash

REFUSES = """
import os, torch
from torch import nn

class Memory(nn.Module):
    def forward(self, images):
        most = os.environ.get(f"MOST{os.environ.get('RANK', 0)}")
        if self.training and most and len(images) > int(most):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB. Process 7 has 9 GiB")
        return images

def build(num_classes):
    body = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), Memory()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""
"""A network that takes at most MOST0 images on rank 0, and MOST1 on rank 1."""


def own(output: Path, micro: int | str = "auto", **fields: Any) -> TrainConfig:
    data, code = output.with_name("data"), packed.pack(REFUSES.encode())
    if not data.exists():
        dataset(data, train=48, val=4)
    more = {"epochs": 1, "warmup_epochs": 0, "batch_size": 24, "micro_batch_size": micro, **fields}
    return config(data, output, model="net.py:build", model_code=code, **more)


def test_ranks_agree_on_a_size_that_fits_and_compute_the_same(tmp_path: Path) -> None:
    """Of 12 images rank 0 takes 7 and rank 1 takes 5: 4 is the largest part that suits both."""
    auto, number = own(tmp_path / "auto"), own(tmp_path / "4", 4)
    output = output_of(auto, 2, env={"MOST0": "7", "MOST1": "5"})
    assert "micro_batch_size=4: more do not fit on rank 1: CUDA out of memory" in output
    output_of(number, 2)
    assert state_hash(auto) == state_hash(number)
    assert [e["micro_batch_size"] for e in events(tmp_path / "auto", "start")] == [4]
    assert prepare(own(tmp_path / "auto", epochs=2), ALONE)[0].micro_batch_size == 4, "resumed"


def test_a_rank_takes_the_largest_part_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, micro in (("", 24), ("8", 8), ("2", 2)):
        monkeypatch.setenv("MOST0", most)
        assert prepare(own(tmp_path / f"run{most}"), ALONE)[0].micro_batch_size == micro


def test_one_image_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    output = output_of(own(tmp_path / "run"), 2, code=1, env={"MOST1": "0"})
    assert "error: CUDA out of memory. Tried 9 GiB, and micro_batch_size=auto" in output
    assert "Traceback" not in output
