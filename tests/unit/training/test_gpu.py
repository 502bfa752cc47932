"""The loop on a GPU: no step waits for it, and it computes what a CPU computes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.evaluation.predict import merged, predict_share
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training import rank
from kfp_ddp.training.data.loader import DeviceBatch
from kfp_ddp.training.distributed import alone
from kfp_ddp.training.model import strategies
from kfp_ddp.training.model.networks import MEAN, STD, build
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import learner
from kfp_ddp.training.state.checkpoint import ModelInfo, load_model, newest_valid
from kfp_ddp.training.trainer import Trainer
from tests.training_ranks import config, dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
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
    "fp16, micro-batches, clipped": {"precision": "fp16", "micro_batch_size": 4, "clip_norm": 1.0},
    "AdamW, weighted, body frozen first": {
        "optimizer": "adamw",
        "class_weights": "balanced",
        "freeze_epochs": 1,
        "body_lr_factor": 0.5,
        "ema_decay": 0,
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("gpu") / "data", train=24, val=8)


def on(device: str, data: Path, output: Path, **fields: Any) -> TrainConfig:
    settings = {"device": device, "epochs": 2, "log_steps": 1000, "deterministic": False}
    return config(data, output, **{**settings, **fields})


@pytest.fixture
def synchronising_steps_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step raise when it waits for the GPU, but the first one and the last of an epoch.

    Those report, and so they wait.
    """
    advance = Trainer.advance

    def checked(trainer: Trainer, batches: Iterator[DeviceBatch]) -> bool:
        reports = trainer.step == 0 or (trainer.step + 1) % trainer.sampler.steps == 0
        torch.cuda.set_sync_debug_mode("default" if reports else "error")
        try:
            return advance(trainer, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "advance", checked)


@pytest.mark.usefixtures("synchronising_steps_fail")
@pytest.mark.parametrize("name", SETTINGS)
def test_no_step_waits_for_the_gpu(name: str, data: Path, tmp_path: Path) -> None:
    assert rank.run(on("cuda", data, tmp_path / "run", **SETTINGS[name]))


@pytest.mark.usefixtures("synchronising_steps_fail")
def test_ddp_never_syncs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "spread", strategies.Ddp)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 's'}", rank=0, world_size=1)
    try:
        assert rank.run(on("cuda", data, tmp_path / "run"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_gpu_trains_and_predicts_like_a_cpu(data: Path, tmp_path: Path) -> None:
    trained = {}
    for device in ("cuda", "cpu"):
        assert rank.run(on(device, data, tmp_path / device, precision="fp32"))
        checkpoint = newest_valid(tmp_path / device / "checkpoints")
        assert checkpoint is not None
        trained[device] = checkpoint
    weights = {device: saved.state()["model"] for device, saved in trained.items()}
    torch.testing.assert_close(weights["cuda"], weights["cpu"], rtol=0.02, atol=0.002)
    network, info = load_model(trained["cpu"].path)
    index = scan(data / "val", info.classes)
    on_cpu, on_gpu = (
        merged(index, [predict_share(network, info, index, 4, alone(device))])
        for device in (torch.device("cpu"), GPU)
    )
    by_gpu, by_cpu = (torch.from_numpy(p.tally.column("confidence")) for p in (on_gpu, on_cpu))
    torch.testing.assert_close(by_gpu, by_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("size", "ahead"), [(4, [2, 2]), (2, [2, 3, 4, 4])])
def test_evaluation_queues_the_next_batch_before_it_reads_one(
    size: int, ahead: list[int], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = scan(data / "val")
    network = build("cifar_resnet8", len(index.classes)).eval()
    info = ModelInfo("cifar_resnet8", tuple(index.classes), 32, MEAN, STD, 1, {})
    queued, counted = list[int](), list[int]()
    network.register_forward_hook(lambda *_: queued.append(1))
    update = Tally.update

    def counting(self: Tally, *results: Tensor) -> Any:
        counted.append(len(queued))
        return update(self, *results)

    monkeypatch.setattr(Tally, "update", counting)
    predict_share(copy.deepcopy(network), info, index, size, alone(GPU))
    assert counted == ahead
