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
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.model.networks import adapted, build, heads_of, not_finite
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
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.weight_files import load, no_weights, open_safetensors

BUNDLED = "model.safetensors"
_LISTED = "MANIFEST.sha256"
# What DistributedDataParallel, torch.compile (also of parts) and old DenseNets add to names.
_ADDED = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod)\.|(denselayer\d+\.(?:norm|relu|conv))\.(?=[12]\.)"
)
_PART = re.compile(r"-\d+-of-0*(?:[2-9]|[1-9]\d+)\.")
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|swa|averaged?)(?=[._]|$)")
_DEEPEST = 8
"""Limit of the nesting in a file that is searched for weights."""
_MOST = 10_000_000
"""Limit of the values in such a file."""
_COUNTER = ".num_batches_tracked"
# Auxiliary classifiers of GoogLeNet and Inception, which only training uses; averages' counter.
_SURPLUS = ("aux1.", "aux2.", "AuxLogits.", "n_averaged")

Place = tuple[tuple[str, ...], str]
"""A mapping in a file, and the prefix of its names."""


@dataclass(frozen=True)
class Weights:
    """State dicts by their place in the file; fields that the file does not state are empty."""

    mappings: dict[tuple[str, ...], dict[str, Tensor]]
    model: str = ""
    blur_pool: bool = False
    classes: tuple[str, ...] = ()


