"""Before the first step: check and complete data and settings, and build the image cache."""

import hashlib
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.core.run_folder import RunFolder, try_to_write
from kfp_ddp.training import batches, model, own_model, resume
from kfp_ddp.training.cache import Cache, folder_for
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Split
from kfp_ddp.training.distributed import World
from kfp_ddp.training.images import Findings, examine
from kfp_ddp.training.initial_weights import initialise
from kfp_ddp.training.splits import Index, splits_of
from kfp_ddp.training.transforms import size_of_epoch
from kfp_ddp.training.watch import ELASTIC, LAUNCH

_TOGETHER = 1000


def prepare(config: TrainConfig, world: World) -> tuple[TrainConfig, Split, Split]:
    """The configuration with its automatic values, and the training and validation splits.

    Raises:
        KfpDdpError: data, settings or the output folder cannot be used; on every rank.
    """
    launches = world.gather(os.environ.get(LAUNCH, ""))
    config, train, val = world.from_first(lambda: _scan(config))
    config = world.from_first(lambda: resolve(config, world, len(train), launches))
    world.from_first(lambda: try_out(config, train.classes))
    caches = _built_or_examined(config, world, train, val)
    world.from_first(lambda: _begin(config, launches))
    digest = digest_of(train, world)
    return config, Split(train, caches[0], digest), Split(val, caches[1])


def _scan(config: TrainConfig) -> tuple[TrainConfig, Index, Index]:
    """Both splits, after a try to write to the output folder.

    The configuration keeps a share for validation only if it was used: whoever evaluates finds the
    same split by it.
    """
    try:
        try_to_write(Path(config.output_dir))
    except OSError as error:
        raise StorageError(
            f"cannot write to output_dir={config.output_dir}: {error.strerror}; "
            "give the run a folder that its user may write"
        ) from None
    found = splits_of(Path(config.data), config.val_fraction, config.labels)
    share = config.val_fraction if found.by_name else 0.0
    return config.model_copy(update={"val_fraction": share}), found.train, found.val


def digest_of(index: Index, world: World) -> str:
    """A digest of the images' paths below their split and their sizes, the same on any ranks.

    Each rank asks for a share of the sizes, many at a time: a network file system answers slowly.
    """
    starts = range(0, len(index), _TOGETHER)
    mine = starts[world.rank :: world.size]
    with ThreadPoolExecutor(16) as pool:
        parts = dict(zip(mine, pool.map(lambda start: _about(index, start), mine), strict=True))
    for others in world.gather(parts):
        parts |= others
    whole = hashlib.sha256()
    for start in starts:
        whole.update(parts[start])
    return whole.hexdigest()


def _about(index: Index, start: int) -> bytes:
    digest = hashlib.sha256()
    for position in range(start, min(start + _TOGETHER, len(index))):
        path, where = index.paths[position], index.where(position)
        try:
            size = os.stat(path).st_size if index.slices is None else where.size
        except OSError:  # said better where it is read
            size = -1
        digest.update(f"{path.removeprefix(str(index.root))}\0{size}\0".encode())
        if index.slices is not None:  # the order depends on it
            digest.update(f"{Path(where.file).name}\0{where.offset}\0".encode())
    return digest.digest()


def resolve(
    config: TrainConfig, world: World, images: int, launches: Sequence[str] = ()
) -> TrainConfig:
    """The configuration for so many training images, with its automatic values filled in.

    Raises:
        InputError: the batch cannot be divided among the ranks, or there are too few images for it.
    """
    ranks = world.size
    if config.strategy == "single" and ranks > 1:
        raise InputError(f"strategy=single but {ranks} ranks: launch one, or use strategy=ddp")
    if resume.goes_on(config, launches):
        config = config.model_copy(update={"resume": "auto"})
    before = resume.earlier_config(config)
    # With unequal numbers sharded ranks would gather unequally often, and hang.
    uneven = ELASTIC in os.environ and config.strategy != "fsdp"
    batch, micro = batches.divide(config, images, ranks, uneven, before)
    if batch != config.batch_size and not config.batch_size_per_rank and not before:
        print(
            f"batch_size is {batch}, not {config.batch_size}: it was not set, and that is what "
            f"{images} training images allow on {ranks} ranks",
            flush=True,
        )
    kept = {}
    if before:
        unset = [name for name in ("weight_decay", "momentum") if not config.is_set(name)]
        kept = {name: before[name] for name in unset}
    warmup = config.warmup_epochs
    if before and not config.is_set("warmup_epochs") and before["warmup_epochs"] < config.epochs:
        warmup = before["warmup_epochs"]
    precision = config.precision
    if precision == "auto":
        cuda = world.device.type == "cuda"
        bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if bf16 else "fp32"
    return config.model_copy(
        update={
            "batch_size": batch,
            "micro_batch_size": micro,
            "warmup_epochs": warmup,
            "precision": precision,
            **kept,
        }
    )


