"""The network of a run on two blank images, before time is spent on the real ones."""

import random

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import model, own_model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.initial_weights import initialise
from kfp_ddp.training.transforms import size_of_epoch


def try_out(config: TrainConfig, classes: tuple[str, ...]) -> None:
    """Build the network, begin with its weights, and compute at each size that the run has.

    Raises:
        InputError: what fails, or gives no logits of as many classes; one line.
    """
    network = model.of(config, len(classes))
    if config.init_from:
        initialise(network, config, classes, say=False)
    training = {size_of_epoch(config, 0), size_of_epoch(config, config.epochs)}
    network.eval()
    for size in sorted({*training, config.image_size}):
        with torch.no_grad():
            _logits(network, config, len(classes), size)
    own = None if config.script else own_model.of(config)
    if own:
        network.train()
        logits = _logits(network, config, len(classes), max(training))
        loss = own.lost(logits, torch.zeros(2, dtype=torch.int64)) if own.loss else logits.sum()
        _refuse_unused(network, loss)
        if own.optimizer:
            own.scheduled(network, config, config.learning_rate)
        if own.transforms:
            image = torch.zeros(3, max(training), 2 * max(training), dtype=torch.uint8)
            own.transformed(image, max(training), random.Random(0))


def _logits(network: nn.Module, config: TrainConfig, classes: int, size: int) -> Tensor:
    """What the network says of two blank images."""
    name = config.model
    try:
        found: Tensor = network(torch.zeros(2, 3, size, size))
    except Exception as error:
        if config.model_code:
            what = own_model.raised(name, error)
            raise InputError(f"model={name} on images of {size} px {what}") from error
        raise model.cannot_take(name, size, error) from error
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != [2, classes] or not found.is_floating_point():
        raise InputError(
            f"model={name} gives {shape} for two images of {size} px, not logits [2, {classes}]: "
            f"let it return one number for each of the {classes} classes"
        )
    return found


def _refuse_unused(network: nn.Module, loss: Tensor) -> None:
    """A weight without a gradient would let the ranks wait for each other."""
    torch.autograd.backward(loss)
    named = network.named_parameters()
    unused = [name for name, p in named if p.requires_grad and p.grad is None]
    if unused:
        raise InputError(
            f"{unused[0]} has no part in the logits of the model{_more(len(unused))}: remove it "
            "from the network, or set its requires_grad to False"
        )


def _more(count: int) -> str:
    return f" ({count} weights in all)" if count > 1 else ""
