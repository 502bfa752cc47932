"""Before the first step: check and complete data and settings, and build the image cache."""

import hashlib
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError, KfpDdpError, writing
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import try_to_write
from kfp_ddp.core.version import pinned
from kfp_ddp.pictures import shards
from kfp_ddp.pictures.splits import Index, Splits, splits_of
from kfp_ddp.training import memory
from kfp_ddp.training.data import on_device
from kfp_ddp.training.data.cache import Cache, folder_for
from kfp_ddp.training.data.image_files import Findings, examine
from kfp_ddp.training.data.loader import Split
from kfp_ddp.training.data.transforms import size_of_epoch
from kfp_ddp.training.distributed import World, half_precision
from kfp_ddp.training.model import networks, own_model
from kfp_ddp.training.spec import batches, shared_memory
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.optimizer_settings import AUTO
from kfp_ddp.training.state import saving
from kfp_ddp.training.state.initial_weights import initialise, network_of
from kfp_ddp.training.watch import LAUNCH

_TOGETHER = 1000
_NAMED = 8
"""Unreadable images in a warning."""


def prepare(config: TrainConfig, world: World) -> tuple[TrainConfig, Split, Split]:
    """Return the complete configuration, and both splits; raise a KfpDdpError on every rank."""
    launches = world.gather(os.environ.get(LAUNCH, ""))
    config, train, val = world.from_first(lambda: _scan(config))
    lowers = config.micro_batch_size == AUTO
    config = world.from_first(lambda: resolve(config, world, len(train), launches))
    config = config.model_copy(update={"precision": precision_of(config, world)})
    world.from_first(lambda: check_network(config, train.classes))
    if lowers:
        config = memory.fit(config, world, train)
    caches, prefetch = _built_or_examined(config, world, train, val)
    world.from_first(lambda: saving.begin(config, launches))
    contents = world.from_first(lambda: contents_of(Path(config.data), train, val))
    train_split, val_split = (
        Split(index, cache, digest_of(index, world), digest, prefetch)
        for index, cache, digest in zip((train, val), caches, contents, strict=True)
    )
    return config, train_split, val_split


def _scan(config: TrainConfig) -> tuple[TrainConfig, Index, Index]:
    """List both splits of a run with a writable output folder, and name the network of weights."""
    with writing(config.output_dir, "give the run an output_dir that its user may write"):
        try_to_write(Path(config.output_dir))
    if not config.is_set("model"):
        config = _with_model_of_weights(config)
    config, splits = with_splits(config)
    return config, splits.train, splits.val


def _with_model_of_weights(config: TrainConfig) -> TrainConfig:
    """Set the model to the network that the weights on disk name."""
    path = Path(config.pretrained)
    model = network_of(path) if path.exists() else ""
    if not model:
        return config
    log.info(f"model is {model}: it was not set, and {path} has weights of it")
    return TrainConfig.create(**{**config.explicit(), "model": model})


def with_splits(config: TrainConfig) -> tuple[TrainConfig, Splits]:
    """List the splits; the returned configuration has `val_fraction` only if it was used."""
    data = pinned(Path(config.data))
    splits = splits_of(data, config.layout_rule)
    used = {"data": str(data), "val_fraction": config.val_fraction * splits.by_name}
    return config.model_copy(update=used), splits


def digest_of(index: Index, world: World) -> str:
    """Return a digest of the images' paths and sizes; each rank reads a part, many in parallel."""
    starts = range(0, len(index), _TOGETHER)
    mine = starts[world.rank :: world.size]
    with ThreadPoolExecutor(16) as pool:
        parts = dict(zip(mine, pool.map(lambda start: _about(index, start), mine), strict=True))
    for others in world.gather(parts):
        parts |= others
    return hashlib.sha256(b"".join(parts[start] for start in starts)).hexdigest()


def _about(index: Index, start: int) -> bytes:
    digest = hashlib.sha256()
    for position in range(start, min(start + _TOGETHER, len(index))):
        path = index.paths[position]
        where = index.where(position)
        try:
            size = os.stat(path).st_size if index.slices is None else where.size
        except OSError:  # reported when the image is read
            size = -1
        digest.update(f"{path.removeprefix(str(index.root))}\0{size}\0".encode())
        if index.slices is not None:  # the order depends on it
            digest.update(f"{Path(where.file).name}\0{where.offset}\0".encode())
    return digest.digest()