def _begin(config: TrainConfig, launches: Sequence[str]) -> None:
    RunFolder(config.output_dir).config.write_text(config.to_json() + "\n")
    resume.begin(config, launches)


def _built_or_examined(
    config: TrainConfig, world: World, train: Index, val: Index
) -> list[Cache | None]:
    """A cache of each split where both fit; otherwise images are only tried, and it is None."""
    found: list[Findings] = []
    caches: list[Cache | None] = []
    problem: KfpDdpError | None = None
    folder = None
    try:
        folder = folder_for(config, [train, val])
        for split, name in ((train, "train"), (val, "val")):
            if folder is None:
                caches.append(None)
                stride = max(1, -(-len(split) // max(1, config.verify_images)))
                chosen = range(0, len(split) if config.verify_images else 0, stride)
                mine = chosen[world.rank :: world.size]
                found.append(examine(split.where, mine, config))
            else:
                cache = Cache(folder, name, len(split), world.local_size)
                caches.append(cache)
                built = cache.build(split.where, config, name == "train", world.local_rank)
                found.append(built)
    except KfpDdpError as error:
        problem = error
    for rank, its in enumerate(world.gather(problem)):
        if its is not None:
            world.raise_on_all(its, rank)
    part = world.rank if folder is None else world.local_rank
    _warn(world.gather((part, found)), world.first)
    return caches


def _warn(found: list[tuple[int, list[Findings]]], first: bool) -> None:
    """One line if images had to be converted or could not be read.

    `found` holds each rank's part and what it saw of it in each split. Every node looks at all
    parts for its cache, unless another had filled it: a part counts once.
    """
    seen: dict[tuple[int, int], Findings] = {}
    for part, splits in found:
        for number, item in enumerate(splits):
            seen[part, number] = max(item, seen.get((part, number), item))
    findings = list(seen.values())
    checked = sum(item.checked for item in findings)
    broken = sum(item.broken for item in findings)
    not_rgb = sum(item.not_rgb for item in findings)
    unusual = [item.first_not_rgb for item in findings if item.first_not_rgb]
    if broken and first:
        print(f"warning: {broken} of {checked} images cannot be read", file=sys.stderr, flush=True)
    if unusual and first:
        print(
            f"warning: of {checked} images checked, {not_rgb} are not RGB (first {unusual[0]}); "
            "they are converted, images=strict refuses them",
            file=sys.stderr,
            flush=True,
        )


def try_out(config: TrainConfig, classes: tuple[str, ...]) -> None:
    """Build the network, begin with its weights, and compute at each size that the run has.

    Raises:
        InputError: what fails, or gives no logits of as many classes; one line.
    """
    network = model.of(config, len(classes))
    if config.init_from:
        initialise(network, config, classes, say=False)
    training = {size_of_epoch(config, 0), size_of_epoch(config, config.epochs)}
    network.eval()
    for size in sorted({*training, config.image_size}):
        with torch.no_grad():
            _logits(network, config, len(classes), size)
    own = None if config.script else own_model.of(config)
    if own:
        network.train()
        logits = _logits(network, config, len(classes), max(training))
        loss = own.lost(logits, torch.zeros(2, dtype=torch.int64)) if own.loss else logits.sum()
        _refuse_unused(network, loss)
        if own.optimizer:
            own.scheduled(network, config, config.learning_rate)
        if own.transforms:
            image = torch.zeros(3, max(training), 2 * max(training), dtype=torch.uint8)
            own.transformed(image, max(training), random.Random(0))


def _logits(network: nn.Module, config: TrainConfig, classes: int, size: int) -> Tensor:
    """What the network says of two blank images."""
    name = config.model
    try:
        found: Tensor = network(torch.zeros(2, 3, size, size))
    except Exception as error:
        if config.model_code:
            what = own_model.raised(name, error)
            raise InputError(f"model={name} on images of {size} px {what}") from error
        raise model.cannot_take(name, size, error) from error
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != [2, classes] or not found.is_floating_point():
        raise InputError(
            f"model={name} gives {shape} for two images of {size} px, not logits [2, {classes}]: "
            f"let it return one number for each of the {classes} classes"
        )
    return found


def _refuse_unused(network: nn.Module, loss: Tensor) -> None:
    """A weight without a gradient would let the ranks wait for each other."""
    torch.autograd.backward(loss)
    named = network.named_parameters()
    unused = [name for name, p in named if p.requires_grad and p.grad is None]
    if unused:
        raise InputError(
            f"{unused[0]} has no part in the logits of the model{_more(len(unused))}: remove it "
            "from the network, or set its requires_grad to False"
        )


def _more(count: int) -> str:
    return f" ({count} weights in all)" if count > 1 else ""
