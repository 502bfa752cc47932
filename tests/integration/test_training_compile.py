"""torch.compile with all that changes a network during a run, with a backend for CPUs."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kfp_ddp.core import packed
from kfp_ddp.training.model import strategies
from kfp_ddp.training.state import learner
from tests.training_ranks import config, dataset, newest, trainer

NETWORK = """
from torch import nn

class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, classes)

    def forward(self, images):
        return self.fc(self.body(images).mean((2, 3)))

def build(num_classes):
    return Network(num_classes)
"""
CHANGES: dict[str, dict[str, Any]] = {
    "freezing": {"freeze_epochs": 1},
    "accumulation": {"micro_batch_size": 4},
    "sizes": {"start_image_size": 4, "train_image_size": 16},
}
EVERYTHING = functools.reduce(lambda one, other: one | other, CHANGES.values())


@pytest.fixture
def one_of_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wrap the network of a single rank as that of several."""
    monkeypatch.setattr(learner, "spread", strategies.Ddp)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_ddp")
@pytest.mark.parametrize(
    "fields", [{}, *CHANGES.values(), EVERYTHING], ids=["nothing", *CHANGES, "all"]
)
def test_compiled_ddp_computes_the_same(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    data = dataset(tmp_path / "data", train=16, val=4)
    own = {"model": "net.py:build", "model_code": packed.pack(NETWORK.encode())}
    weights = []
    for compiled in (False, True):
        more = {"compile": compiled, "ema_decay": 0.0, "warmup_epochs": 0, "epochs": 3}
        run = config(data, tmp_path / str(compiled), **{**own, **more, **fields})
        # A graph too many would silently run without the compiler.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            assert trainer(run).fit()
        weights.append(newest(tmp_path / str(compiled)).state()["model"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)
