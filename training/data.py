"""Image folders: what is in them, whether it can be used, and in which order ranks read it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from kfp_ddp.training import transforms
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class Index:
    """The images of one split: class names, and for each image its path and class number."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    targets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)


def scan(split: Path, classes: Sequence[str] | None = None) -> Index:
    """List `<split>/<class>/**/*.{jpg,jpeg,png,webp}`, sorted, hidden files left out.

    Args:
        split: Folder with a folder for each class.
        classes: Class names of the training split; without them the folders name the classes.

    Raises:
        InputError: no such folder, no images, one class only, a class without images, or a
            class that `classes` does not have.
    """
    if not split.is_dir():
        raise InputError(
            f"there is no folder {split}: put the images there as {split.name}/<class>/*.jpg"
        )
    folders = sorted(
        entry.name for entry in os.scandir(split) if entry.is_dir() and entry.name[0] != "."
    )
    if not folders:
        raise InputError(f"{split} has no class folders: put images in {split}/<class>/")
    if classes is None and len(folders) == 1:
        raise InputError(
            f"{split} has one class only ({folders[0]}): a classifier needs two or more folders"
        )
    names = tuple(folders if classes is None else classes)
    unknown = sorted(set(folders) - set(names))
    if unknown:
        raise InputError(
            f"class {unknown[0]!r} is in {split} but not in the training split: "
            "remove it, or add it to both"
        )
    paths: list[str] = []
    targets: list[int] = []
    for folder in folders:
        found = sorted(_images(split / folder))
        if not found and classes is None:
            raise InputError(
                f"class folder {split / folder} has no images ({', '.join(SUFFIXES)}): "
                "fill it or remove it"
            )
        paths += found
        targets += [names.index(folder)] * len(found)
    if not paths:
        raise InputError(f"{split} holds no images ({', '.join(SUFFIXES)}): check the path")
    return Index(split, names, tuple(paths), tuple(targets))


def _images(folder: Path) -> Iterator[str]:
    for directory, _, files in os.walk(folder):
        for name in files:
            if name.lower().endswith(SUFFIXES) and name[0] != ".":
                yield os.path.join(directory, name)


def _decode(path: str, mode: Literal["RGB", "UNCHANGED"]) -> Tensor:
    from torchcodec.decoders import decode_image  # type: ignore[attr-defined]

    image: Tensor = decode_image(path, mode=mode)
    return image


def read(path: str, strict: bool = False) -> Tensor:
    """Decode one image to RGB uint8 [3, H, W], turned as its EXIF data say.

    Raises:
        InputError: the file cannot be read or decoded; or, if `strict`, is not RGB and square.
    """
    try:
        image = _decode(path, "UNCHANGED" if strict else "RGB")
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error).splitlines()[0].rpartition(", ")[2]
        raise InputError(
            f"cannot decode {path} ({why}): replace or remove the file, or set on_bad_image=skip"
        ) from None
    if image.ndim != 3:
        raise InputError(f"{path} is an animation: replace it by one image")
    if strict:
        _refuse_unusual(path, image)
    return image


def _refuse_unusual(path: str, image: Tensor) -> None:
    channels, height, width = image.shape
    if channels != 3:
        raise InputError(
            f"{path} is not RGB but has {channels} channels: convert it, or set images=convert"
        )
    if height != width:
        raise InputError(f"{path} is {width}x{height}, not square: crop it, or set images=convert")


class Findings(NamedTuple):
    """What `verify` saw in the images it decoded."""

    checked: int
    broken: int
    not_rgb: int
    not_square: int
    first_unusual: str