def read(path: Path, setting: str = "pretrained") -> Weights:
    """Read the weights of a checkpoint, a bundle, or a file, without its code; raise InputError.

    `setting` names the path to the user.
    """
    if _PART.search(path.name) or any(path.glob("*.index.json")):
        raise InputError(
            f"{path} is a part of weights in several files: join them, as by loading all with the "
            f"library that wrote them, and give {setting} one file of torch.save or safetensors"
        )
    try:
        if (path / BUNDLED).is_file():
            _check_bundle(path)
            return _safetensors(path / BUNDLED)
        if (path / MANIFEST).exists():
            return _of_checkpoint(path)
        if path.is_file():
            return _safetensors(path) if _is_safetensors(path) else _saved_by_torch(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; correct {setting}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise no_weights(path / MANIFEST, error) from None
    what = "neither a checkpoint nor a bundle" if path.is_dir() else "missing"
    raise InputError(
        f"{path} is {what}: give {setting} a folder step-<number> of another run, a bundle, or a "
        "file of torch.save or safetensors"
    )


def _of_checkpoint(path: Path) -> Weights:
    fields = checkpoint.verify(path).fields
    return Weights(
        _saved_by_torch(path / STATE).mappings,
        model=str(fields["model"]),
        blur_pool=bool(fields["config"].get("blur_pool")),
        classes=tuple(fields["classes"]),
    )


def _is_safetensors(path: Path) -> bool:
    """Return whether the file begins with the length of a header, and a header in JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def read_torchvision(name: str, model: str) -> Weights:
    """Read weights of torchvision or timm from torch's cache on this machine; raise InputError."""
    file = file_of(name, model)
    path = cached(file)
    if not is_intact(path):
        url = address_of(file)
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
        with open_safetensors(path) as file:
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
    for place, value in places:  # the list grows by what is nested in its values
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        values += len(items)
        if values > _MOST:
            raise no_weights(path, f"it contains more than {_MOST:,} values")
        named: dict[str, Tensor] = {}
        for key, item in items:
            if isinstance(item, Tensor):
                if isinstance(key, str):
                    named[key] = item
            elif isinstance(item, Mapping | list | tuple) and len(place) < _DEEPEST:
                places.append(((*place, str(key)), item))
        if named:
            mappings[place] = named
    if not mappings:
        raise no_weights(path, "it contains no tensors")
    return Weights(mappings)


def initialise(
    network: nn.Module, config: TrainConfig, classes: tuple[str, ...], report: bool
) -> None:
    """Load `pretrained`, its classifier only for the same classes; not if the run resumes."""
    if config.resume != "never" and checkpoint.steps(RunFolder(config.output_dir).checkpoints):
        return
    weights = _weights_for(config)
    what = f"pretrained={config.pretrained}"
    _check_model(weights, config, what)
    heads = heads_of(network)
    tensors, places = _fitting(weights, network, heads, config)
    sizes = {len(tensors.get(f"{head}weight", ())) for head in heads}
    if not _is_for_classes(weights, sizes, classes):
        tensors = _without(heads, tensors)
        _reset(network, heads)
        if report:
            log.info(f"pretrained: a new classifier for {len(classes)} classes")
    problem = _misfit(tensors, network.state_dict(), heads, places, what)
    advice = "set model to the network of these weights, or use other weights"
    _fill(network, tensors, what, config, problem, advice)


def _reset(network: nn.Module, heads: tuple[str, ...]) -> None:
    """Draw the values of the classifier as torch does by default.

    EfficientNets draw them by the number of classes: of few classes, the first loss is near 10.
    """
    for head in heads:
        layer: Any = network.get_submodule(head.removesuffix("."))
        layer.reset_parameters()


def load_all(
    network: nn.Module, config: TrainConfig, weights: Weights, what: str, advice: str
) -> None:
    """Load the weights of a trained network, with its classifier.

    Raise InputError about `what`; `advice` says what to do if they do not fit.
    """
    _check_model(weights, config, what)
    # No layer is a head of other classes.
    tensors, places = _fitting(weights, network, (), config)
    problem = _misfit(tensors, network.state_dict(), (), places, what)
    _fill(network, tensors, what, config, problem, advice)


def _fill(
    network: nn.Module,
    tensors: dict[str, Tensor],
    what: str,
    config: TrainConfig,
    problem: str,
    advice: str,
) -> None:
    """Load tensors with finite values; raise InputError with `advice` if there is a problem."""
    if problem:
        raise InputError(f"{what} does not fit {config.model}: {problem}; {advice}")
    _check_values(tensors, what)
    network.load_state_dict(tensors, strict=False)


def _fitting(
    weights: Weights, network: nn.Module, heads: tuple[str, ...], config: TrainConfig
) -> tuple[dict[str, Tensor], list[str]]:
    """Return what `named_alike` does, adapted to the network."""
    own = network.state_dict()
    tensors, places = named_alike(weights, own, heads, config.model, config.image_size)
    return adapted(network, config.model, tensors), places


def _weights_for(config: TrainConfig) -> Weights:
    source = config.pretrained
    if source == "true":
        return read_torchvision(DEFAULT, config.model)
    if source.startswith(PREFIX):
        return read_torchvision(source.removeprefix(PREFIX), config.model)
    if "://" in source:
        raise InputError(
            f"pretrained={source} is a URI, which only the train step downloads: use a file"
        )
    return read(Path(source))


def _check_model(weights: Weights, config: TrainConfig, what: str) -> None:
    """Raise InputError for weights of another network, if both are known by their names."""
    own_code = config.model_code or ".py:" in weights.model
    if not weights.model or own_code:
        return
    if (weights.model, weights.blur_pool) != (config.model, config.blur_pool):
        raise InputError(
            f"{what} is a {weights.model}, not a {config.model} with the same blur_pool: set model "
            "and blur_pool as that run did"
        )


def _is_for_classes(weights: Weights, sizes: set[int], classes: tuple[str, ...]) -> bool:
    """Return whether the classes are the same, or their number if a file does not name them."""
    if weights.classes:
        return weights.classes == classes
    return sizes == {len(classes)}


def _without(heads: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors below the classifier."""
    return {name: value for name, value in tensors.items() if not name.startswith(heads)}


def _check_values(tensors: dict[str, Tensor], what: str) -> None:
    """Raise InputError unless all tensors are dense, real and finite."""
    for name, value in tensors.items():
        dense = value.layout == torch.strided and value.device.type == "cpu"
        is_real = not value.is_quantized and not value.is_complex()
        if not (dense and is_real):
            raise InputError(
                f"{what} has no real, dense tensor on the CPU in {name}: save the state_dict with "
                "such tensors"
            )
    if broken := not_finite(tensors):
        raise InputError(
            f"{what} has NaN or infinite values in {broken}: use weights of a run that did not "
            "diverge"
        )


def network_of(path: Path) -> str:
    """Return the network of weights, by metadata or, of ResNets, by names; '' if unknown."""
    weights = read(path)
    if weights.model:
        return weights.model if is_network(weights.model) else ""
    resnets = sorted((model for model in MODELS if "resne" in model), key=len)
    for model in resnets:  # not on the meta device, which imports triton: that ends with warnings
        network = build(model, 1)
        own = network.state_dict()
        heads = heads_of(network)
        tensors, places = named_alike(weights, own, heads, model)
        if not _misfit(_without(heads, tensors), own, heads, places, "pretrained"):
            return model
    return ""


def named_alike(
    weights: Weights,
    own: dict[str, Tensor],
    heads: tuple[str, ...],
    model: str,
    image_size: int = 224,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors by the network's names, and the places that fit them equally well."""
    names = {_plain(name): name for name in own}
    best = _best_places(_scores(weights, names, own, heads))
    if not best:
        best = [(next(iter(weights.mappings)), "")]
    place, prefix = best[0]
    fitting: dict[str, Tensor] = {}
    for name, value in weights.mappings[place].items():
        plain = _plain(name)
        if not plain.startswith(prefix):
            continue
        inner = plain.removeprefix(prefix)
        known = names.get(inner, inner)
        if known in own or not known.startswith(_SURPLUS):
            fitting[known] = value
    if model.startswith("vit_"):
        fitting = _resized_positions(fitting, model, image_size)
    return fitting, [_path_of(place) or "the file" for place in best]


def _scores(
    weights: Weights, names: dict[str, str], own: dict[str, Tensor], heads: tuple[str, ...]
) -> Counter[Place]:
    """Count the tensors of each place by their known names, and once more by equal shapes."""
    depths = {name.count(".") + 1 for name in names}
    scores: Counter[Place] = Counter()
    for mapping, tensors in weights.mappings.items():
        for name, value in tensors.items():
            parts = _plain(name).split(".")
            for depth in depths:
                if depth > len(parts):
                    continue
                known = names.get(".".join(parts[-depth:]), "")
                if not known or known.endswith(_COUNTER):
                    continue
                prefix = "".join(f"{part}." for part in parts[:-depth])
                # The classifier may have another number of classes: its shape says nothing.
                same = not known.startswith(heads) and value.shape == own[known].shape
                scores[mapping, prefix] += 1 + int(same)
    return scores


def _best_places(scores: Counter[Place]) -> list[Place]:
    """Return the places of the highest score; of several the only one of averaged weights."""
    highest = max(scores.values(), default=0)
    best = [place for place, score in scores.items() if score == highest]
    averaged = [place for place in best if _AVERAGED.search(_path_of(place))]
    return averaged if len(averaged) == 1 else best


def _path_of(place: Place) -> str:
    mapping, prefix = place
    return ".".join((*mapping, prefix)).strip(".")


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
    tensors: dict[str, Tensor],
    own: dict[str, Tensor],
    heads: tuple[str, ...],
    places: Sequence[str],
    what: str,
) -> str:
    """Describe the first tensors that do not fit; '' if all do, InputError if other places do."""
    missing: list[str] = []
    shapes: list[str] = []
    for name, value in own.items():
        if name not in tensors:
            if not name.startswith(heads) and not name.endswith(_COUNTER):
                missing.append(f"{name} is missing")
        elif tensors[name].shape != value.shape:
            actual = list(tensors[name].shape)
            shapes.append(f"{name} has the shape {actual}, not {list(value.shape)}")
    unknown = [f"{name} is unknown to it" for name in tensors if name not in own]
    kinds = [kind for kind in (missing, shapes, unknown) if kind]
    if not kinds and len(places) > 1:
        raise InputError(
            f"{what} has several state_dicts that fit, in {places[0]} and {places[1]}: save the "
            "one to use as a file of its own"
        )
    return ", ".join(map(_first_of, kinds))


def _first_of(problems: list[str]) -> str:
    more = len(problems) - 1
    return f"{problems[0]} (and {more:,} more)" if more else problems[0]