def contents_of(data: Path, *splits: Index) -> list[str]:
    """Return a digest of the names and checksums of each split; '' if data is not a version."""
    sums = shards.checksums(data)
    digests = []
    for index in splits:
        digest = hashlib.sha256()
        for path in index.paths:
            name = path.removeprefix(f"{data}/")
            digest.update(f"{name}\0{sums.get(name)}\0".encode())
        digests.append(digest.hexdigest() if sums else "")
    return digests


def resolve(
    config: TrainConfig, world: World, images: int, launches: Sequence[str] = ()
) -> TrainConfig:
    """Fill in automatic values for this number of training images; raise InputError."""
    ranks = world.size
    batches.check_single(config, ranks)
    if saving.continues(config, launches):
        config = config.model_copy(update={"resume": "auto"})
    before = saving.earlier_config(config)
    batch, micro = batches.divide(config, images, ranks, before)
    chosen = config.batch_size_per_rank or before
    if batch != config.batch_size and not chosen:
        log.info(
            f"batch_size is {batch}, not {config.batch_size}: it was not set, and this is what "
            f"{images} training images allow on {ranks} ranks"
        )
    saved = _saved_before(config, before) if before else {}
    decode = _decode(config, world)
    filled = {"batch_size": batch, "micro_batch_size": micro, "decode": decode}
    return config.model_copy(update={**filled, **saved})


