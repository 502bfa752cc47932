"""A network that was trained elsewhere, from its weights alone, as a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from kfp_ddp.training.model import networks
from kfp_ddp.training.prepare import compute_logits
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import checkpoint, initial_weights

SETTING = "checkpoint"
"""Name of the setting that has the weights."""
_ADVICE = (
    "set model and image_size to the network of these weights, and classes to a file with the "
    "names of its classes, if they are not exactly those of the dataset"
)


def load(
    config: TrainConfig, file: Path, given: tuple[str, ...], default: Callable[[], tuple[str, ...]]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the network of `config`, load its weights, and compute once; return it and its classes.

    The classes are those `given`, or that the weights name, or `default`. Raise InputError.
    """
    weights = initial_weights.read(file, SETTING)
    classes = given or weights.classes or default()
    network = networks.build_for(config, len(classes))
    initial_weights.load_all(network, config, weights, f"{SETTING}={file}", _ADVICE)
    network.eval()
    with torch.no_grad():
        compute_logits(network, config, len(classes), config.image_size)
    return network, classes


def save(network: nn.Module, config: TrainConfig, classes: tuple[str, ...], folder: Path) -> Path:
    """Write a network to a folder of checkpoints, as of step 0, and return the checkpoint.

    Its configuration has what was set and how the dataset is read: nothing else is known of the
    training. Raise OSError.
    """
    manifest = checkpoint.manifest_of(
        config, classes, epoch=0.0, world_size=1, samples=0, metrics={}, best=None
    )
    manifest["config"] = {**config.layout_rule._asdict(), **config.explicit()}
    return checkpoint.write(folder, 0, {"model": network.state_dict(), "ema": None}, manifest)
