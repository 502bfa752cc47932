"""Which training fits a machine and a folder of photographs: what nobody set is chosen here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kfp_ddp.local.machine import Machine
from kfp_ddp.pipelines.form import merged

MINUTES = 15
"""Of training, where there is a choice."""
STEPS = 1500
"""That a network from random weights should have, at a batch of `BATCH`."""
BATCH = 32
MOST_EPOCHS = 60
LEFT = {"model": "auto", "epochs": 0, "batch_size": 0}
"""Boxes of the form as nobody set them."""
SHARE = 0.7
"""Of its rate that a core keeps beside the others."""


class Network(NamedTuple):
    """A network at an image size, and how fast it trains."""

    model: str
    size: int
    rate: float
    """Images a second on a core of a CPU, or on a GPU."""


# The better first. CPU: one core of a Xeon with AVX-512 (VNNI); GPUs: low, as a laptop's are.
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
    """What is known of the images before a training."""

    train: int
    val: int
    classes: int
    short_side: int
    """Of a usual image, in pixels; 0 where it is not known."""
    notes: tuple[str, ...] = ()
    """What is odd about them."""

    def __str__(self) -> str:
        return f"{self.train + self.val:,} images in {self.classes} classes"


@dataclass(frozen=True)
class Choice:
    """Arguments of the pipeline, and what they are in words."""

    arguments: dict[str, Any]
    ranks: int
    minutes: float
    """Estimate of the training; 0 where nothing is known of the network."""


def choose(
    photographs: Photographs, machine: Machine, given: Mapping[str, Any], ranks: int = 0
) -> Choice:
    """Settings for what is there, under those that were given.

    Args:
        photographs: What to train on.
        machine: What to train with.
        given: Arguments of the pipeline; none of them is changed.
        ranks: Processes; 0 to choose.
    """
    given = {name: value for name, value in given.items() if LEFT.get(name) != value}
    asked = ranks or given.get("job", {}).get("nproc_per_node")
    ranks = asked or _ranks(machine, photographs.train)
    always: dict[str, Any] = {"gate": {}, "job": {"nproc_per_node": ranks}}
    always["training"] = {"log_steps": 5, "cache_gb": 4.0}
    if machine.device == "mps" and ranks == 1:
        always["training"] |= {"device": "mps", "strategy": "single"}
    if given.get("training", {}).get("init_from") and "recipe" not in given:
        always["recipe"] = "finetune"
    if (merged(always, given).get("recipe") or "none") != "none":
        return Choice(merged(always, given), ranks, 0.0)
    chosen, minutes = _from_random_weights(photographs, machine, given, ranks)
    return Choice(merged(merged(always, chosen), given), ranks, minutes)


def _from_random_weights(
    photographs: Photographs, machine: Machine, given: Mapping[str, Any], ranks: int
) -> tuple[dict[str, Any], float]:
    """Network, image size, epochs and batch, and minutes that they take."""
    images = max(1, photographs.train)
    speed = machine.gpus or machine.cores * SHARE
    epochs = given.get("epochs") or min(max(math.ceil(STEPS * BATCH / images), 10), MOST_EPOCHS)
    network = _network(photographs, machine, given, images * epochs / speed)
    minutes = images * epochs / speed / network.rate / 60 if network.rate else 0.0
    if minutes > 2 * MINUTES and not given.get("epochs"):
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
    """A process for each GPU or core, as far as memory (two gigabytes each) and images go."""
    most = machine.gpus or min(machine.cores, 4, int(machine.memory_gb / 2))
    return max(1, min(most, images // 16))


def _network(
    photographs: Photographs, machine: Machine, given: Mapping[str, Any], unit_seconds: float
) -> Network:
    """The best network that fits the time, of those that agree with what was given.

    Args:
        photographs: Of which no image is enlarged much.
        machine: What to train with.
        given: Arguments of the pipeline.
        unit_seconds: Seconds that a network of one image a second would take.
    """
    model, size = given.get("model", "auto"), given.get("training", {}).get("image_size")
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