def verify(index: Index, config: TrainConfig, rank: int, world: int) -> Findings:
    """Decode up to `config.verify_images` images, evenly chosen, this rank's share of them.

    Raises:
        InputError: a broken image where `on_bad_image` is fail, or an unusual one where `images`
            is strict.
    """
    stride = max(1, -(-len(index) // max(1, config.verify_images)))
    chosen = range(0, len(index), stride) if config.verify_images else range(0)
    broken = not_rgb = not_square = 0
    first = ""
    share = chosen[rank::world]
    for i in share:
        path = index.paths[i]
        try:
            image = _unchanged(path)
        except InputError:
            if config.on_bad_image == "fail":
                raise
            broken += 1
            continue
        if config.images == "strict":
            _refuse_unusual(path, image)
        unusual = (image.shape[0] != 3, image.shape[1] != image.shape[2])
        not_rgb += unusual[0]
        not_square += unusual[1]
        first = first or (path if any(unusual) else "")
    return Findings(len(share), broken, not_rgb, not_square, first)


def _unchanged(path: str) -> Tensor:
    """The image as stored; what only RGB decoding can read counts as one channel."""
    try:
        return _decode(path, "UNCHANGED")
    except (RuntimeError, ValueError, OSError):
        return read(path)[:1]


class Batch(NamedTuple):
    """One micro-batch, as the loader hands it over."""

    images: Tensor
    """uint8 [N, 3, size, size], channels last in memory."""
    targets: Tensor
    """int64 [N]."""
    indices: Tensor
    """int64 [N], positions in the index."""
    skipped: int
    """Images that could not be read: replaced by a neighbour, or in evaluation left out."""
    error: str
    """Why the batch cannot be used; empty if it can."""


class Images(Dataset[Batch]):
    """Decoded and transformed images, fetched a micro-batch at a time by (epoch, position)."""

    def __init__(self, index: Index, config: TrainConfig, training: bool) -> None:
        self.index = index
        self.config = config
        self.size = config.image_size
        self.augment = transforms.augmentation(config) if training else ""

    def __len__(self) -> int:
        return len(self.index)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        """The micro-batch of these (epoch, position) pairs."""
        pixels = torch.empty(len(keys), self.size, self.size, 3, dtype=torch.uint8)
        images = pixels.permute(0, 3, 1, 2)
        indices = torch.tensor([position for _, position in keys])
        targets = torch.tensor([self.index.targets[position] for _, position in keys])
        kept: list[int] = []
        for row, (epoch, position) in enumerate(keys):
            try:
                image, at = self._usable(position)
            except InputError as error:
                if self.augment or self.config.on_bad_image == "fail":
                    return Batch(images, targets, indices, 0, str(error))
                continue
            if at == position:
                kept.append(row)
            indices[row], targets[row] = at, self.index.targets[at]
            if self.augment:
                draw = transforms.generator(self.config.seed, epoch, at)
                images[row] = transforms.train(image, self.size, self.augment, draw)
            else:
                images[row] = transforms.evaluate(image, self.size)
        skipped = len(keys) - len(kept)
        if skipped and not self.augment:
            images, targets, indices = images[kept], targets[kept], indices[kept]
        return Batch(images, targets, indices, skipped, "")

    def _usable(self, position: int) -> tuple[Tensor, int]:
        """The image at `position`; training under on_bad_image=skip, else the next readable one."""
        strict = self.config.images == "strict"
        try:
            return read(self.index.paths[position], strict), position
        except InputError:
            if self.config.on_bad_image == "fail" or not self.augment:
                raise
        for offset in range(1, min(len(self.index), 100)):
            at = (position + offset) % len(self.index)
            try:
                return read(self.index.paths[at], strict), at
            except InputError:
                continue
        raise InputError(f"100 images in a row cannot be read from {self.index.paths[position]}")


class ResumableSampler(DistributedSampler[Any]):
    """Deals an epoch's permutation in micro-batches, round robin, from any step on.

    The permutation depends on (seed, epoch) alone and is cut into global batches of whole
    micro-batches; rank r takes micro-batches r, r + world, ... of each. So the position in the
    data is the step alone, whatever the world size, and the last partial batch is left out.
    """

    def __init__(
        self, samples: int, batch: int, micro: int, rank: int, world: int, seed: int
    ) -> None:
        super().__init__(range(samples), num_replicas=world, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.samples = samples
        self.micro = micro
        self.per_step = batch // micro
        self.steps = samples // batch
        self.first_step = 0

    def set_position(self, epoch: int, step: int) -> None:
        """Start the next iteration at step `step` (from 0) of `epoch`."""
        self.set_epoch(epoch)
        self.first_step = step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """This rank's micro-batches of (epoch, position) pairs, step after step."""
        shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.samples, generator=shuffle)
        used = order[: self.steps * self.per_step * self.micro]
        steps = used.view(self.steps, self.per_step, self.micro)[self.first_step :]
        for batch in steps[:, self.rank :: self.num_replicas]:
            for micro in batch.tolist():
                yield [(self.epoch, position) for position in micro]

    def __len__(self) -> int:
        return (self.steps - self.first_step) * len(
            range(self.rank, self.per_step, self.num_replicas)
        )


class Epochs:
    """The micro-batches of all epochs that remain, one after the other, as one batch sampler.

    One iteration for the whole run keeps the loader's processes and their prefetch alive across
    epoch boundaries; the epoch travels with each position.
    """

    def __init__(self, sampler: ResumableSampler, first_step: int, epochs: int) -> None:
        self.sampler, self.first_step, self.epochs = sampler, first_step, epochs

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, step = divmod(self.first_step, self.sampler.steps)
        for current in range(epoch, self.epochs):
            self.sampler.set_position(current, step if current == epoch else 0)
            yield from self.sampler


def loader(dataset: Images, batches: Any, workers: int, pin: bool) -> "DataLoader[Batch]":
    """A loader whose processes ignore Ctrl-C, which is for their parent."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=pin,
        worker_init_fn=_start_worker if workers else None,
        prefetch_factor=4 if workers else None,
    )


def _as_is(batch: Any) -> Any:
    """The dataset makes whole batches itself."""
    return batch


def _start_worker(number: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def evaluation_batches(
    index: Index, image_size: int, batch_size: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every image once over the ranks: uint8 [N, 3, S, S], targets [N], positions in the index [N].

    Raises:
        InputError: an image that cannot be decoded.
    """
    positions = range(rank, len(index), world)
    for start in range(0, len(positions), batch_size):
        chosen = positions[start : start + batch_size]
        pixels = torch.empty(len(chosen), image_size, image_size, 3, dtype=torch.uint8)
        images = pixels.permute(0, 3, 1, 2)
        for row, position in enumerate(chosen):
            images[row] = transforms.evaluate(read(index.paths[position]), image_size)
        targets = torch.tensor([index.targets[position] for position in chosen])
        yield images, targets, torch.tensor(list(chosen))
