"""The size of a micro-batch by the memory of the devices, for micro_batch_size=auto."""

import dataclasses
import gc

import torch

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.failure import full_memory
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data.loader import pixels_of
from kfp_ddp.training.data.transforms import mixed, size_of_epoch
from kfp_ddp.training.distributed import World
from kfp_ddp.training.model import own_model
from kfp_ddp.training.model.networks import logits
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state.learner import Learner
from kfp_ddp.training.trainer import Loss

_SHARE = 0.95
"""Part of a GPU's memory that the trial may use; NCCL takes some later, beside torch."""


def fit(config: TrainConfig, world: World, index: Index) -> TrainConfig:
    """Lower micro_batch_size to its largest divisor that fits on all ranks, or raise JobError.

    Each rank trains a copy of the network on blank images, without the others, so nothing of the
    run changes. Then they agree on the smallest size.
    """
    first = size = config.micro_batch_size
    on_gpu = world.device.type == "cuda"
    problem = ""
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(_SHARE, world.device)
    while size and (reason := _refusal(config, world, index, size, problem)):
        problem = reason
        size = next((part for part in range(size - 1, 0, -1) if first % part == 0), 0)
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0, world.device)
    # The smallest size fits on all ranks; the rank that needs it names its problem.
    size, rank, problem = min(world.gather((size, world.rank, problem)))
    if not size:
        error = JobError(
            f"{problem}, and micro_batch_size=auto has no smaller size: lower image_size, set "
            "precision=bf16, or use a smaller model"
        )
        world.raise_on_all(error, rank)
    why = f"more do not fit on rank {rank}: {problem}" if size < first else "all images of a rank"
    world.print(f"micro_batch_size={size}: {why}")
    return config.model_copy(update={"micro_batch_size": size})


def _refusal(config: TrainConfig, world: World, index: Index, size: int, before: str) -> str:
    """Return why micro-batches of `size` images do not fit, after another reason; '' if they do."""
    reason = ""
    try:
        _train_copy(config, world, index, size)
    except Exception as error:
        reason = full_memory(error) or before  # a BatchNorm may need two images
        if not reason:
            raise
    own_model.load.cache_clear()  # its loss may have a state
    if config.compile:
        torch.compiler.reset()  # with a size more its shapes would be dynamic
    gc.collect()
    torch.cuda.empty_cache()
    return reason


def _train_copy(config: TrainConfig, world: World, index: Index, size: int) -> None:
    """Do all that takes memory: two steps of two micro-batches each, and an evaluation."""
    alone = dataclasses.replace(world, size=1, control=None)
    random = config.model_copy(update={"pretrained": "false"})
    learner = Learner(random, alone, index.classes, accumulates=True)
    loss = Loss(config, index, world.device)
    kind = pixels_of(config).kind

    def blank(pixels: int) -> torch.Tensor:
        images = torch.zeros(size, 3, pixels, pixels, device=world.device, dtype=kind)
        return images.contiguous(memory_format=torch.channels_last)

    pixels = max(size_of_epoch(config, 0), size_of_epoch(config, config.epochs))
    targets = torch.zeros(size, dtype=torch.int64, device=world.device)
    weights = learner.network.parameters() if world.size > 1 else ()
    # The buckets of DDP, and the batch that follows, as uint8 and normalised.
    besides = [*map(torch.empty_like, weights), blank(pixels), blank(pixels)]
    learner.train()
    for step in range(2):
        for _ in range(2):
            images, share = mixed(blank(pixels), config, 0, 0)
            with learner.autocast:
                value = loss(learner.strategy.replicas(images), targets, share)
            learner.backward(value)
        learner.update(step)
    network = learner.to_evaluate().eval()
    with torch.no_grad(), learner.autocast:
        logits(network, blank(config.image_size), config.test_time_flip)
    del besides
