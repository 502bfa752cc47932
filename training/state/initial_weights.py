"""Weights on disk, and the start of a run from them (`pretrained`)."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import sha256
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.model.networks import adapted, build, head_of, not_finite
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import MANIFEST, STATE
from kfp_ddp.training.spec.network_settings import MODELS, is_network
from kfp_ddp.training.spec.torchvision_weights import (
    DEFAULT,
    PREFIX,
    address_of,
    cached,
    file_of,
    is_intact,
)
from kfp_ddp.training.state import checkpoint, safetensors_file
from kfp_ddp.training.state.torch_file import load, no_weights

BUNDLED = "model.safetensors"
_LISTED = "MANIFEST.sha256"
# What DistributedDataParallel, torch.compile (also of parts) and old DenseNets add to names.
_ADDED = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod)\.|(denselayer\d+\.(?:norm|relu|conv))\.(?=[12]\.)"
)
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|swa|averaged?)(?=[._]|$)")
_DEEPEST, _MOST = 8, 10_000_000
"""Limits of the nesting and of the values in a file that are searched for weights."""
_COUNTER = ".num_batches_tracked"
# Auxiliary classifiers of GoogLeNet and Inception, which only training uses; averages' counter.
_SURPLUS = ("aux1.", "aux2.", "AuxLogits.", "n_averaged")


@dataclass(frozen=True)
class Weights:
    """State dicts by their place in the file; fields that the file does not state are empty."""

    mappings: dict[tuple[str, ...], dict[str, Tensor]]
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
            mappings, fields = _saved_by_torch(path / STATE).mappings, valid.fields
            classes, blur_pool = fields["classes"], fields["config"].get("blur_pool")
            return Weights(mappings, str(fields["model"]), bool(blur_pool), tuple(classes))
        if path.is_file():
            with path.open("rb") as file:  # the length of a header in JSON, and the header
                is_safetensors = file.read(9)[8:] == b"{"
            return _safetensors(path) if is_safetensors else _saved_by_torch(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; correct pretrained") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise no_weights(path / MANIFEST, error) from None
    what = "neither a checkpoint nor a bundle" if path.is_dir() else "missing"
    raise InputError(
        f"{path} is {what}: give pretrained a folder step-<number> of another run, a bundle, or a "
        "file of torch.save or safetensors"
    )


def read_torchvision(name: str, model: str) -> Weights:
    """Read weights of torchvision or timm from torch's cache on this machine; raise InputError."""
    file = file_of(name, model)
    path, url = cached(file), address_of(file)
    if not is_intact(path):
        raise InputError(
            f"the {name} weights of {model} are not at {path}, or do not match the digest in the "
            f"name, and ranks download nothing: put {url} there, or give pretrained that address"
        )
    return read(path)


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
    from safetensors import SafetensorError

    try:
        with safetensors_file.opened(path) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Weights(
            {(): tensors},
            metadata.get("model", ""),
            json.loads(metadata.get("blur_pool", "false")) is True,
            tuple(map(str, json.loads(metadata.get("classes", "[]")))),
        )
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise no_weights(path, error) from None


def _saved_by_torch(path: Path) -> Weights:
    mappings: dict[tuple[str, ...], dict[str, Tensor]] = {}
    places: list[tuple[tuple[str, ...], Any]] = [((), load(path, foreign=True))]
    values = 0
    for place, value in places:
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        values += len(items)
        named = {n: one for n, one in items if isinstance(one, Tensor) and isinstance(n, str)}
        if named:
            mappings[place] = named
        if values > _MOST:
            raise no_weights(path, f"it contains more than {_MOST:,} values")
        if len(place) < _DEEPEST:
            inner = ((n, one) for n, one in items if isinstance(one, Mapping | list | tuple))
            places += [((*place, str(n)), one) for n, one in inner]
    if not mappings:
        raise no_weights(path, "it contains no tensors")
    return Weights(mappings)


