"""The classifiers of torchvision and their weights, without its import, which takes seconds."""

import os
import re
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import sha256
from kfp_ddp.training.spec import timm_networks

TABLE = Path(__file__).resolve().with_suffix(".txt")
PREFIX = "torchvision:"
DEFAULT = "DEFAULT"
TORCHVISION: dict[str, dict[str, str]] = {}
"""Files by name of the weights, for each network; the first one is also named DEFAULT."""
for _line in TABLE.read_text(encoding="utf-8").splitlines():
    _network, _name, _file = _line.split()
    TORCHVISION.setdefault(_network, {DEFAULT: _file})[_name] = _file
PUBLISHED = "https://download.pytorch.org/models"
"""Address of all these files."""


def file_of(name: str, network: str) -> str:
    """Return the file of the weights `name` of a network; raise InputError if there is none."""
    files = files_of(network)
    if name not in files:
        known = ", ".join(files) or "none; choose a network with some, or set pretrained=false"
        library = "timm" if timm_networks.is_known(network) else "torchvision"
        raise InputError(f"{library} has no {name} weights of {network}: it has {known}")
    return files[name]


def files_of(network: str) -> dict[str, str]:
    """Return the files of all weights of a network by their names, also of one of timm."""
    return TORCHVISION.get(network) or timm_networks.files(network)


def address_of(file: str) -> str:
    """Return the address of one of these files."""
    is_timm = file.endswith(timm_networks.FILE)
    return timm_networks.address(file) if is_timm else f"{PUBLISHED}/{file}"


def cached(file: str) -> Path:
    """Return the path of a file in torch's cache, where it may be missing (as torch.hub)."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or f"{caches}/torch"
    return Path(os.path.expanduser(home), "hub", "checkpoints", file)


def digest_in(name: str) -> str:
    """Return the first digits of the sha256 in a file's name; '' for none, or only a date.

    `#sha256=<digest>.` before it counts first.
    """
    digest = re.search(r"(?:#sha256=|-(?!(?:19|20)\d\d[01]\d[0-3]\d+\.))([0-9a-f]{8,})\.", name)
    return digest[1] if digest else ""


def is_intact(path: Path) -> bool:
    """Return whether a file exists with the sha256 whose first digits are in its name, if any."""
    return path.is_file() and sha256(path).startswith(digest_in(path.name))
