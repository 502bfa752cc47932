"""A network in one safetensors file: weights, and metadata to build it and prepare its input."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state.checkpoint import ModelInfo, check_shapes
from kfp_ddp.training.state.weight_files import open_safetensors


def write(model: nn.Module, info: ModelInfo, path: Path) -> None:
    """Write the network's state dict, with its description as metadata; raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copies: the format holds no tensor under two names.
    state = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    metadata = {
        "format": "pt",
        "model": info.model,
        "blur_pool": json.dumps(info.blur_pool),
        "model_code": info.model_code,
        "test_time_flip": json.dumps(info.test_time_flip),
        "classes": json.dumps(list(info.classes)),
        "image_size": str(info.image_size),
        "mean": json.dumps(list(info.mean)),
        "std": json.dumps(list(info.std)),
    }
    try:
        save_file(state, path, metadata=metadata)
    except SafetensorError as error:  # of the disk, as the tensors are plain
        raise OSError(str(error)) from None
    _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata, as safetensors writes it in random order."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise ValueError(f"the header of {path.name} is longer than before")
        file.seek(8)
        file.write(text.ljust(length))


def read(path: Path, step: int, *, allow_code: bool = False) -> tuple[nn.Module, ModelInfo]:
    """Return the network of `write`, in eval mode; its own code is run only with `allow_code`."""
    from safetensors import SafetensorError

    try:
        with open_safetensors(path) as file:
            info = _description(file.metadata() or {}, step)
            if info.model_code and not allow_code:
                raise InputError(
                    f"{path.name} has the code of a network, which is not run: give --allow-code "
                    "if you trust its author, or use model.onnx with ONNX Runtime"
                )
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        check_shapes(info, state, path.name, "export the model again")
        network = info.network()
        network.load_state_dict(state)
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise InputError(
            f"{path.name} holds no network that can be built again: {one_line(error)}; "
            "export the model again"
        ) from None
    return network.float().eval(), info


def _description(metadata: Mapping[str, str], step: int) -> ModelInfo:
    """Return what the metadata describe; raise LookupError, ValueError or TypeError."""
    info = ModelInfo(
        model=metadata["model"],
        classes=tuple(json.loads(metadata["classes"])),
        image_size=int(metadata["image_size"]),
        mean=tuple(json.loads(metadata["mean"])),
        std=tuple(json.loads(metadata["std"])),
        step=step,
        # Older bundles do not have these; their networks do not use them.
        config={
            "blur_pool": json.loads(metadata.get("blur_pool", "false")),
            "model_code": metadata.get("model_code", ""),
            "test_time_flip": json.loads(metadata.get("test_time_flip", "false")),
        },
    )
    _check(info)
    return info


def _check(info: ModelInfo) -> None:
    """Raise ValueError or TypeError for values that no training can have."""
    if not (len(info.mean) == len(info.std) == 3):
        raise ValueError("mean and std are not of three channels")
    are_finite = all(math.isfinite(value) for value in (*info.mean, *info.std))
    if not are_finite or min(info.std) <= 0:
        raise ValueError("mean and std do not normalise")
    are_distinct = len(set(info.classes)) == len(info.classes) >= 2
    are_names = all(isinstance(name, str) for name in info.classes)
    if not are_distinct or not are_names:
        raise ValueError("classes are not two or more names")
    TrainConfig.create(data="-", output_dir="-", image_size=info.image_size)
