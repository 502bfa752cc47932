"""Choose the settings of a training that fit its images and the hardware.

The image size depends on the hardware and on the images' size, never on their number: with more
images there are fewer epochs.
"""

import itertools
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from kfp_ddp.core import machine as limits
from kfp_ddp.core.text import plural
from kfp_ddp.pictures.reading import Fit
from kfp_ddp.plan.form import SUBJECTS
from kfp_ddp.training.spec.network_settings import SMALL_RESNETS

MINUTES = 15.0
"""Target duration of a training on this machine."""
JOB_MINUTES = 120.0
"""The same as a job of a cluster."""
SIZES = (224, 160, 128, 96, 64)
SMALLEST = SIZES[-1]
"""Image size from which on networks of torchvision are chosen."""
BATCH = {"cpu": 32, "mps": 64, "cuda": 64}
"""Images in a step, on the CPU over all ranks, otherwise for each GPU."""
UNSET: dict[str, Any] = {"recipe": "auto", "model": "auto", "epochs": 0, "pretrained": "auto"}
"""Values of form parameters that are not set."""
SHARE = 0.85
"""Fraction of its speed that a core has when all cores are used."""
STEPS = 8
"""Steps of an epoch at least, so few images make a small batch."""
FEW = 8
"""Images in a step of a GPU below which it mostly waits."""
LARGE = 20_000
"""Images from which on a GPU trains a ResNet-50 from random weights."""


@dataclass(frozen=True)
class Machine:
    """Resources for a training."""

    cores: int
    """Physical CPU cores that this process may use, or those of all pods."""
    memory_gb: float
    device: Literal["cpu", "cuda", "mps"]
    gpus: int
    """Number of GPUs; 0 for the CPU."""
    pods: int = 0
    """Number of pods of a job, which have all of these together; 0 for this machine."""
    core_speed: float = 1.0
    """Speed of a core in computing, relative to that of `COSTS`."""

    def __str__(self) -> str:
        kinds = {"cpu": "no GPU", "cuda": f"{self.gpus} GPU(s)", "mps": "Apple GPU"}
        if self.pods:
            return f"{self.pods} pod(s) with about {self.cores} cores and {kinds[self.device]}"
        return f"{self.cores} cores, {self.memory_gb:.0f} GB, {kinds[self.device]}"

    @property
    def minutes(self) -> float:
        """Target duration of a training."""
        return JOB_MINUTES if self.pods else MINUTES

    @property
    def speed(self) -> float:
        """Speed in cores of `COSTS`; a GPU by order of magnitude, like that of a laptop."""
        cpu = self.cores * SHARE * self.core_speed
        return {"cpu": cpu, "cuda": 100.0 * self.gpus, "mps": 12.0}[self.device]


def this_machine() -> Machine:
    """Return this machine, without torch and other packages that the launcher's image lacks."""
    cores = limits.cores()
    memory_gb = limits.memory() / 2**30
    gpus = count_gpus()
    if gpus:
        return Machine(cores, memory_gb, "cuda", gpus)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Machine(cores, memory_gb, "mps", 1)
    return Machine(cores, memory_gb, "cpu", 0, core_speed=_core_speed())


