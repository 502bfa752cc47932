"""Speed of a run between two lines of metrics: images, waiting for data, FLOPs, memory."""

import re
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

from kfp_ddp.training import model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World

T = TypeVar("T")

PEAK_TFLOPS = {
    "T4": 65.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Dense half-precision peak of a GPU, from NVIDIA's data sheets."""


class Meter:
    """Measures from one report to the next; pauses (evaluation, saving) are left out."""

    def __init__(self, config: TrainConfig, world: World, num_classes: int) -> None:
        self.config, self.world = config, world
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self.peak = config.peak_tflops or peak_of(name)
        self.flops = training_flops(config, num_classes) if self.peak else 0.0
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to measure at `step`."""
        self._began, self._step, self._waited = time.monotonic(), step, 0.0

    def waits(self, batches: Iterator[T]) -> Iterator[T]:
        """`batches`, with the time it takes to get one counted as waiting for data."""
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self._waited += time.monotonic() - began
            if batch is None:
                return
            yield batch

    def report(self, step: int) -> dict[str, float]:
        """Figures since the last report, by name; starts the next one."""
        seconds = time.monotonic() - self._began
        rate = (step - self._step) * self.config.batch_size / seconds
        figures = {
            "images_per_s": rate,
            "images_per_s_per_device": rate / self.world.size,
            "step_seconds": seconds / max(1, step - self._step),
            "data_wait_fraction": self._waited / seconds,
        }
        if self.peak:
            figures["mfu"] = self.flops * rate / self.world.size / (self.peak * 1e12)
        if self.world.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            figures["memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        self.restart(step)
        return figures


def peak_of(name: str) -> float:
    """`PEAK_TFLOPS` of the GPU that torch calls so; 0 if it is not known."""
    return next((p for known, p in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), 0.0)


def training_flops(config: TrainConfig, num_classes: int) -> float:
    """FLOPs of one training image: forward and backward at the final size, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    size = config.train_image_size or config.image_size
    with torch.device("meta"):
        network = model.build(config.model, num_classes, config.blur_pool)
        image = torch.empty(2, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(network(image).sum())
    return float(counter.get_total_flops()) / 2
