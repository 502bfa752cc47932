"""What this machine has to train with."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil


@dataclass(frozen=True)
class Machine:
    """What counts for a training."""

    cores: int
    """CPU cores that this process may use, hyperthreads counted once."""
    memory_gb: float
    device: Literal["cpu", "cuda", "mps"]
    gpus: int
    """Devices of that kind; 0 where it is the CPU."""

    def __str__(self) -> str:
        kinds = {"cpu": "no GPU", "cuda": f"{self.gpus} GPU(s)", "mps": "Apple GPU"}
        return f"{self.cores} cores, {self.memory_gb:.0f} GB, {kinds[self.device]}"


def here() -> Machine:
    """This machine, seen without torch, whose import takes seconds."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    cores = max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
    memory_gb = psutil.virtual_memory().total / 2**30
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus:
        return Machine(cores, memory_gb, "cuda", gpus)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Machine(cores, memory_gb, "mps", 1)
    return Machine(cores, memory_gb, "cpu", 0)
