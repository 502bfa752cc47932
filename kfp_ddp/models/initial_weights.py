"""The weights that a training begins with, brought from an address to a file."""

import hashlib
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.models import champion
from kfp_ddp.storage.destination import open_destination
from kfp_ddp.training.manifest import MANIFEST, STATE

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
_LARGEST = 16 << 30
"""Bytes of weights, from wherever they come."""
_BLOCK = 1 << 20
_SECONDS = 60.0


def is_per_node(init_from: str) -> bool:
    """Whether it is to be brought first: an address, or the folder of a model's exports.

    That folder on a claim is none of weights, but names the bundle that is the champion.
    """
    named = bool(init_from) and (Path(init_from) / champion.CHAMPION).is_file()
    return named or is_remote(init_from)


def check(init_from: str) -> None:
    """Refuse an address where nothing lies; what lies there is looked at where it is brought.

    Raises:
        InputError: one line.
    """
    if init_from.startswith("https://") or not is_per_node(init_from):
        return
    parent, _, name = init_from.rstrip("/").rpartition("/")
    if name.endswith(SUFFIXES):
        there = any(found == name for found, _ in open_destination(parent).list(name))
    else:
        there = next(iter(open_destination(init_from).list("")), None) is not None
    if not there:
        raise _nothing(init_from)


def brought(init_from: str, folder: Path) -> Path:
    """A file or folder in `folder` with what lies at an address, which a restart uses again.

    Args:
        init_from: The address of a file of weights, of a bundle, of a model's exports whose
            CHAMPION names one, or of a checkpoint's folder step-<number>.
        folder: Made if need be.

    Raises:
        InputError: nothing lies there, or what lies there is damaged.
        StorageError: it cannot be read, or not be written here.
    """
    name = init_from.rstrip("/").rpartition("/")[2]
    target = folder / name
    if target.exists():
        return target
    aside = folder / f".{target.name}.{os.getpid()}"
    try:
        aside.mkdir(parents=True, exist_ok=True)
        _bring(init_from.rstrip("/"), name, aside)
        inner = aside / name if name.endswith(SUFFIXES) else aside
        inner.rename(target)
    except OSError as error:
        raise StorageError(
            f"cannot bring init_from={init_from} to {folder}: {error.strerror or error}; "
            "make room or repair the volume and start again"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"brought {init_from} to {target}", flush=True)
    return target


def _bring(address: str, name: str, folder: Path) -> None:
    if address.startswith("https://"):
        _download(address, folder / name)
        return
    parent = address.rpartition("/")[0]
    if name.endswith(SUFFIXES):
        _fetch(parent, name, folder)
    elif (found := champion.find(address)) is not None:
        found.fetch_weights(folder)
    elif open_destination(address).read(MANIFEST, _BLOCK) is not None:
        _fetch(address, MANIFEST, folder)
        _fetch(address, STATE, folder)
    else:
        raise InputError(
            f"init_from={address} holds neither a bundle nor a checkpoint: give the address of "
            f"either, or of a file {', '.join(SUFFIXES)}"
        )


def _fetch(where: str, name: str, folder: Path) -> None:
    with (folder / name).open("w+b") as file:
        if not open_destination(where).fetch(name, file, _LARGEST):
            raise _nothing(f"{where}/{name}")


def _download(url: str, target: Path) -> None:
    """A file by https; torchvision and others put a digest into its name, which is checked."""
    whole = hashlib.sha256()
    with target.open("wb") as file:
        for block in _blocks(url):
            whole.update(block)
            file.write(block)
    told = re.search(r"-([0-9a-f]{8,})\.", target.name)
    if told and not whole.hexdigest().startswith(told[1]):
        raise StorageError(f"{url} arrived damaged: its sha256 is not as its name tells; try again")


def _blocks(url: str) -> Iterator[bytes]:
    """What lies at an address by https; raises InputError where that is too much."""
    size = 0
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:  # noqa: S310  https only
            told = int(answer.headers.get("Content-Length") or 0)
            while max(size, told) <= _LARGEST and (block := answer.read(_BLOCK)):
                size += len(block)
                yield block
    except (OSError, HTTPException, ValueError) as error:
        raise _unreachable(url, error) from None
    if max(size, told) > _LARGEST:
        raise InputError(
            f"init_from={url} has {max(size, told):,} bytes or more, over the {_LARGEST:,} that "
            "weights may have: correct the address"
        )
    if size < told:
        raise _unreachable(url, f"the connection was cut after {size:,} bytes")


def _unreachable(url: str, why: object) -> StorageError:
    return StorageError(
        f"cannot fetch init_from={url}: {why}; give an address that the step can reach"
    )


def _nothing(address: str) -> InputError:
    return InputError(f"init_from={address} is not there: correct the address")
