"""What a run begins with where `init_from` is given: weights that fit its network."""

from pathlib import Path

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import weights_file
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.model import head_of
from kfp_ddp.training.weights_file import Weights

TORCHVISION = "torchvision:"
# What others put before each name: DistributedDataParallel, torch.compile, and modules around it.
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "net.", "backbone.")
# A second classifier, which GoogLeNet and Inception have in training only; averages count models.
_SURPLUS = ("aux1.", "aux2.", "AuxLogits.", "n_averaged")


def initialise(
    network: nn.Module, config: TrainConfig, classes: tuple[str, ...], say: bool
) -> None:
    """Take over the weights of `config.init_from`; the classifier too if its classes are the same.

    Where a file does not name its classes, their number decides.

    Raises:
        InputError: they cannot be read, or are of another network; one line.
    """
    given = config.init_from
    if given.startswith(TORCHVISION):
        found = weights_file.read_torchvision(given.removeprefix(TORCHVISION), config.model)
    elif "://" in given:
        raise InputError(
            f"init_from={given} is an address, which the train step fetches: bring it to a file"
        )
    else:
        found = weights_file.read(Path(given))
    by_name = found.model and not config.model_code and ".py:" not in found.model
    if by_name and (found.model, found.blur_pool) != (config.model, config.blur_pool):
        raise InputError(
            f"init_from={given} holds a {found.model}, not a {config.model} of the same "
            "form: set model and blur_pool as that run had them"
        )
    own, head = network.state_dict(), head_of(network)
    tensors = _named_alike(found.tensors, set(own), config)
    if _other_classes(found, tensors, head, classes):
        tensors = {n: value for n, value in tensors.items() if not n.startswith(f"{head}.")}
        if say:
            print(f"init_from: a new classifier for {len(classes)} classes", flush=True)
    problem = _misfit(tensors, own, f"{head}.")
    if problem:
        raise InputError(
            f"init_from={given} does not fit {config.model}: {problem}; set model to the network "
            "that these weights are of, or give others"
        )
    broken = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise InputError(
            f"init_from={given} holds {broken[0]} that is NaN or infinite: give weights of a run "
            "that did not diverge"
        )
    network.load_state_dict(tensors, strict=False)


def _named_alike(
    tensors: dict[str, Tensor], own: set[str], config: TrainConfig
) -> dict[str, Tensor]:
    """The tensors without what stands before all of the network's own names."""
    for _ in range(len(_PREFIXES)):
        if own & tensors.keys():
            break
        for prefix in _PREFIXES:
            inner = {
                name.removeprefix(prefix): value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
            if inner:
                tensors = inner
                break
    kept = {n: v for n, v in tensors.items() if n in own or not n.startswith(_SURPLUS)}
    return _resized_positions(kept, config) if config.model.startswith("vit_") else kept


def _resized_positions(tensors: dict[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """Where a vision transformer has seen images of another size: its positions interpolated."""
    from torchvision.models.vision_transformer import interpolate_embeddings

    try:
        patch = int(config.model.rpartition("_")[2])
        state = {"encoder.pos_embedding": tensors["encoder.pos_embedding"]}
        return {**tensors, **interpolate_embeddings(config.image_size, patch, state)}
    except (LookupError, ValueError):
        return tensors  # told as what does not fit


def _other_classes(
    found: Weights, tensors: dict[str, Tensor], head: str, classes: tuple[str, ...]
) -> bool:
    """Whether the classifier tells other classes than the run has."""
    if found.classes:
        return found.classes != classes
    weight = tensors.get(f"{head}.weight")
    return weight is None or len(weight) != len(classes)


def _misfit(tensors: dict[str, Tensor], own: dict[str, Tensor], head: str) -> str:
    """The first tensor that is not as the network has it, and why; '' if all are."""
    for name, value in own.items():
        theirs = tensors.get(name)
        if theirs is None:
            if not name.startswith(head) and not name.endswith(".num_batches_tracked"):
                return f"{name} is missing"
        elif theirs.shape != value.shape:
            return f"{name} has the shape {list(theirs.shape)}, not {list(value.shape)}"
    return next((f"{name} has no place in it" for name in tensors if name not in own), "")
