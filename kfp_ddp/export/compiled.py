"""A form of the `torch.export` program that AOTInductor compiled for the CPU at hand."""

import os
import shutil
import warnings
from pathlib import Path

import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.runtimes import Predict, eager


def write(source: Path, target: Path) -> str:
    """Compile a program to a package; the instruction set that its code needs.

    Raises:
        InputError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise InputError(f"there is no C++ compiler {compiler}: use an image that has one")
    with warnings.catch_warnings():
        # The compiler's own use of what torch is about to retire.
        warnings.simplefilter("ignore")
        program = torch.export.load(source)
        torch._inductor.aoti_compile_and_package(program, package_path=str(target))
    return torch.backends.cpu.get_cpu_capability()


def load(path: Path) -> Predict:
    """A package as a function; on a CPU without its instructions the process dies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eager(torch._inductor.aoti_load_package(str(path)))
