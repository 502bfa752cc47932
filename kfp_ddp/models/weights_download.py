"""Initial weights of a training: where they come from, and their download."""

import contextlib
import hashlib
import io
import os
import re
import shutil
import sys
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, UnavailableError, writing
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.log import log
from kfp_ddp.core.secrets import reason
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.models import champion
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.http.answer import TooLongError
from kfp_ddp.storage.http.client import HttpClient, HttpPool
from kfp_ddp.storage.http.origin import Origin, Request, target_of
from kfp_ddp.storage.kinds import check_no_login, open_store
from kfp_ddp.storage.source import Retry, Transient, is_temporary
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.manifest import MANIFEST, STATE
from kfp_ddp.training.spec.network_settings import MODELS, RANDOM
from kfp_ddp.training.spec.torchvision_weights import (
    DEFAULT,
    PREFIX,
    TORCHVISION,
    address_of,
    cached,
    digest_in,
    file_of,
    files_of,
    is_intact,
)

MOST_IMAGES = 50_000
"""From this number on, `auto` means random weights: a choice by order of magnitude."""
SOURCE = "KFP_DDP_WEIGHTS"
"""Environment variable: a folder's address for torchvision's files, or off to download none."""
BAKED = "KFP_DDP_BAKED_WEIGHTS"
"""Environment variable of our images: networks whose weights the trainer image contains."""
_LARGEST = 16 << 30
"""Limit in bytes."""
_BLOCK = 1 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
_POINTER = re.compile(rb"version https://git-lfs\S*\noid sha256:([0-9a-f]{64})\n")
"""What a hub keeps in git for a large file."""
_SECONDS = 60.0
_RETRY = Retry(6, 0.5)
_PROBE_SECONDS = 4.0
_PROBES = Retry(3)
"""Time-out and attempts of the question whether a file can be downloaded."""


class Start(NamedTuple):
    """The weights that a run starts from."""

    pretrained: str
    """Value of the setting for the workers: an address or a path; true or torchvision:NAME for
    torchvision's weights in their cache; false for random weights."""
    model: str = ""
    """Network that they are of; '' if unknown."""
    origin: str = ""
    """Where they come from, or why they are random, for people; '' if they are random as usual."""

    def __bool__(self) -> bool:
        return self.pretrained != "false"


RANDOM_START = Start("false")


def find(pretrained: str, model: str, images: int = 0, own_image: bool = False) -> Start:
    """Return the initial weights that a setting means, and where they are; nothing is downloaded.

    They are looked for in torch's cache, the trainer image, then at `SOURCE`. Raise InputError if
    they cannot be had; never for auto. With `own_image` the workers have another image than ours.
    """
    optional = pretrained == "auto"
    if pretrained == "false" or (optional and not files_of(model)):
        return RANDOM_START
    if not _is_published(pretrained):
        return Start(pretrained, network_in(pretrained), f"starts from {pretrained}")
    name = _published_name(pretrained)
    file = file_of(name, model)
    if optional and images >= MOST_IMAGES:
        return RANDOM_START._replace(
            origin=f"random weights, as {images:,} images are enough for them"
        )
    what = f"published weights of {model} ({name})"
    value = "true" if name == DEFAULT else pretrained
    path = cached(file)
    if is_intact(path):
        return Start(value, model, f"starts from {what}, in {path}")
    is_baked = name == DEFAULT and model in os.environ.get(BAKED, "").split()
    if is_baked and not own_image:
        return Start(value, model, f"starts from {what}, in the trainer image")
    address = _published_address(file)
    problem = _problem_of(address)
    if not problem:
        return Start(address, model, f"starts from {what}, at {address}")
    if optional:
        return RANDOM_START._replace(origin=f"random weights, as {what} cannot be had: {problem}")
    kind = UnavailableError if problem.retryable else InputError
    raise kind(
        f"{what} cannot be had: {problem}; put the file at {path}, give pretrained an address "
        "that can be reached, or set pretrained=false"
    )


def _is_published(pretrained: str) -> bool:
    """Return whether the setting means weights that a library publishes, not a path or address."""
    return pretrained in ("auto", "true") or pretrained.startswith(PREFIX)


