"""Weights on disk, and the start of a run from them (`init_from`)."""

import hashlib
import json
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.training import checkpoint
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.manifest import MANIFEST
from kfp_ddp.training.model import head_of

BUNDLED = "model.safetensors"
_LISTED = "MANIFEST.sha256"
# Where others keep the weights beside the optimizer and the like; averaged ones are preferred.
_WRAPPERS = (
    *("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict"),
    *("model", "network", "net"),
)


@dataclass(frozen=True)
class Weights:
    """Tensors by name; what is not told is empty."""

    tensors: dict[str, Tensor]
    model: str = ""
    blur_pool: bool = False
    classes: tuple[str, ...] = ()


def read(path: Path) -> Weights:
    """The weights of a checkpoint, a bundle, or a file `.safetensors` or of torch.save.

    No code in a file is run.

    Raises:
        InputError: it is none of these, or damaged; one line.
        StorageError: the volume fails.
    """
    try:
        if (path / BUNDLED).is_file():
            _check_bundle(path)
            return _safetensors(path / BUNDLED)
        if (path / MANIFEST).exists():
            return _checkpoint(path)
        if path.is_file():
            return _safetensors(path) if path.suffix == ".safetensors" else _saved_by_torch(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; correct init_from") from None
    what = "no checkpoint and no bundle" if path.is_dir() else "not there"
    raise InputError(
        f"{path} is {what}: give init_from a folder step-<number> of another run, a bundle, or a "
        "file .pth or .safetensors"
    )


def read_torchvision(name: str, model: str) -> Weights:
    """The weights that torchvision calls `name`, from torch's cache on this machine.

    Raises:
        InputError: there are none of that name, or they are not at hand or damaged.
    """
    from torchvision.models import get_model_weights

    try:
        known = get_model_weights(model)
    except ValueError:
        raise InputError(
            f"torchvision has no weights for {model}: give init_from a file, or take one of its "
            "networks"
        ) from None
    if name not in known.__members__:
        names = ", ".join(known.__members__) or "none"
        raise InputError(f"torchvision has no weights {name!r} of {model}: it has {names}")
    url = known[name].url
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not path.is_file():
        raise InputError(
            f"the weights {name} of {model} are not at hand, and training downloads nothing: put "
            f"{url} at {path}, or give it to init_from where the train step may fetch it"
        )
    told = re.search(r"-([0-9a-f]{8,})\.", path.name)
    if told and not _sha256(path).startswith(told[1]):
        raise InputError(f"{path} is not what its name tells: remove it and fetch {url} again")
    found = _saved_by_torch(path).tensors
    # As torchvision itself renames what it published under earlier names.
    early = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")
    return Weights({early.sub(r"\1\2", key): value for key, value in found.items()})


def _checkpoint(path: Path) -> Weights:
    found = checkpoint.verify(path)
    state, told = found.state(), found.manifest
    return Weights(
        state["ema"] or state["model"],
        told["model"],
        bool(told["config"].get("blur_pool")),
        tuple(told["classes"]),
    )


def _check_bundle(folder: Path) -> None:
    """Refuse weights that are not what the bundle's manifest lists, where there is one."""
    try:
        lines = (folder / _LISTED).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    if f"{_sha256(folder / BUNDLED)}  {BUNDLED}" not in lines:
        raise InputError(
            f"the bundle {folder} is damaged: {BUNDLED} is not what {_LISTED} lists; copy it again"
        )


def _safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Weights(
            tensors,
            told.get("model", ""),
            json.loads(told.get("blur_pool", "false")) is True,
            tuple(map(str, json.loads(told.get("classes", "[]")))),
        )
    except (SafetensorError, ValueError, TypeError) as error:
        raise _no_weights(path, error) from None


def _saved_by_torch(path: Path) -> Weights:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a format that it may fail to read
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise InputError(
            f"{path} holds more than weights{what}, and no code in it is run: save its state_dict "
            "alone, with torch.save or as .safetensors"
        ) from None
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise _no_weights(path, error) from None
    while isinstance(content, Mapping):
        tensors = {str(name): one for name, one in content.items() if isinstance(one, Tensor)}
        if tensors:
            return Weights(tensors)
        content = next((content[name] for name in _WRAPPERS if content.get(name)), None)
    raise _no_weights(path, "it names no tensors")


def _no_weights(path: Path, error: object) -> InputError:
    reason = one_line(error)
    return InputError(
        f"{path} holds no weights that can be read ({reason}): give a state_dict saved by "
        "torch.save or as .safetensors"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        found = read_torchvision(given.removeprefix(TORCHVISION), config.model)
    elif "://" in given:
        raise InputError(
            f"init_from={given} is an address, which the train step fetches: bring it to a file"
        )
    else:
        found = read(Path(given))
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
