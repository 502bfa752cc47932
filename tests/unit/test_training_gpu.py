"""The loop on a GPU that is pretended (`tests/pretended_gpu.py`): what its steps wait for."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.evaluation.predict import predict
from kfp_ddp.training import learner, prefetch, rank, strategies
from kfp_ddp.training.checkpoint import Checkpoint, ModelInfo, load_model, newest_valid
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import scan
from kfp_ddp.training.model import MEAN, STD, build
from kfp_ddp.training.trainer import Trainer
from tests.pretended_gpu import GPU, pretended
from tests.training_ranks import config, dataset

Waits = Callable[[TrainConfig], list[str]]


@pytest.fixture(autouse=True)
def no_stream_of_another_test() -> Iterator[None]:
    prefetch._side_stream.cache_clear()
    yield
    prefetch._side_stream.cache_clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("gpu") / "data", train=24, val=8)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "aten._local_scalar_dense": lambda on: float(on[0]),
    "aten.index.": lambda on: on[on > 0],
    "aten.nonzero": lambda on: on.nonzero(),
    "a copy from the GPU": lambda on: on.cpu(),
    "tolist": lambda on: on.tolist(),
    "a copy of memory that is not pinned": lambda on: torch.ones(4).to(GPU, non_blocking=True),
    "torch.tensor on the GPU": lambda on: torch.tensor([1.0], device=GPU),
    "copy_ between host and GPU": lambda on: torch.empty(4).copy_(on, non_blocking=True),
    "torch.cuda.synchronize": lambda on: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_for_a_gpu_is_seen(what: str) -> None:
    with pretended() as gpu:
        on = torch.rand(4, device=GPU)
        assert not gpu.waits
        WAITS[what](on)
    assert [what in wait for wait in gpu.waits] == [True]


def test_what_a_gpu_does_by_itself_is_waited_for_by_nobody() -> None:
    with pretended() as gpu:
        weights = torch.nn.Linear(4, 2).to(GPU)
        gpu.waits.clear()
        moved = torch.ones(8, 4).pin_memory().to(GPU, non_blocking=True)
        torch.autograd.backward(weights(moved).logsumexp(1).mean() * 2)
        assert weights.weight.grad is not None
        torch.empty(2, 4, pin_memory=True).copy_(weights.weight.grad, non_blocking=True)
    assert gpu.kernels > 5
    assert not gpu.waits


def test_what_a_gpu_refuses_is_refused() -> None:
    with pretended(), pytest.raises(RuntimeError, match="of the GPU and of the host are mixed"):
        torch.ones(4, device=GPU) + torch.ones(4)
    with pretended():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            made = torch.ones(4, device=GPU)
        with pytest.raises(AssertionError, match="may not have written yet"):
            made.sum()
        torch.cuda.current_stream().wait_stream(side)
        with pytest.raises(AssertionError, match="is used and not recorded"):
            made.sum()
        made.record_stream(torch.cuda.current_stream())
        made.sum()


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16 from the cache, mixed, blurred": {
        "precision": "bf16",
        "cache_gb": 0.1,
        "augment": "crop-flip",
        "start_image_size": 6,
        "mixup": 0.2,
        "cutmix": 1.0,
        "blur_pool": True,
    },
    "fp16 in micro-batches, clipped": {
        "precision": "fp16",
        "micro_batch_size": 4,
        "clip_norm": 1.0,
    },
    "AdamW, weighted, the body rests first": {
        "optimizer": "adamw",
        "class_weights": "balanced",
        "freeze_epochs": 1,
        "body_lr_factor": 0.5,
        "ema_decay": 0,
    },
}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """What a run waits for in steps that tell nothing: not the first one, nor an epoch's last."""

    def waits_of(run: TrainConfig) -> list[str]:
        seen: list[str] = []
        real = Trainer.advance

        def advance(trainer: Trainer, *given: Any) -> bool:
            told = len(gpu.waits)
            stops = real(trainer, *given)
            if trainer.step == 1 or trainer.step % trainer.sampler.steps == 0:
                assert len(gpu.waits) > told
            else:
                seen.extend(gpu.waits[told:])
            return stops

        monkeypatch.setattr(Trainer, "advance", advance)
        with pretended() as gpu:
            assert rank.run(run)
        assert gpu.kernels > 500
        return seen

    return waits_of


def on_gpu(data: Path, output: Path, **fields: Any) -> TrainConfig:
    given = {"device": "cuda", "epochs": 2, "log_steps": 1000, "deterministic": False}
    return config(data, output, **{**given, **fields})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_waits_for_no_gpu(name: str, data: Path, tmp_path: Path, waits: Waits) -> None:
    assert not waits(on_gpu(data, tmp_path / "run", **SETTINGS[name]))


def test_a_step_of_ddp_waits_for_no_gpu(
    data: Path, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "spread", strategies.Ddp)
    meeting = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        assert not waits(on_gpu(data, tmp_path / "run"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def saved(run: TrainConfig) -> Checkpoint:
    found = newest_valid(Path(run.output_dir) / "checkpoints")
    assert found is not None
    return found


def test_a_run_on_a_gpu_comes_to_what_it_comes_to_on_a_cpu(data: Path, tmp_path: Path) -> None:
    on = {
        device: on_gpu(data, tmp_path / device, device=device, precision="fp32")
        for device in ("cuda", "cpu")
    }
    with pretended() as gpu:
        assert rank.run(on["cuda"])
    assert gpu.kernels > 500
    assert rank.run(on["cpu"])
    there, here = (saved(run).state()["model"] for run in on.values())
    torch.testing.assert_close(there, here, rtol=0.02, atol=0.002)
    network, info = load_model(saved(on["cpu"]).path)
    index = scan(data / "val", info.classes)
    here = predict(network, info, index, 4, torch.device("cpu"))
    with pretended() as gpu:
        there = predict(network, info, index, 4, GPU)
    assert gpu.kernels > 20
    torch.testing.assert_close(there.confidence, here.confidence, rtol=1e-3, atol=1e-4)


def test_an_evaluation_has_the_next_batch_on_the_gpu_while_it_waits_for_one(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = scan(data / "val")
    network = build("cifar_resnet8", len(index.classes)).eval()
    info = ModelInfo("cifar_resnet8", tuple(index.classes), 32, MEAN, STD, 1, {})
    asked, counted = list[int](), list[int]()
    network.register_forward_hook(lambda *_: asked.append(1))
    update = Tally.update

    def counting(self: Tally, *given: Tensor) -> Any:
        counted.append(len(asked))
        return update(self, *given)

    monkeypatch.setattr(Tally, "update", counting)
    others = set[int]()
    for size, ahead in ((4, [2, 2]), (2, [2, 3, 4, 4])):
        asked.clear()
        counted.clear()
        with pretended() as gpu:
            predict(copy.deepcopy(network), info, index, size, GPU)
            events = [wait.endswith(": an event") for wait in gpu.waits]
        assert counted == ahead
        assert sum(events) == len(ahead), "one a batch"
        others.add(len(events) - sum(events))
    assert len(others) == 1, "what else is waited for is waited for once"