def _published_name(pretrained: str) -> str:
    """Return the name of published weights."""
    return pretrained.removeprefix(PREFIX) if pretrained.startswith(PREFIX) else DEFAULT


def _published_address(file: str) -> str:
    """Return where a file of published weights is, by `SOURCE` or its publisher."""
    source = os.environ.get(SOURCE, "")
    why = reason(source)
    if why:
        raise InputError(f"{SOURCE} {why}, and it is recorded as the origin: give it without")
    return f"{source}/{file}" if source else _pinned(address_of(file))


def obtain(pretrained: str, model: str, images: int = 0) -> Start:
    """Return what `find` does, with torchvision's weights downloaded to torch's cache."""
    start = find(pretrained, model, images)
    address = start.pretrained
    if not _is_published(pretrained) or not is_remote(address):
        return start
    print(f"downloading {address}", file=sys.stderr, flush=True)
    target = cached(file_of(_published_name(pretrained), model))
    try:
        _place(address, target, target.parent / f".{target.name}.{os.getpid()}")
    except KfpDdpError as error:
        if pretrained != "auto":
            raise
        return RANDOM_START._replace(origin=f"random weights: {error}")
    return find(pretrained, model, images)


def network_in(address: str) -> str:
    """Return the network in the file name of weights, such as resnet18-f37072fd.pth; else ''."""
    file = _file_name(address)
    if "." not in file:
        return ""
    for network, files in TORCHVISION.items():
        if file in files.values():
            return network
    begun = [name for name in MODELS if re.match(rf"{name}(?![a-z0-9])", file)]
    return max(begun, key=len, default="")


def _pinned(address: str) -> str:
    """Return the address of a file on a hub at its present commit, with its SHA-256.

    What the hub does not tell is left out; other addresses stay.
    """
    hub, main, file = address.partition("/resolve/main/")
    if not main:
        return address
    origin, _, model = hub.rpartition(f"/{timm_networks.PREFIX}")
    model = f"{timm_networks.PREFIX}{model}"
    check_no_login("HF_ENDPOINT", origin)
    commit = str(mapping_in(_answer(f"{origin}/api/models/{model}/revision/main")).get("sha"))
    if not _COMMIT.fullmatch(commit):
        return address
    pointer = _POINTER.match(_answer(f"{hub}/raw/{commit}/{file}"))
    digest = f"#sha256={pointer[1].decode()}" if pointer else ""
    return f"{hub}/resolve/{commit}/{file}{digest}"


def _answer(url: str) -> bytes:
    """Return the small answer of a hub; empty if it has none."""
    content = io.BytesIO()
    with contextlib.suppress(KfpDdpError):
        event_loop.run(_get(url, content, url, _PROBE_SECONDS, _PROBES, _BLOCK))
        return content.getvalue()
    return b""


def _problem_of(address: str) -> KfpDdpError | None:
    """Return why a file cannot be downloaded; None if it can."""
    if address.startswith("off/"):
        return InputError(f"{SOURCE} is off")
    if not is_remote(address):
        return None if Path(address).is_file() else InputError(f"{address} is missing")
    try:
        if address.startswith("https://"):
            event_loop.run(_get(address, io.BytesIO(), "", _PROBE_SECONDS, _PROBES, _LARGEST))
        else:
            check(address)
    except KfpDdpError as error:
        return error
    return None


def is_path(pretrained: str) -> bool:
    """Return whether the setting is a path, not an address or a word."""
    named = pretrained in ("", "true", *RANDOM) or pretrained.startswith(PREFIX)
    return not named and not is_remote(pretrained)


def is_per_node(pretrained: str) -> bool:
    """Return whether it must be downloaded: an address, or a folder with a bundle below it."""
    if not is_path(pretrained):
        return is_remote(pretrained)
    bundle = champion.locate(open_store(pretrained), "the bundle", "export it again")
    return bool(bundle.model or bundle.folder)


def check(pretrained: str) -> None:
    """Refuse an address that does not exist; the content is checked when it is downloaded."""
    if is_per_node(pretrained):
        _is_file(pretrained.rstrip("/"))


def _is_file(address: str) -> bool:
    """Return whether an address is a file's, by its store; InputError if nothing is there."""
    parent, _, name = address.rpartition("/")
    if address.startswith("https://") or open_store(parent).exists(name):
        return True
    if not open_store(address).has_files():
        raise _missing(address)
    return False


