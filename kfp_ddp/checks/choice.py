"""Choose the settings of a training that fits a machine and its photographs."""

import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from kfp_ddp.checks.form import SUBJECTS

MINUTES = 15
"""Target duration of a training."""
STEPS = 1500
"""Target number of steps from random weights, at a batch of `BATCH`."""
BATCH = 32
MOST_EPOCHS = 60
LEFT = {"model": "auto", "epochs": 0, "batch_size": 0}
"""Values of form parameters that are not set."""
SHARE = 0.7
"""Fraction of its speed that a core has when all cores are used."""


@dataclass(frozen=True)
class Machine:
    """Resources for a training."""

    cores: int
    """Physical CPU cores that this process may use."""
    memory_gb: float
    device: Literal["cpu", "cuda", "mps"]
    gpus: int
    """Number of GPUs; 0 for the CPU."""

    def __str__(self) -> str:
        kinds = {"cpu": "no GPU", "cuda": f"{self.gpus} GPU(s)", "mps": "Apple GPU"}
        return f"{self.cores} cores, {self.memory_gb:.0f} GB, {kinds[self.device]}"


def this_machine() -> Machine:
    """Return this machine, without the slow import of torch."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    cores = max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
    memory_gb = psutil.virtual_memory().total / 2**30
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus:
        return Machine(cores, memory_gb, "cuda", gpus)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Machine(cores, memory_gb, "mps", 1)
    return Machine(cores, memory_gb, "cpu", 0)


class Network(NamedTuple):
    """A network at an image size, and how fast it trains."""

    model: str
    size: int
    rate: float
    """Images per second on a CPU core or a GPU."""


# The best first. CPU: a Xeon core with AVX-512 (VNNI). GPU: slow, like that of a laptop.
NETWORKS: dict[str, tuple[Network, ...]] = {
    "cpu": (
        Network("resnet18", 224, 5),
        Network("resnet18", 128, 14),
        Network("resnet18", 64, 31),
        Network("cifar_resnet20", 32, 136),
        Network("cifar_resnet8", 32, 350),
    ),
    "cuda": (Network("resnet18", 224, 400), Network("resnet18", 128, 1000)),
    "mps": (Network("resnet18", 224, 120), Network("resnet18", 128, 300)),
}


@dataclass(frozen=True)
class Photographs:
    """Statistics of the images before a training."""

    train: int
    val: int
    classes: int
    short_side: int
    """Median, in pixels; 0 if unknown."""
    notes: tuple[str, ...] = ()
    """Unusual properties."""

    def __str__(self) -> str:
        return f"{self.train + self.val:,} images in {self.classes} classes"


@dataclass(frozen=True)
class Choice:
    """Arguments of the pipeline."""

    arguments: dict[str, Any]
    ranks: int
    minutes: float
    """Estimated duration of the training; 0 if unknown."""


def choose(
    photographs: Photographs, machine: Machine, requested: Mapping[str, Any], ranks: int = 0
) -> Choice:
    """Return settings for a machine and its photographs; requested settings take precedence.

    Args:
        photographs: Images to train on.
        machine: Machine to train on.
        requested: Arguments of the pipeline.
        ranks: Number of processes; 0 to choose.
    """
    requested = {name: value for name, value in requested.items() if LEFT.get(name) != value}
    processes = ranks or requested.get("job", {}).get("nproc_per_node")
    ranks = processes or _ranks(machine, photographs.train)
    always: dict[str, Any] = {"gate": {}, "job": {"nproc_per_node": ranks}}
    always["training"] = {"log_steps": 5, "cache_gb": 4.0}
    if machine.device == "mps" and ranks == 1:
        always["training"] |= {"device": "mps", "strategy": "single"}
    if requested.get("training", {}).get("init_from") and "recipe" not in requested:
        always["recipe"] = "finetune"
    if (merged(always, requested).get("recipe") or "none") != "none":
        return Choice(merged(always, requested), ranks, 0.0)
    chosen, minutes = _from_random_weights(photographs, machine, requested, ranks)
    return Choice(merged(merged(always, chosen), requested), ranks, minutes)


def _from_random_weights(
    photographs: Photographs, machine: Machine, requested: Mapping[str, Any], ranks: int
) -> tuple[dict[str, Any], float]:
    """Return network, image size, epochs and batch, and their duration in minutes."""
    images = max(1, photographs.train)
    speed = machine.gpus or machine.cores * SHARE
    epochs = requested.get("epochs") or min(max(math.ceil(STEPS * BATCH / images), 10), MOST_EPOCHS)
    network = _network(photographs, machine, requested, images * epochs / speed)
    minutes = images * epochs / speed / network.rate / 60 if network.rate else 0.0
    if minutes > 2 * MINUTES and not requested.get("epochs"):
        fewer = max(3, int(epochs * MINUTES / minutes))
        minutes, epochs = minutes * fewer / epochs, fewer
    batch = max(min(BATCH, images // 8), min(8, images // 2))
    arguments = {
        "model": network.model,
        "epochs": epochs,
        "batch_size": max(1, batch // ranks) * ranks,
        "training": {
            "learning_rate": 0.05,
            "image_size": network.size,
            "crop_min_area": 0.35,
            "workers": min(4, machine.cores // ranks) if machine.gpus else 0,
        },
    }
    return arguments, minutes


def _ranks(machine: Machine, images: int) -> int:
    """Return a rank per GPU or core, limited by memory (2 GB each) and images."""
    most = machine.gpus or min(machine.cores, 4, int(machine.memory_gb / 2))
    return max(1, min(most, images // 16))


def _network(
    photographs: Photographs, machine: Machine, requested: Mapping[str, Any], unit_seconds: float
) -> Network:
    """Return the best network within the target duration that fits the requested settings.

    Args:
        photographs: Images; they are not enlarged much.
        machine: Machine to train on.
        requested: Arguments of the pipeline.
        unit_seconds: Duration of a network that trains one image per second.
    """
    model, size = requested.get("model", "auto"), requested.get("training", {}).get("image_size")
    known = [
        network
        for network in NETWORKS[machine.device]
        if model in ("auto", network.model) and size in (None, network.size)
    ]
    if not known:
        size = size or min(one.size for one in NETWORKS[machine.device][:2])
        model = model if model != "auto" else NETWORKS[machine.device][0].model
        return Network(model, size, 0.0)
    largest = 1.5 * photographs.short_side or math.inf
    fitting = [one for one in known if one.size <= largest] or known[-1:]
    quick = (one for one in fitting if unit_seconds / one.rate <= MINUTES * 60)
    return next(quick, fitting[-1])


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a pipeline merged setting by setting; `over` wins."""
    both = {**under, **over}
    for name in SUBJECTS.keys() & both.keys():
        both[name] = {**under.get(name, {}), **over.get(name, {})}
    return both
