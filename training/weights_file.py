"""Weights on disk, of ours or of another project: which tensors, and what is told beside them."""

import hashlib
import json
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import checkpoint
from kfp_ddp.training.manifest import MANIFEST

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
    reason = " ".join(str(error).split())[:150]
    return InputError(
        f"{path} holds no weights that can be read ({reason}): give a state_dict saved by "
        "torch.save or as .safetensors"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
