"""Micro-batches on the device one step ahead of their use."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kfp_ddp.training.data import Batch
from kfp_ddp.training.errors import InputError
from kfp_ddp.training.model import normalise


class DeviceBatch(NamedTuple):
    """A micro-batch as the network takes it."""

    images: Tensor
    """float32 [N, 3, S, S], normalised."""
    targets: Tensor
    indices: Tensor
    """int64 [N] on the CPU."""
    skipped: int


def to_device(
    batches: Iterator[Batch], device: torch.device, layout: torch.memory_format
) -> Iterator[DeviceBatch]:
    """Move and normalise batches; on a GPU on a side stream, while the step before computes.

    Bytes travel as uint8, a quarter of float32, from pinned memory.

    Raises:
        InputError: a batch has one, such as an image that cannot be read.
    """
    if device.type != "cuda":
        for batch in batches:
            yield _move(batch, device, layout)
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: DeviceBatch | None = None
    for batch in batches:
        with torch.cuda.stream(side):
            following = _move(batch, device, layout)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream(device).wait_stream(side)
        for tensor in (following.images, following.targets):
            tensor.record_stream(torch.cuda.current_stream(device))
        ahead = following
    if ahead is not None:
        yield ahead


def _move(batch: Batch, device: torch.device, layout: torch.memory_format) -> DeviceBatch:
    if batch.error:
        raise InputError(batch.error)
    images = batch.images.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    ready = normalise(images).contiguous(memory_format=layout)
    return DeviceBatch(ready, targets, batch.indices, batch.skipped)
