"""Trainings without CUDA, and on an Apple GPU, for whose memory and limits `Apple` stands in."""

import ctypes
import functools
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import distributed, rank
from kfp_ddp.training.state.checkpoint import load_model
from tests.training_ranks import config, dataset, run

APPLE = torch.device("mps")
FILE = Path(__file__).parents[3] / "images" / "without_cuda.py"
SPEC = importlib.util.spec_from_file_location("without_cuda", FILE)
assert SPEC is not None
assert SPEC.loader is not None
without_cuda = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(without_cuda)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch needs no CUDA")
MACHINES = {"x86_64": 62, "aarch64": 183}


class Apple(TorchFunctionMode):
    """Lets the CPU compute what is meant for an Apple GPU, and refuses what that cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        if APPLE in [one for one in given if isinstance(one, torch.device)]:
            self.moved += 1
            doubles = [one for one in given if isinstance(one, torch.Tensor)]
            if torch.float64 in [*given, *(one.dtype for one in doubles)]:
                raise TypeError("the MPS framework doesn't support float64")
            args = tuple(_cpu(one) for one in args)
            kwargs = {name: _cpu(one) for name, one in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


def _cpu(one: Any) -> Any:
    return torch.device("cpu") if isinstance(one, torch.device) else one


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", functools.cache(lambda: True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: None)


@pytest.mark.parametrize("device", ["auto", "mps"])
def test_one_rank_uses_the_apple_gpu(apple: None, tmp_path: Path, device: str) -> None:
    assert distributed._device(run(tmp_path, device=device), 0, 1, 1) == APPLE


def test_several_ranks_use_the_cpu_by_default(apple: None, tmp_path: Path) -> None:
    assert distributed._device(run(tmp_path), 0, 2, 2).type == "cpu"
    with pytest.raises(InputError, match="an Apple GPU trains with one rank, not 2: start one"):
        distributed._device(run(tmp_path, device="mps"), 0, 2, 2)


def test_missing_apple_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this machine has no Apple GPU: set device=cpu"):
        distributed._device(run(tmp_path, device="mps"), 0, 1, 1)


def test_training_avoids_float64_on_an_apple_gpu(apple: None, tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", train=16, val=4, classes=2)
    fields = {"device": "mps", "strategy": "single", "deterministic": False}
    with Apple() as gpu:
        assert rank.run(config(data, tmp_path / "run", **fields))
    assert gpu.moved > 8, "batches, network and sums went to the device"
    _, info = load_model(next((tmp_path / "run" / "checkpoints").glob("step-*")))
    assert info.classes == ("class0", "class1")


@on_linux
def test_stub_library_loads_with_its_names(tmp_path: Path) -> None:
    names = ["cublasCreate_v2", "cublasDestroy_v2", *(f"cublas{n}" for n in range(3000))]
    content = without_cuda.shell("libcublas.so.13", "V1", names, MACHINES[platform.machine()])
    (tmp_path / "libcublas.so.13").write_bytes(content)
    loaded = ctypes.CDLL(str(tmp_path / "libcublas.so.13"), mode=os.RTLD_NOW)
    assert all(hasattr(loaded, name) for name in names)
    assert not hasattr(loaded, "cublasUnknown")


@on_linux
def test_linked_libraries_of_torch_are_read() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    needed, undefined = without_cuda.linked(library.read_bytes())
    assert "libc10.so" in needed
    assert needed["libc.so.6"].startswith("GLIBC_")
    assert "malloc" in undefined
    assert "cublasCreate_v2" not in undefined


def test_lock_without_cuda_keeps_all_other_packages() -> None:
    lock = (FILE.parents[1] / "requirements.lock").read_text()
    remaining, every = (
        {line.split("==")[0] for line in text.splitlines() if "==" in line.split(" ")[0]}
        for text in (without_cuda.small(lock), lock)
    )
    assert {"torch", "torchvision", "numpy", "kfp", "nvidia-cuda-runtime"} <= remaining
    assert not {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} & remaining
    assert {name.partition("-")[0] for name in every - remaining} == {"nvidia", "cuda", "triton"}