def initialise(
    network: nn.Module, config: TrainConfig, classes: tuple[str, ...], log: bool
) -> None:
    """Load `pretrained`, its classifier only for the same classes; not if the run resumes."""
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
    tensors, places = named_alike(weights, own, f"{head}.", config.model, config.image_size)
    tensors = adapted(network, config.model, tensors)
    weight = tensors.get(f"{head}.weight")
    same_number = weight is not None and len(weight) == len(classes)
    if not (weights.classes == classes if weights.classes else same_number):
        tensors = {n: value for n, value in tensors.items() if not n.startswith(f"{head}.")}
        if log:
            print(f"pretrained: a new classifier for {len(classes)} classes", flush=True)
    if problem := _misfit(tensors, own, f"{head}.", places):
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
        return weights.model if is_network(weights.model) else ""
    resnets = sorted((one for one in MODELS if "resne" in one), key=len)
    for model in resnets:  # not on the meta device, which imports triton: that ends with warnings
        network = build(model, 1)
        own, head = network.state_dict(), f"{head_of(network)}."
        tensors, places = named_alike(weights, own, head, model)
        body = {name: value for name, value in tensors.items() if not name.startswith(head)}
        if not _misfit(body, own, head, places):
            return model
    return ""


def named_alike(
    weights: Weights, own: dict[str, Tensor], head: str, model: str, image_size: int = 224
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors by the network's names, and the places that fit them equally well.

    A place is a mapping and a prefix; of equal ones the only one of averaged weights is taken.
    """
    names = {_plain(name): name for name in own}
    depths = {name.count(".") + 1 for name in names}
    scores: Counter[tuple[tuple[str, ...], str]] = Counter()
    for place, tensors in weights.mappings.items():
        for name, value in tensors.items():
            parts = _plain(name).split(".")
            for depth in depths:
                known = names.get(".".join(parts[-depth:]), "") if depth <= len(parts) else ""
                if known and not known.endswith(_COUNTER):
                    same = not known.startswith(head) and value.shape == own[known].shape
                    scores[place, "".join(f"{p}." for p in parts[:-depth])] += 1 + same
    highest = max(scores.values(), default=0)
    best = [one for one, score in scores.items() if score == highest]
    averaged = [one for one in best if _AVERAGED.search(".".join((*one[0], one[1])))]
    best = averaged if len(averaged) == 1 else best or [(next(iter(weights.mappings)), "")]
    place, prefix = best[0]
    plain = ((_plain(name), value) for name, value in weights.mappings[place].items())
    inner = ((n.removeprefix(prefix), value) for n, value in plain if n.startswith(prefix))
    named = {names.get(name, name): value for name, value in inner}
    fitting = {n: v for n, v in named.items() if n in own or not n.startswith(_SURPLUS)}
    if model.startswith("vit_"):
        fitting = _resized_positions(fitting, model, image_size)
    return fitting, [".".join((*at, start)).strip(".") or "the file" for at, start in best]


def _plain(name: str) -> str:
    return _ADDED.sub(r"\1", name)


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


def _misfit(
    tensors: dict[str, Tensor], own: dict[str, Tensor], head: str, places: Sequence[str]
) -> str:
    """Describe the first tensors that do not fit; '' if all do, InputError if other places do."""
    optional = {name for name in own if name.startswith(head) or name.endswith(_COUNTER)}
    present = optional | tensors.keys()
    shapes = [
        f"{name} has the shape {list(tensors[name].shape)}, not {list(value.shape)}"
        for name, value in own.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    missing = [f"{name} is missing" for name in own if name not in present]
    unknown = [f"{name} is unknown to it" for name in tensors if name not in own]
    kinds = [kind for kind in (missing, shapes, unknown) if kind]
    if not kinds and len(places) > 1:
        raise InputError(
            f"pretrained has several state_dicts that fit, in {places[0]} and {places[1]}: save "
            "the one to start from as a file of its own"
        )
    return ", ".join(
        kind[0] + (f" (and {len(kind) - 1:,} more)" if len(kind) > 1 else "") for kind in kinds
    )
