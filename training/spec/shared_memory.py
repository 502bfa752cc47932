"""Shared memory, by which loader processes hand batches to their rank."""

import shutil
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.spec.config import TrainConfig

FOLDER = Path("/dev/shm")  # noqa: S108  torch has it there, on Linux alone
PREFETCH = 4
"""Batches that each loader process has ready."""
_USED = 2
"""Batches besides: the one of the step, and the one that follows it."""
_OF_OTHERS = 1 << 30
"""Bytes of a pod for NCCL and others."""
REMEDY = (
    "lower workers, micro_batch_size or batch_size, or give more: shm_size of a job, --shm-size of "
    "docker run"
)


def needed(
    config: TrainConfig, micro: int, validation: int | None, prefetch: int = PREFETCH
) -> int:
    """Return the bytes that a rank's loaders may take; `validation` batches, None if unknown."""
    ahead = config.workers * prefetch + _USED
    evaluated = ahead if validation is None else min(ahead, validation)
    size = config.train_image_size or config.image_size
    pixels = ahead * size**2 + evaluated * config.image_size**2
    return 3 * micro * pixels if config.workers else 0


def size_of_pod(config: TrainConfig, local_ranks: int, ranks: int) -> str:
    """Return the shared memory of a pod of `local_ranks` as a quantity; no less than 2Gi."""
    each = config.batch_size_per_rank or -(-config.batch_size // ranks)
    micro = config.micro_batch_size if config.micro_batch_size > 0 else each
    total = local_ranks * needed(config, micro, None) + _OF_OTHERS
    return f"{max(2, -(-total // (1 << 30)))}Gi"


def prefetch_that_fits(config: TrainConfig, local_ranks: int, validation: int) -> int:
    """Return `PREFETCH`, or as many batches as this machine has room for; raise InputError."""
    if not FOLDER.is_dir():
        return PREFETCH
    free = shutil.disk_usage(FOLDER).free
    micro = config.micro_batch_size
    for prefetch in range(PREFETCH, 0, -1):
        total = local_ranks * needed(config, micro, validation, prefetch)
        if total <= free:
            return prefetch
    raise InputError(
        f"{FOLDER} has {free / 1e6:,.0f} MB free, and {local_ranks} x {config.workers} loader "
        f"processes need {total / 1e6:,.0f} MB for batches of {micro} images: {REMEDY}"
    )
