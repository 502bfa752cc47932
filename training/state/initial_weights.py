"""Weights on disk, and the start of a run from them (`pretrained`)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kfp_ddp.core.digest import sha256
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.config import MODELS, TrainConfig
from kfp_ddp.training.model.networks import WRAPPERS, build, head_of, not_finite
from kfp_ddp.training.model.torchvision_weights import (
    DEFAULT,
    PREFIX,
    PUBLISHED,
    cached,
    file_of,
    is_intact,
)
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.manifest import MANIFEST, STATE
from kfp_ddp.training.state.torch_file import load, no_weights

BUNDLED = "model.safetensors"
_LISTED = "MANIFEST.sha256"
# Keys of the weights in files of other projects; averaged weights are preferred.
_WRAPPERS = (
    *("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict"),
    *("model", "network", "net"),
)
# Prefixes of names: DistributedDataParallel, torch.compile, and modules around the network.
_PREFIXES = (*WRAPPERS, "model.", "network.", "net.", "backbone.")
# Auxiliary classifiers of GoogLeNet and Inception, which only training uses; averages' counter.
_SURPLUS = ("aux1.", "aux2.", "AuxLogits.", "n_averaged")


@dataclass(frozen=True)
class Weights:
    """Tensors by name; fields that the file does not state are empty."""

    tensors: dict[str, Tensor]
    model: str = ""
    blur_pool: bool = False
    classes: tuple[str, ...] = ()


def read(path: Path) -> Weights:
    """Read the weights of a checkpoint, a bundle, or a file, without its code; raise InputError."""
    try:
        if (path / BUNDLED).is_file():
            _check_bundle(path)
            return _safetensors(path / BUNDLED)
        if (path / MANIFEST).exists():
            valid = checkpoint.verify(path)
            tensors, fields = _saved_by_torch(path / STATE).tensors, valid.fields
            classes, blur_pool = fields["classes"], fields["config"].get("blur_pool")
            return Weights(tensors, str(fields["model"]), bool(blur_pool), tuple(classes))
        if path.is_file():
            return _safetensors(path) if path.suffix == ".safetensors" else _saved_by_torch(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; correct pretrained") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise no_weights(path / MANIFEST, error) from None
    what = "neither a checkpoint nor a bundle" if path.is_dir() else "missing"
    raise InputError(
        f"{path} is {what}: give pretrained a folder step-<number> of another run, a bundle, or a "
        "file .pth or .safetensors"
    )


def read_torchvision(name: str, model: str) -> Weights:
    """Read torchvision's weights `name` from torch's cache on this machine; raise InputError."""
    file = file_of(name, model)
    path, url = cached(file), f"{PUBLISHED}/{file}"
    if not is_intact(path):
        raise InputError(
            f"the {name} weights of {model} are not at {path}, or do not match the digest in the "
            f"name, and ranks download nothing: put {url} there, or give pretrained that address"
        )
    return _saved_by_torch(path)


def _check_bundle(folder: Path) -> None:
    """Raise InputError if the weights do not match the bundle's manifest, if it has one."""
    try:
        lines = (folder / _LISTED).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    if f"{sha256(folder / BUNDLED)}  {BUNDLED}" not in lines:
        raise InputError(
            f"the bundle {folder} is damaged: {BUNDLED} does not match {_LISTED}; copy it again"
        )


def _safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Weights(
            tensors,
            metadata.get("model", ""),
            json.loads(metadata.get("blur_pool", "false")) is True,
            tuple(map(str, json.loads(metadata.get("classes", "[]")))),
        )
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise no_weights(path, error) from None


def _saved_by_torch(path: Path) -> Weights:
    content = load(path)
    while isinstance(content, Mapping):
        tensors = {str(name): one for name, one in content.items() if isinstance(one, Tensor)}
        values = (content.get(name) for name in _WRAPPERS)
        content = next((one for one in values if isinstance(one, Mapping) and one), None)
        if tensors and content is None:  # there may be others beside them, such as an accuracy
            return Weights(tensors)
    raise no_weights(path, "it contains no tensors")


