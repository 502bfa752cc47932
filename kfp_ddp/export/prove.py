"""Agreement of the formats of a bundle with the checkpoint, and their latency."""

import platform
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.export.formats import Predict
from kfp_ddp.export.infra_process import BATCHES, times
from kfp_ddp.pictures.splits import sides_of
from kfp_ddp.training.data.loader import evaluation_batches
from kfp_ddp.training.state.checkpoint import ModelInfo

SAMPLES = 16
# Of the largest logit. Reordered float32 sums differ by about 1e-6, a wrong graph by 1 or more.
TOLERANCE = 1e-4
_SECONDS_EACH = 0.15


class ParityError(KfpDdpError):
    """An exported file does not agree with the checkpoint."""


def real_samples(split: Path, info: ModelInfo) -> Tensor:
    """Return up to `SAMPLES` readable images of a split, evenly spaced; InputError for none."""
    index, _ = sides_of(split.parent, split.name, info.classes, info.config)
    count = min(SAMPLES, len(index))
    spaced = index.only([number * len(index) // count for number in range(count)])
    # Where none of these can be read, the first ones that can.
    for part in (spaced, index):
        for images, *_ in evaluation_batches(part, info.image_size, count, reading=info.reading):
            return images.contiguous()
    raise InputError(f"none of the {len(index)} images in {split} can be read: replace them")


def parity(reference: Predict, others: Mapping[str, Predict], images: Tensor) -> dict[str, Any]:
    """Compare logits on images, the first alone, then all; ParityError above `TOLERANCE`."""
    parts = [images[:1], images if len(images) > 1 else images.repeat(2, 1, 1, 1)]
    expected = torch.cat([reference(part) for part in parts])
    bound = TOLERANCE * max(1.0, float(expected.abs().max()))
    top1 = expected.argmax(1)
    results: dict[str, Any] = {}
    for name, predict in others.items():
        logits = torch.cat([predict(part) for part in parts])
        if logits.shape != expected.shape:
            raise ParityError(
                f"{name} gives logits of shape {list(logits.shape)}, the checkpoint "
                f"{list(expected.shape)}: do not serve it; report the model and the torch version"
            )
        difference = (logits - expected).abs().nan_to_num(float("inf"))
        same = logits.argmax(1) == top1
        worst = float(difference.max())
        if worst > bound:
            raise ParityError(
                f"{name} differs from the checkpoint by {worst:.3g} on validation samples, "
                f"{bound:.3g} is allowed: do not serve it; report the model and the "
                "torch version"
            )
        results[name] = {
            "max_abs_difference": worst,
            "mean_abs_difference": float(difference.mean()),
            "same_top1": float(same.double().mean()),
        }
    return {
        "samples": len(images),
        "batches": [len(part) for part in parts],
        "allowed_abs_difference": bound,
        "formats": results,
    }


def latency(runtimes: Mapping[str, Predict], image_size: int) -> dict[str, Any]:
    """Return milliseconds per call on this machine; a rough measurement, not a benchmark."""
    torch.manual_seed(0)
    results: dict[str, dict[str, Any]] = {name: {} for name in runtimes}
    for size in BATCHES:
        images = torch.randint(0, 256, (size, 3, image_size, image_size), dtype=torch.uint8)
        for name, predict in runtimes.items():
            taken = times(predict, images, _SECONDS_EACH, least=3)
            median = statistics.median(taken)
            results[name][f"batch_{size}"] = {
                "median_ms": round(median, 4),
                "min_ms": round(taken[0], 4),
                "images_per_s": round(size / median * 1e3, 1),
                "calls": len(taken),
            }
    return {
        "machine": f"{platform.machine()}, {machine.cpus():g} CPUs",
        "threads": torch.get_num_threads(),
        "runtimes": results,
    }
