"""The network that is evaluated: a checkpoint, or a bundle."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import champion, initial_weights, weights
from kfp_ddp.storage.destination import open_destination
from kfp_ddp.training.checkpoint import ModelInfo, load_model
from kfp_ddp.training.manifest import MANIFEST, read_manifest

CONFIG = "config.json"
_LARGEST = 16 << 20


def read(checkpoint: Path | str) -> tuple[nn.Module, ModelInfo, str]:
    """A network in eval mode on the CPU, with the digest of the checkpoint that it comes from.

    Args:
        checkpoint: Folder of a checkpoint step-<number>. As text also its address, or the folder or
            address of a bundle, or of a model's exports, which stands for the champion.

    Raises:
        InputError: there is none, or it is damaged.
        StorageError: it cannot be read, or not be brought here.
    """
    if isinstance(checkpoint, Path) or (Path(checkpoint) / MANIFEST).is_file():
        return _of_a_checkpoint(Path(checkpoint))
    where = open_destination(checkpoint)
    if next(iter(where.list("")), None) is None:
        raise _none(checkpoint)
    with tempfile.TemporaryDirectory() as aside:
        if where.read(MANIFEST, _LARGEST) is not None:
            return _of_a_checkpoint(initial_weights.brought(checkpoint, Path(aside)))
        held = champion.find(checkpoint)
        if held is None or not held.version:
            raise _none(checkpoint)
        network, info = weights.read(held.fetch_weights(Path(aside)), held.evaluation.step)
    config = {**_training(held), **info.config}
    return network, dataclasses.replace(info, config=config), held.evaluation.checkpoint_digest


def _of_a_checkpoint(path: Path) -> tuple[nn.Module, ModelInfo, str]:
    return *load_model(path), read_manifest(path).digest


def _training(held: champion.Champion) -> dict[str, Any]:
    """The settings of the training as a bundle tells them: which images are its validation's."""
    content = held.sealed.read(CONFIG, _LARGEST)
    if content is None:
        raise held.sealed.damaged(f"{CONFIG} is missing")
    return dict(json.loads(content)["training"])


def _none(checkpoint: str) -> InputError:
    return InputError(
        f"there is no checkpoint and no bundle at {checkpoint}: give a folder step-<number> of a "
        "run, a bundle, or the folder of a model's exports"
    )