def initialise(
    network: nn.Module, config: TrainConfig, classes: tuple[str, ...], log: bool
) -> None:
    """Load the weights of `config.pretrained`; those of the classifier only for the same classes.

    If a file does not name its classes, their number decides. Not if the run resumes: the weights
    may be gone. Raises InputError.
    """
    if config.resume != "never" and checkpoint.steps(RunFolder(config.output_dir).checkpoints):
        return
    source = config.pretrained
    if source == "true" or source.startswith(PREFIX):
        name = DEFAULT if source == "true" else source.removeprefix(PREFIX)
        weights = read_torchvision(name, config.model)
    elif "://" in source:
        raise InputError(
            f"pretrained={source} is a URI, which only the train step downloads: use a file"
        )
    else:
        weights = read(Path(source))
    by_name = weights.model and not config.model_code and ".py:" not in weights.model
    if by_name and (weights.model, weights.blur_pool) != (config.model, config.blur_pool):
        raise InputError(
            f"pretrained={source} is a {weights.model}, not a {config.model} with the "
            "same blur_pool: set model and blur_pool as that run did"
        )
    own, head = network.state_dict(), head_of(network)
    tensors = _named_alike(weights.tensors, set(own), config.model, config.image_size)
    weight = tensors.get(f"{head}.weight")
    same_number = weight is not None and len(weight) == len(classes)
    if not (weights.classes == classes if weights.classes else same_number):
        tensors = {n: value for n, value in tensors.items() if not n.startswith(f"{head}.")}
        if log:
            print(f"pretrained: a new classifier for {len(classes)} classes", flush=True)
    problem = _misfit(tensors, own, f"{head}.")
    if problem:
        raise InputError(
            f"pretrained={source} does not fit {config.model}: {problem}; set model to the network "
            "of these weights, or use other weights"
        )
    for name, value in tensors.items():
        dense = value.layout == torch.strided and value.device.type == "cpu"
        if not dense or value.is_quantized or value.is_complex():
            raise InputError(
                f"pretrained={source} has no real, dense tensor on the CPU in {name}: save the "
                "state_dict with such tensors"
            )
    if broken := not_finite(tensors):
        raise InputError(
            f"pretrained={source} has NaN or infinite values in {broken}: use weights of a run "
            "that did not diverge"
        )
    network.load_state_dict(tensors, strict=False)


def network_of(path: Path) -> str:
    """Return the network of weights, by metadata or, of ResNets, by names; '' if unknown."""
    weights = read(path)
    if weights.model:
        return weights.model if weights.model in MODELS else ""
    resnets = sorted((one for one in MODELS if "resne" in one), key=len)
    for model in resnets:  # not on the meta device, which imports triton: that ends with warnings
        network = build(model, 1)
        own, head = network.state_dict(), f"{head_of(network)}."
        tensors = _named_alike(weights.tensors, set(own), model)
        body = {name: value for name, value in tensors.items() if not name.startswith(head)}
        if not _misfit(body, own, head):
            return model
    return ""


def _named_alike(
    tensors: dict[str, Tensor], own: set[str], model: str, image_size: int = 224
) -> dict[str, Tensor]:
    """Strip prefixes that wrappers put before the network's own names."""
    for prefix in _PREFIXES * len(_PREFIXES):
        if own & tensors.keys():
            break
        inner = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
        tensors = inner or tensors
    early = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")  # as torchvision renames
    tensors = {n if n in own else early.sub(r"\1\2", n): v for n, v in tensors.items()}
    known = {n: v for n, v in tensors.items() if n in own or not n.startswith(_SURPLUS)}
    return _resized_positions(known, model, image_size) if model.startswith("vit_") else known


def _resized_positions(
    tensors: dict[str, Tensor], model: str, image_size: int
) -> dict[str, Tensor]:
    """Interpolate the positional embeddings of a vision transformer to this image size."""
    from torchvision.models.vision_transformer import interpolate_embeddings

    try:
        patch = int(model.rpartition("_")[2])
        state = {"encoder.pos_embedding": tensors["encoder.pos_embedding"]}
        return {**tensors, **interpolate_embeddings(image_size, patch, state)}
    except (LookupError, ValueError):
        return tensors  # reported as a misfit later


def _misfit(tensors: dict[str, Tensor], own: dict[str, Tensor], head: str) -> str:
    """Describe the first tensor that does not fit the network; '' if all fit."""
    for name, value in own.items():
        theirs = tensors.get(name)
        if theirs is None:
            if not name.startswith(head) and not name.endswith(".num_batches_tracked"):
                return f"{name} is missing"
        elif theirs.shape != value.shape:
            return f"{name} has the shape {list(theirs.shape)}, not {list(value.shape)}"
    return next((f"{name} is unknown to it" for name in tensors if name not in own), "")
