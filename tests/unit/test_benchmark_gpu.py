"""`benchmarks gpu` where there is no GPU: its parts run on the CPU, in small."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import loops, ranks, single
from tests.photographs import write
from tests.serving import free_port
from tests.training_ranks import forked

SMALL: dict[str, Any] = {"device": "auto", "precision": "bf16", "batch_size": 4, "cache_gb": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    write(folder / "train", 4)
    return folder


def test_decoding_and_recording_run_on_the_cpu(root: Path) -> None:
    decoded = single.decoding(str(root), "cpu")
    assert decoded["jpeg_gpu_images_per_s"] > 0
    assert single.recording("cifar_resnet8", 16, "cpu")["graph_vs_eager_small_batch"] > 0


@pytest.mark.slow
def test_two_ranks_time_their_exchange(root: Path, tmp_path: Path) -> None:
    fields = SMALL | {"strategy": "fsdp"}
    given = (str(tmp_path / "answer"), free_port(), str(root), "cifar_resnet8", 16, fields)
    processes = [forked(ranks._rank, number, *given) for number in (0, 1)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    figures = ranks._read(tmp_path / "answer")
    assert figures["step"] > figures["all_reduce"] > 0
    assert figures["bytes"] == pytest.approx(4 * 78_000, rel=0.05), "those of all shards"


def test_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(root: Path, name: str, size: int, steps: int, fields: Any, same: bool) -> Any:
        def out_of_memory() -> None:
            if fields["batch_size"] > 64:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return out_of_memory

    monkeypatch.setattr(loops, "steps_of_ours", steps)
    assert loops.fitting("", "resnet50", 224, {"batch_size": 256}) == 64


@pytest.mark.soak
def test_all_parts_run(capfd: pytest.CaptureFixture[str]) -> None:
    measurement = gpu.Measurement("resnet18", 32, 1.0, time.perf_counter() + 600)
    figures = measurement.all(8, 32)
    assert {"batch", "real_vs_synthetic", "vs_torchvision", "compile_vs_eager"} <= set(figures)
    assert {"graph_vs_eager_small_batch", "jpeg_gpu_vs_core"} <= set(figures)
    assert "left out" not in capfd.readouterr().out