def _core_speed() -> float:
    """Return `Machine.core_speed` of this machine, by the width of its vector instructions."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return WITHOUT_AVX512
    return 1.0 if " avx512f " in flags else WITHOUT_AVX512


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that CUDA shows, without the slow import of torch."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0," * present).split(",")
    # CUDA ignores all after the first invalid one.
    shown = itertools.takewhile(lambda name: name.strip() not in ("", "-1"), visible)
    return min(present, len(list(shown)))


class Cost(NamedTuple):
    """Core seconds for an image in a training step: a fixed part, and a part at 224 px."""

    fixed: float
    at_224: float

    def at(self, size: int) -> float:
        """Return the core seconds at an image size."""
        return self.fixed + self.at_224 * (size / 224) ** 2


COSTS = {
    "resnet18": Cost(0.0050, 0.068),
    "resnet34": Cost(0.0095, 0.150),
    "resnet50": Cost(0.0080, 0.250),
    "mobilenet_v3_large": Cost(0.0050, 0.024),
    "cifar_resnet20": Cost(0.0008, 0.093),
    "cifar_resnet14": Cost(0.0006, 0.064),
    "cifar_resnet8": Cost(0.0004, 0.032),
}
"""Measured on a Zen 5 core with AVX-512, fp32."""
WITHOUT_AVX512 = 0.5
"""Speed of a core without it, measured on a Zen core: training takes 1.7 to 2.3 times as long."""
EVALUATION = 0.3
"""Cost of an image in an evaluation, as a fraction of that in training."""
FINISH = 0.0005
"""Core seconds to crop and resize a decoded image."""
AUGMENTATION = Cost(0.0002, 0.0014)
"""The same for two operations of RandAugment."""
DECODING = {"JPEG": 0.0045, "WEBP": 0.013}
"""Core seconds to decode a megapixel, on the same core."""
OTHERS = 0.024
"""The same for PNG and other formats."""
EPOCH_SECONDS = 0.4
"""Saving and reporting after an epoch."""


class Plan(NamedTuple):
    """What depends on whether a training starts from existing weights."""

    images_seen: int
    """Images in all epochs that a training needs, and that the image size must allow within the
    target duration; few images are seen in more epochs."""
    min_epochs: int
    max_epochs: int
    floor_epochs: int
    """Fewest epochs, even if they exceed the target duration."""


AVERAGED = 0.07
"""Fraction of the steps that an average of the weights reaches back."""
RANDOM = Plan(images_seen=100_000, min_epochs=30, max_epochs=150, floor_epochs=3)
WEIGHTS = Plan(images_seen=15_000, min_epochs=5, max_epochs=15, floor_epochs=2)


LOST = 0.2
"""Least part of most pictures that is worth a note: of 4:3 it is a quarter, of 3:2 a third."""


@dataclass(frozen=True)
class Photographs:
    """Statistics of the images before a training."""

    train: int
    val: int
    classes: int
    short_side: int
    """Median, in pixels; 0 if unknown."""
    decoding: float = 0.002
    """Mean core seconds to decode an image."""
    notes: tuple[str, ...] = ()
    """Unusual properties."""

    def __str__(self) -> str:
        return f"{self.train + self.val:,} images in {self.classes} classes"


def statistics_of(pictures: Sequence[tuple[str, int, int]]) -> tuple[int, float]:
    """Return the median short side and the mean seconds to decode of (format, width, height)."""
    if not pictures:
        return 0, OTHERS
    decoding = [
        width * height / 1e6 * DECODING.get(kind, OTHERS) for kind, width, height in pictures
    ]
    short_sides = [min(width, height) for _, width, height in pictures]
    return int(median(short_sides)), fmean(decoding)


def cut_off(pictures: Sequence[tuple[str, int, int]], fit: Fit) -> Iterator[str]:
    """Yield that the square in the middle leaves out much of most (format, width, height)."""
    if fit != "crop" or not pictures:
        return
    lost = 1 - median(min(sides) / max(1, *sides) for _, *sides in pictures)
    if lost >= LOST:
        yield (
            f"{lost:.0%} of the longer side of most pictures is cut off: training={{fit: pad}} "
            "shows all of them, between bars"
        )


@dataclass(frozen=True)
class Choice:
    """Arguments of the pipeline."""

    arguments: dict[str, Any]
    ranks: int
    minutes: float
    """Estimated duration of the training; 0 if unknown."""
    why: str = ""
    """The reasons for the choice, in one line; '' if nothing was chosen."""
    warning: str = ""
    """Why the images do not suit the hardware, and what to do; '' if they do."""


def choose(
    photographs: Photographs,
    machine: Machine,
    requested: Mapping[str, Any],
    ranks: int = 0,
    weights: bool = False,
) -> Choice:
    """Return settings for a machine and its photographs; requested settings take precedence.

    With 0 `ranks` their number is chosen; `weights`: the training starts from existing ones.
    """
    requested = {name: value for name, value in requested.items() if UNSET.get(name) != value}
    processes = ranks or requested.get("job", {}).get("nproc_per_node")
    single = requested.get("training", {}).get("strategy") == "single"
    ranks = processes or (1 if single else _ranks(machine, photographs.train))
    always: dict[str, Any] = {}
    if not machine.pods:
        always["job"] = {"nproc_per_node": ranks}
        always["training"] = {"log_steps": 5, "cache_gb": 4.0}
        if machine.device == "mps" and ranks == 1:
            always["training"] |= {"device": "mps", "strategy": "single"}
    if (requested.get("recipe") or "none") != "none":
        return Choice(merged(always, requested), ranks, 0.0)
    weights = weights or requested.get("pretrained", "false") != "false"
    always["recipe"] = "finetune" if weights else "none"
    sized = _Sized(photographs, machine, requested, ranks, weights)
    chosen = merged(always, sized.arguments())
    everything = merged(chosen, requested)
    minutes = sized.seconds(sized.epochs) / 60
    return Choice(everything, ranks, minutes, sized.why(), sized.warning())


class _Sized:
    """Network, image size, batch and epochs of a training."""

    def __init__(
        self,
        photographs: Photographs,
        machine: Machine,
        requested: Mapping[str, Any],
        ranks: int,
        weights: bool,
    ) -> None:
        self.photographs = photographs
        self.machine = machine
        self.weights = weights
        self.images = max(1, photographs.train)
        self.plan = WEIGHTS if weights else RANDOM
        training = requested.get("training", {})
        self.weighted = "sampling" in training
        self.sgd = training.get("optimizer", "sgd") == "sgd"
        size = training.get("image_size", 0)
        known_size = size or photographs.short_side or SMALLEST
        tiny = known_size < SMALLEST and not weights
        self.model = requested.get("model", "") or self._network(tiny)
        self.size = size or self._size(tiny)
        per_rank = training.get("batch_size_per_rank", 0)
        requested_batch = per_rank * ranks or training.get("batch_size")
        self.batch = requested_batch or self._batch(training.get("micro_batch_size"), ranks)
        self.each = 0 if requested_batch else self.batch // ranks
        self.wanted = self._wanted_epochs()
        self.requested_epochs = int(requested.get("epochs") or 0)  # KFP has floats
        self.epochs = self.requested_epochs or self._fitting_epochs()

    def _network(self, tiny: bool) -> str:
        if tiny:
            return "cifar_resnet20"
        rich = self.weights or self.images >= LARGE
        if rich and self.machine.device == "cuda":
            return "resnet50"
        return "resnet18"

    def _batch(self, micro: Any, ranks: int) -> int:
        """Return a batch for the hardware and the images, which ranks and their parts divide."""
        most = BATCH[self.machine.device] * max(1, self.machine.gpus)
        least = min(4 if self.weights else 8, self.images // 2)
        batch = max(min(most, self.images // STEPS), least)
        part = 1 if not micro or micro == "auto" else micro
        unit: int = ranks * part
        return max(1, batch // unit) * unit

    def _wanted_epochs(self) -> int:
        """Return the epochs that the images need, however long they take."""
        epochs = math.ceil(self.plan.images_seen / self.images)
        return min(max(epochs, self.plan.min_epochs), self.plan.max_epochs)

    def _fitting_epochs(self) -> int:
        """Return the wanted epochs, or fewer that fit the target duration."""
        least = min(self.plan.floor_epochs, self.wanted)
        budget = self.machine.minutes * 60
        for epochs in range(self.wanted, least, -1):
            if self.seconds(epochs) <= budget:
                return epochs
        return least

    def _size(self, tiny: bool) -> int:
        """Return the largest image size that the images and the hardware allow."""
        short = self.photographs.short_side
        small = 0 < short < SMALLEST
        if tiny or (small and self.model in SMALL_RESNETS):
            return 48 if short >= 48 else 32
        cost = COSTS.get(self.model)
        if cost is None:
            return 224 if self.machine.gpus else 128
        seconds = self.machine.minutes * 60 * self.machine.speed / self.plan.images_seen
        for size in SIZES:
            enlarges = short and size > 1.15 * short
            if not enlarges and cost.at(size) <= seconds:
                return size
        return SMALLEST

    def seconds(self, epochs: int) -> float:
        """Return the estimated duration of the training; 0 if the network's speed is unknown."""
        cost = COSTS.get(self.model)
        if cost is None:
            return 0.0
        images = self.images + EVALUATION * self.photographs.val
        computing = epochs * images * cost.at(self.size) / self.machine.speed
        decoding = self.photographs.decoding * (self.images + self.photographs.val)
        finish = FINISH + self._augmented(epochs) * AUGMENTATION.at(self.size)
        loading = (decoding + epochs * images * finish) / (self.machine.cores * SHARE)
        if self.machine.gpus:  # the loader works meanwhile
            return max(computing, loading) + epochs * EPOCH_SECONDS
        return computing + loading + epochs * EPOCH_SECONDS

    def _augmented(self, epochs: int) -> bool:
        """Return whether few images are seen often enough to be remembered one by one."""
        return not self.weights and epochs >= self.plan.min_epochs

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the pipeline."""
        training: dict[str, Any] = {"image_size": self.size, "crop_min_area": 0.35}
        training |= {"keep_best": True, "early_stop_epochs": max(10, self.epochs // 3)}
        if not self.weights:
            training |= self._of_random_weights()
        training["workers"] = min(4, self.machine.cores // 2) if self.machine.gpus else 0
        training["batch_size"] = self.batch
        return {"model": self.model, "epochs": self.epochs, "training": training}

    def _of_random_weights(self) -> dict[str, Any]:
        steps = self.epochs * max(1, self.images // self.batch)
        training: dict[str, Any] = {
            "class_weights": "none" if self.weighted else "sqrt",
            "randaugment": 9 if self._augmented(self.epochs) else 0,
            "ema_decay": round(1 - 1 / max(10, AVERAGED * steps), 5),
        }
        if self.sgd:
            training["learning_rate"] = min(0.8, 0.05 * self.batch / BATCH["cpu"])
            training["weight_decay"] = 5e-4
        return training

    def why(self) -> str:
        """Return the reasons for the choice."""
        short = self.photographs.short_side
        minutes = self.machine.minutes
        parts = [f"short sides of {short} px" if short else "images of unknown size"]
        parts.append("existing weights" if self.weights else "random weights")
        if not self.requested_epochs and 0 < self.seconds(self.epochs) <= minutes * 60:
            epochs = str(self.epochs)
            if self.epochs < self.wanted:
                epochs = f"{self.epochs} of {self.wanted}"
            parts.append(f"{epochs} epochs fit {minutes:.0f} min")
        return "; ".join(parts)

    def warning(self) -> str:
        """Return `Choice.warning`: the chosen batch may be too small for the GPUs."""
        gpus = self.machine.gpus
        fits = max(1, self.images // STEPS // FEW)
        if not 0 < self.each < FEW or gpus <= fits:
            return ""
        return (
            f"{self.images:,} images to train on give each of {gpus} GPUs {self.each} in a step, "
            f"so they mostly wait: lower nodes or gpus_per_node to {plural(fits, 'GPU')} in all"
        )


def _ranks(machine: Machine, images: int) -> int:
    """Return a rank per GPU or core, limited by memory (2 GB each) and images."""
    most = machine.gpus or min(machine.cores, 4, int(machine.memory_gb / 2))
    return max(1, min(most, images // 16))


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a pipeline merged setting by setting; `over` wins."""
    both = {**under, **over}
    for name in SUBJECTS.keys() & both.keys():
        both[name] = {**under.get(name, {}), **over.get(name, {})}
    return both