def _saved_before(config: TrainConfig, before: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the earlier run that hold unless they are set anew."""
    names = {"weight_decay", "momentum", "background", "value_range", "fit"}
    if config.starts_from_weights:  # they name the network, but may be gone
        names.add("model")
    if before["warmup_epochs"] < config.epochs:
        names.add("warmup_epochs")
    # Early versions lack these.
    earlier = {"background": "", "value_range": "", "fit": "crop", **before}
    return {name: earlier[name] for name in names if not config.is_set(name)}


def _decode(config: TrainConfig, world: World) -> str:
    """Return how images are decoded; raise InputError if decode=gpu is not possible."""
    if config.decode == "cpu":
        return "cpu"
    obstacle = on_device.obstacle(config, world.device)
    if not obstacle:
        return config.decode
    if config.decode == "gpu":
        raise InputError(f"decode=gpu is not possible: {obstacle}; set decode=cpu")
    return "cpu"


def precision_of(config: TrainConfig, world: World) -> str:
    """Return the precision of a run: the fastest that all its devices have."""
    if config.precision != "auto":
        return config.precision
    first, *others = {*world.gather(half_precision(world.device))}
    precision = "fp32" if others else first  # of bf16 and fp16, each lacks one
    if world.device.type != "cpu":
        name = _name_of(world.device)
        devices = f"{name} and others" if others else name
        world.print(f"precision={precision}, by {devices}")
    return precision


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "an Apple GPU"


def _built_or_examined(
    config: TrainConfig, world: World, train: Index, val: Index
) -> tuple[list[Cache | None], int]:
    """Build a cache of each split if both fit, else check images; return also the prefetch."""
    findings: list[Findings] = []
    caches: list[Cache | None] = []
    problem: KfpDdpError | None = None
    folder = None
    prefetch = shared_memory.PREFETCH
    try:
        folder = folder_for(config, [train, val])
        for split, name in ((train, "train"), (val, "val")):
            if folder is None:
                caches.append(None)
                findings.append(_examine(split, config, world))
            else:
                cache = Cache(folder, name, len(split), world.local_size)
                caches.append(cache)
                part = world.local_rank
                findings.append(cache.build(split.where, config, name == "train", part))
        batches_of_val = 0 if folder else -(-len(val) // (config.micro_batch_size * world.size))
        prefetch = shared_memory.prefetch_that_fits(config, world.local_size, batches_of_val)
    except KfpDdpError as error:
        problem = error
    # A rank that raised alone would leave the others waiting for it.
    for rank, raised in enumerate(world.gather(problem)):
        if raised is not None:
            world.raise_on_all(raised, rank)
    part = world.rank if folder is None else world.local_rank
    reports = world.gather((part, findings))
    if world.first:
        _warn(reports)
        if prefetch < shared_memory.PREFETCH:
            log.info(f"loaders have {prefetch} batches ready: {shared_memory.FOLDER} is small")
    return caches, prefetch


def _examine(split: Index, config: TrainConfig, world: World) -> Findings:
    """Examine this rank's share of up to `verify_images` images, spread over the split."""
    images = len(split) if config.verify_images else 0
    stride = max(1, -(-images // max(1, config.verify_images)))
    chosen = range(0, images, stride)
    return examine(split.where, chosen[world.rank :: world.size], config)


def _warn(reports: list[tuple[int, list[Findings]]]) -> None:
    """Print a warning of converted or unreadable images; a part that nodes share counts once."""
    counted: dict[tuple[int, int], Findings] = {}
    for part, splits in reports:
        for number, item in enumerate(splits):
            counted[part, number] = max(item, counted.get((part, number), item))
    findings = list(counted.values())
    checked = sum(item.checked for item in findings)
    _warn_of_broken(sorted(name for item in findings for name in item.broken), checked)
    not_rgb = sum(item.not_rgb for item in findings)
    unusual = [item.first_not_rgb for item in findings if item.first_not_rgb]
    if unusual:
        log.warning(
            f"of {checked} images checked, {not_rgb} are not RGB (first {unusual[0]}); "
            "they are converted (see background and value_range), images=strict refuses them"
        )


def _warn_of_broken(names: list[str], checked: int) -> None:
    if not names:
        return
    first = ", ".join(names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    log.warning(
        f"{len(names):,} of {checked:,} images cannot be read and are skipped: {first}{more}"
    )


def check_network(config: TrainConfig, classes: tuple[str, ...]) -> None:
    """Build the network, load its weights, and compute at each image size; raise InputError."""
    network = networks.build_for(config, len(classes))
    if config.starts_from_weights:
        initialise(network, config, classes, report=False)
    training = {size_of_epoch(config, 0), size_of_epoch(config, config.epochs)}
    network.eval()
    for size in sorted({*training, config.image_size}):
        with torch.no_grad():
            compute_logits(network, config, len(classes), size)
    if config.micro_batch_size == 1 and config.freeze_epochs < config.epochs:
        network.train()
        compute_logits(network, config, len(classes), min(training), images=1)
    own = None if config.script else own_model.load_for(config)
    if own:
        network.train()
        logits = compute_logits(network, config, len(classes), max(training))
        _check_own_functions(own, network, config, logits)


def _check_own_functions(
    own: own_model.OwnModel, network: nn.Module, config: TrainConfig, logits: Tensor
) -> None:
    """Call the functions of a user's file once; raise InputError if one fails."""
    targets = torch.zeros(len(logits), dtype=torch.int64)
    loss = own.compute_loss(logits, targets) if own.loss else logits.sum()
    _refuse_unused(network, loss)
    if own.optimizer:
        own.create_optimizer(network, config, config.learning_rate)
    if own.transforms:
        size = max(size_of_epoch(config, 0), size_of_epoch(config, config.epochs))
        image = torch.zeros(3, size, 2 * size, dtype=torch.uint8)
        own.apply_transforms(image, size, random.Random(0))


def compute_logits(
    network: nn.Module, config: TrainConfig, classes: int, size: int, images: int = 2
) -> Tensor:
    """Return the logits of blank images; raise InputError if the network cannot compute them."""
    name = config.model
    try:
        output: Tensor = network(torch.zeros(images, 3, size, size))
    except Exception as error:
        if images == 1 and "more than 1 value per channel" in str(error):
            raise InputError(
                f"model={name} has one value per channel in a BatchNorm, with one image of {size} "
                f"px in a forward pass: raise batch_size to {2 * config.batch_size} (and "
                "micro_batch_size, if set, to 2), use fewer ranks, or a larger image_size"
            ) from error
        if config.model_code:
            what = own_model.describe_error(name, error)
            raise InputError(f"model={name} on images of {size} px {what}") from error
        raise networks.size_error(name, size, error) from error
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != [images, classes] or not output.is_floating_point():
        raise InputError(
            f"model={name} gives {shape} for images of {size} px, not logits {[images, classes]}: "
            f"return one number for each of the {classes} classes"
        )
    return output


def _refuse_unused(network: nn.Module, loss: Tensor) -> None:
    """Raise InputError for a weight without a gradient: with DDP the ranks would hang."""
    torch.autograd.backward(loss)
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    unused = [name for name, weight in trained if weight.grad is None]
    if unused:
        raise InputError(
            f"{unused[0]} is not used for the logits of the model ({len(unused)} weights in all): "
            "remove it from the network, or set its requires_grad to False"
        )
