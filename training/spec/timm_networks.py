"""The classifiers of timm, without its import, which takes seconds.

Each line of timm_networks.txt, by `make reference`, has a network, the name of its weights or -,
and what they expect of images; the default weights of a network come first.
"""

import functools
import os
from pathlib import Path
from typing import NamedTuple

PREFIX = "timm/"
TABLE = Path(__file__).resolve().with_suffix(".txt")
FILE = "model.safetensors"
"""Name of the weights in their repository on the hub, which has their name."""


class Preprocessing(NamedTuple):
    """What a network expects: statistics of channels, and how the centre of an image is cut."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Statistics of ImageNet, as in torchvision's models."""
    crop: float = 0.0
    """Share of the shorter side that the centre has; 0 for the project's own."""


@functools.cache
def table() -> dict[str, dict[str, Preprocessing]]:
    """Return the weights of each network by their names, '' for no weights."""
    networks: dict[str, dict[str, Preprocessing]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        network, name, crop, *statistics = line.split()
        mean, std = (tuple(map(float, text.split(","))) for text in statistics)
        weights = networks.setdefault(network, {})
        weights[name.strip("-")] = Preprocessing(mean, std, float(crop))
    return networks


def names() -> list[str]:
    """Return the names of all networks, as values of `model`."""
    return [f"{PREFIX}{network}" for network in table()]


def _parts(model: str) -> tuple[str, str]:
    """Return network and weights of timm/NETWORK, with its default ones, or NETWORK.WEIGHTS."""
    network, _, name = model.removeprefix(PREFIX).partition(".")
    return network, name or next(iter(table().get(network, ())), "")


def is_known(model: str) -> bool:
    """Return whether it is timm/NETWORK or timm/NETWORK.WEIGHTS."""
    if not model.startswith(PREFIX):  # most models are torchvision's, and need no table
        return False
    network, name = _parts(model)
    return name in table().get(network, ())


def preprocessing(model: str) -> Preprocessing:
    """Return what a network expects of images; that of ImageNet for one of another library."""
    if not is_known(model):
        return Preprocessing()
    network, name = _parts(model)
    return table()[network][name]


def files(model: str) -> dict[str, str]:
    """Return the local name of the file of its default weights, if it has any."""
    network, name = _parts(model) if is_known(model) else ("", "")
    return {"DEFAULT": f"{network}.{name}.{FILE}"} if name else {}


def address(file: str) -> str:
    """Return the address on the hub of a file of `files`."""
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{hub.rstrip('/')}/{PREFIX}{file.removesuffix(f'.{FILE}')}/resolve/main/{FILE}"