def _file_name(address: str) -> str:
    """Return a name for a local copy of what is at an address, whatever query or characters."""
    path = urlsplit(address).path if address.startswith("https://") else address
    name = unquote(path).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._=-]", "_", name)[-100:].lstrip(".") or "weights"


def download(pretrained: str, folder: Path) -> Path:
    """Download weights, a bundle or a checkpoint to `folder`; return it, which a restart reuses."""
    address = pretrained.rstrip("/")
    name = _file_name(address)
    key = hashlib.sha256(address.encode()).hexdigest()[:12]  # two addresses may end with one name
    target = folder / key / name
    if not target.exists():
        _place(address, target, folder / f".{key}.{os.getpid()}")
        log.info(f"downloaded {pretrained} to {target}")
    return target


def _place(address: str, target: Path, aside: Path) -> None:
    """Download to the folder `aside`, and move the file or folder to `target` when it is whole."""
    try:
        aside.mkdir(parents=True, exist_ok=True)
        copy = _download(address, aside / target.name)
        target.parent.mkdir(exist_ok=True)
        copy.rename(target)
    except OSError as error:
        raise StorageError(
            f"cannot download pretrained={address} to {aside.parent}: {error.strerror or error}; "
            "free some space or repair the volume and start again"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _download(address: str, file: Path) -> Path:
    """Download to `file` or to the folder around it, and return which of them."""
    folder = file.parent
    if _is_file(address):
        fetch = _download_https if address.startswith("https://") else _fetch
        fetch(address, file)
        return file
    if (model := champion.find(address)) is not None:
        model.fetch_weights(folder)
    elif open_store(address).read(MANIFEST, _BLOCK) is not None:
        for name in (MANIFEST, STATE):
            _fetch(f"{address}/{name}", folder / name)
    else:
        raise InputError(
            f"pretrained={address} has neither a bundle nor a checkpoint: give the address of "
            "either, or of a file of weights"
        )
    return folder


def _fetch(address: str, target: Path) -> None:
    where, _, name = address.rpartition("/")
    with target.open("w+b") as file:
        if not open_store(where).fetch(name, file, _LARGEST):
            raise _missing(address)


def _download_https(url: str, target: Path) -> None:
    """Download a file; check the SHA-256 of `url#sha256=…`, or in its name, or print it."""
    with target.open("wb") as file:
        digest = event_loop.run(_get(url, file, str(target), _SECONDS, _RETRY, _LARGEST))
    expected = digest_in(f"#{urlsplit(url).fragment}.{target.name}")
    if not expected:
        log.info(f"sha256 of {url}: {digest}")
    elif not digest.startswith(expected):
        raise StorageError(
            f"{url} arrived damaged: its sha256 is not the one in its address; try again"
        )


async def _get(
    url: str, into: BinaryIO, where: str, seconds: float, retry: Retry, limit: int
) -> str:
    """Write the content of an address to the file `where`; return its SHA-256. '' only asks.

    Raise InputError above `limit` bytes.
    """
    origin = Origin.of(url)
    request = Request(origin, target_of(urlsplit(url)), limit)

    async def attempt() -> str:
        digest = hashlib.sha256()

        def take(block: bytes) -> None:
            digest.update(block)
            with writing(where):
                into.write(block)

        try:
            into.seek(0)
            into.truncate()
            answer = await (client.pour(request, take) if where else client.get(request))
        except TooLongError as error:
            raise InputError(
                f"pretrained={url} has {error}, the maximum for weights: correct the address"
            ) from None
        if is_temporary(answer.status):
            raise Transient(f"HTTP {answer.status}")
        if answer.status != HTTPStatus.OK:
            raise InputError(
                f"cannot fetch pretrained={url}: HTTP {answer.status}; give an address that the "
                "step can reach"
            )
        return digest.hexdigest()

    with contextlib.closing(HttpClient(HttpPool(origin, seconds))) as client:
        return await retry.call("fetch", f"pretrained={url}", attempt)


def _missing(address: str) -> InputError:
    return InputError(f"pretrained={address} does not exist: correct the address")
