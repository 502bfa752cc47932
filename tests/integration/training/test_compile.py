"""torch.compile with all that changes a network during a run, with a backend for CPUs."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kfp_ddp.training.model import strategies
from kfp_ddp.training.state import learner
from tests.tolerance import assert_trained_alike
from tests.training_ranks import config, dataset, newest, trainer

FREEZES, ACCUMULATES = {"freeze_epochs": 1}, {"micro_batch_size": 4}
GROWS = {"start_image_size": 4, "train_image_size": 16}


@pytest.fixture
def one_of_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wrap the network of a single rank as that of several."""
    monkeypatch.setattr(learner, "spread", strategies.Ddp)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_ddp")
@pytest.mark.parametrize("fields", [FREEZES, GROWS, FREEZES | ACCUMULATES | GROWS])
def test_compiled_ddp_computes_the_same(
    fields: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    # Both compute by the same kernels, so that they differ by what the compiler changes.
    monkeypatch.setattr(learner, "use_products", lambda network: None)
    data = dataset(tmp_path / "data", train=16, val=4)
    weights = []
    for compiled in (False, True):
        more = {"compile": compiled, "ema_decay": 0, "warmup_epochs": 0, "epochs": 3, **fields}
        run = config(data, tmp_path / str(compiled), **more)
        # A graph too many would silently run without the compiler.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            assert trainer(run).fit()
        weights.append(newest(tmp_path / str(compiled)).state()["model"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert_trained_alike(weights[1], weights[0])
