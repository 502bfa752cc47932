"""micro_batch_size=auto on ranks whose memory is full."""

from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core import packed
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.prepare import prepare
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


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return dataset(tmp_path / "data", train=48, val=4)


def own(data: Path, output: Path, micro: int | str, **fields: Any) -> TrainConfig:
    code = packed.pack(REFUSES.encode())
    more = {"epochs": 1, "warmup_epochs": 0, "batch_size": 24, "micro_batch_size": micro, **fields}
    return config(data, output, model="net.py:build", model_code=code, **more)


def test_ranks_agree_on_a_size_that_fits_and_compute_the_same(data: Path, tmp_path: Path) -> None:
    """Of 12 images rank 0 takes 7 and rank 1 takes 5: 4 is the largest part that suits both."""
    auto, number = (own(data, tmp_path / str(size), size) for size in ("auto", 4))
    output = output_of(auto, 2, env={"MOST0": "7", "MOST1": "5"})
    assert "micro_batch_size=4: more do not fit on rank 1: CUDA out of memory" in output
    output_of(number, 2)
    assert state_hash(auto) == state_hash(number)
    assert [e["micro_batch_size"] for e in events(tmp_path / "auto", "start")] == [4]
    resumed, _, _ = prepare(own(data, tmp_path / "auto", "auto", epochs=2), ALONE)
    assert resumed.micro_batch_size == 4


@pytest.mark.parametrize(("most", "micro"), [("", 24), ("8", 8), ("2", 2)])
def test_a_single_rank_takes_the_largest_part_that_fits(
    most: str, micro: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOST0", most)
    resolved, _, _ = prepare(own(data, tmp_path / "run", "auto"), ALONE)
    assert resolved.micro_batch_size == micro


def test_one_image_that_does_not_fit_is_one_line(data: Path, tmp_path: Path) -> None:
    output = output_of(own(data, tmp_path / "run", "auto"), 2, code=1, env={"MOST1": "0"})
    assert "error: CUDA out of memory. Tried 9 GiB, and micro_batch_size=auto" in output
    assert "Traceback" not in output
