"""Division of a global batch among the ranks."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.spec.config import TrainConfig


def divide(
    config: TrainConfig, images: int, ranks: int, before: Mapping[str, Any] | None
) -> tuple[int, int]:
    """Return (batch_size, micro_batch_size) of a run; raise InputError for a misfit.

    With the configuration `before` of the checkpoint to resume from, the run sees its batches.
    """
    check_one_each(images, ranks)
    batch = _global_batch(config, images, ranks, before)
    if images < batch:
        raise InputError(f"batch_size={batch} but only {images} training images; lower batch_size")
    micro = max(0, config.micro_batch_size)
    if not micro:
        micro = _earlier_micro_batch(batch, ranks, before)
    check_divides(batch, micro, ranks)
    return batch, micro or batch // ranks


def _global_batch(
    config: TrainConfig, images: int, ranks: int, before: Mapping[str, Any] | None
) -> int:
    """Return the batch that was set, that of the earlier run, or what the images allow."""
    if config.is_set("batch_size") and not config.batch_size_per_rank:
        return config.batch_size
    if before:
        return int(before["batch_size"])
    if config.batch_size_per_rank:
        return config.batch_size_per_rank * ranks
    # The default is lowered to a multiple that all ranks and micro-batches share.
    unit = ranks * max(1, config.micro_batch_size)
    units = min(config.batch_size, images) // unit
    return max(1, units) * unit


def _earlier_micro_batch(batch: int, ranks: int, before: Mapping[str, Any] | None) -> int:
    """Return the micro-batch of the earlier run if it divides the same batch; 0 if none does."""
    if not before or batch != before["batch_size"]:
        return 0
    earlier = int(before["micro_batch_size"])
    # More ranks than micro-batches: each rank needs at least one.
    return earlier if batch // earlier >= ranks else 0


def check_single(config: TrainConfig, ranks: int) -> None:
    """Raise InputError for several ranks of a strategy for one."""
    if config.strategy == "single" and ranks > 1:
        raise InputError(f"strategy=single but {ranks} ranks: launch one, or use strategy=ddp")


def check_one_each(images: int, ranks: int) -> None:
    """Raise InputError unless there is an image for each rank."""
    if images < ranks:
        raise InputError(
            f"{ranks} ranks but only {images} training images; use at most {images} ranks"
        )


def check_divides(batch: int, micro: int, ranks: int) -> None:
    """Raise InputError unless all ranks get the same number of images."""
    micro = max(0, micro)
    unit = ranks * (micro or 1)
    if batch % unit:
        size = f" with micro_batch_size={micro}" if micro else ""
        near = max(unit, round(batch / unit) * unit)
        raise InputError(
            f"batch_size={batch} cannot be divided evenly among {ranks} ranks{size}; "
            f"use a multiple of {unit}, for example {near}"
        )
