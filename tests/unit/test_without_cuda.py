import ctypes
import importlib.util
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "images" / "without_cuda.py"
SPEC = importlib.util.spec_from_file_location("without_cuda", FILE)
assert SPEC is not None
assert SPEC.loader is not None
without_cuda = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(without_cuda)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch needs no CUDA")
MACHINES = {"x86_64": 62, "aarch64": 183}


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
    kept, every = (
        {line.split("==")[0] for line in text.splitlines() if "==" in line.split(" ")[0]}
        for text in (without_cuda.small(lock), lock)
    )
    assert {"torch", "torchvision", "numpy", "kfp", "nvidia-cuda-runtime"} <= kept
    assert not {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} & kept
    assert {name.partition("-")[0] for name in every - kept} == {"nvidia", "cuda", "triton"}
