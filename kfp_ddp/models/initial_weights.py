"""Initial weights of a training, downloaded from an address."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.models import champion
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.http.answer import TooLongError
from kfp_ddp.storage.http.client import HttpClient, HttpPool
from kfp_ddp.storage.http.origin import Origin, Request, target_of
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.manifest import MANIFEST, STATE

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
_LARGEST = 16 << 30
"""Limit in bytes."""
_BLOCK = 1 << 20
_SECONDS = 60.0


def is_per_node(init_from: str) -> bool:
    """Return whether it must be downloaded: an address, or the folder of a model's exports.

    That folder has no weights, but its CHAMPION names a bundle.
    """
    exports = bool(init_from) and (Path(init_from) / champion.CHAMPION).is_file()
    return exports or is_remote(init_from)


def check(init_from: str) -> None:
    """Refuse an address that does not exist; the content is checked when it is downloaded.

    Raises:
        InputError: it does not exist.
    """
    if init_from.startswith("https://") or not is_per_node(init_from):
        return
    parent, _, name = init_from.rstrip("/").rpartition("/")
    if name.endswith(SUFFIXES):
        exists = open_store(parent).exists(name)
    else:
        exists = open_store(init_from).has_files()
    if not exists:
        raise _missing(init_from)


def download(init_from: str, folder: Path) -> Path:
    """Download the weights to `folder`; return the file or folder, which a restart reuses.

    Args:
        init_from: The address of a file of weights, of a bundle, of a model's exports whose
            CHAMPION names one, or of a checkpoint's folder step-<number>.
        folder: Created if needed.

    Raises:
        InputError: the address does not exist, or its content is damaged.
        StorageError: it cannot be read, or not be written here.
    """
    address = init_from.rstrip("/")
    name = address.rpartition("/")[2]
    key = hashlib.sha256(address.encode()).hexdigest()[:12]  # two addresses may end with one name
    target = folder / key / name
    if target.exists():
        return target
    aside = folder / f".{key}.{os.getpid()}"
    try:
        aside.mkdir(parents=True, exist_ok=True)
        _download(address, name, aside)
        inner = aside / name if name.endswith(SUFFIXES) else aside
        target.parent.mkdir(exist_ok=True)
        inner.rename(target)
    except OSError as error:
        raise StorageError(
            f"cannot download init_from={init_from} to {folder}: {error.strerror or error}; "
            "free some space or repair the volume and start again"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"downloaded {init_from} to {target}", flush=True)
    return target


def _download(address: str, name: str, folder: Path) -> None:
    if address.startswith("https://"):
        _download_https(address, folder / name)
        return
    parent = address.rpartition("/")[0]
    if name.endswith(SUFFIXES):
        _fetch(parent, name, folder)
    elif (model := champion.find(address)) is not None:
        model.fetch_weights(folder)
    elif open_store(address).read(MANIFEST, _BLOCK) is not None:
        _fetch(address, MANIFEST, folder)
        _fetch(address, STATE, folder)
    else:
        raise InputError(
            f"init_from={address} has neither a bundle nor a checkpoint: give the address of "
            f"either, or of a file {', '.join(SUFFIXES)}"
        )


def _fetch(where: str, name: str, folder: Path) -> None:
    with (folder / name).open("w+b") as file:
        if not open_store(where).fetch(name, file, _LARGEST):
            raise _missing(f"{where}/{name}")


def _download_https(url: str, target: Path) -> None:
    """Download a file, and print its SHA-256; a digest in its name, as of torchvision, is checked.

    Redirects stay with https.
    """
    digest = hashlib.sha256()
    full: list[OSError] = []

    with target.open("wb") as file:

        def take(block: bytes) -> None:
            digest.update(block)
            try:
                file.write(block)
            except OSError as error:
                full.append(error)
                raise

        try:
            status = event_loop.run(_get(url, take))
        except TooLongError as error:
            raise InputError(
                f"init_from={url} has {error}, which weights may have: correct the address"
            ) from None
        except OSError as error:
            if full:
                raise full[0] from None
            raise _unreachable(url, error) from None
        if status != HTTPStatus.OK:
            raise _unreachable(url, f"HTTP {status}")
    print(f"sha256 of {url}: {digest.hexdigest()}", flush=True)
    suffix = re.search(r"-([0-9a-f]{8,})\.", target.name)
    if suffix and not digest.hexdigest().startswith(suffix[1]):
        raise StorageError(
            f"{url} arrived damaged: its sha256 is not the one in its name; try again"
        )


async def _get(url: str, take: Callable[[bytes], None]) -> int:
    """Pass the content of an address to `take`; return the status."""
    origin = Origin.of(url)
    client = HttpClient(HttpPool(origin, _SECONDS))
    try:
        return (await client.pour(Request(origin, target_of(urlsplit(url)), _LARGEST), take)).status
    finally:
        client.close()


def _unreachable(url: str, why: object) -> StorageError:
    return StorageError(
        f"cannot fetch init_from={url}: {why}; give an address that the step can reach"
    )


def _missing(address: str) -> InputError:
    return InputError(f"init_from={address} does not exist: correct the address")
