"""Image folders: what is in them, and their images in batches."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import transforms
from kfp_ddp.training.cache import Cache
from kfp_ddp.training.config import MAX_PIXELS, TrainConfig
from kfp_ddp.training.fractions import Decoded
from kfp_ddp.training.images import read, read_part
from kfp_ddp.training.read_ahead import ReadAhead, in_store_order, pieces
from kfp_ddp.training.sampler import Key, Keys
from kfp_ddp.training.shards import Slices, Where
from kfp_ddp.training.sides import SUFFIXES, is_image


@dataclass(frozen=True)
class Index:
    """The images of one split: class names, and for each image its path and class number."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    targets: tuple[int, ...]
    slices: Slices | None = None
    """Of a packed version: in which bytes of which archive each image is. A path is then only a
    name, `<folder of the version>/<member>`."""

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, position: int) -> Where:
        """Where the bytes of an image are."""
        path = self.paths[position]
        return self.slices.where(position, path) if self.slices else Where(path)

    def only(self, positions: Sequence[int]) -> "Index":
        """The images at these positions alone, of the same classes."""
        return dataclasses.replace(
            self,
            paths=tuple(self.paths[at] for at in positions),
            targets=tuple(self.targets[at] for at in positions),
            slices=self.slices.only(positions) if self.slices else None,
        )


def scan(split: Path, classes: Sequence[str] | None = None) -> Index:
    """List `<split>/<class>/**/*.{jpg,jpeg,png,webp}`, sorted, hidden files left out.

    The folders name the classes, unless `classes` has those of the training split.

    Raises:
        InputError: no such folder, no images, one class only, a class without images, or a
            class that `classes` does not have.
    """
    if not split.is_dir():
        raise InputError(
            f"there is no folder {split}: put images into the dataset's {split.name}/<class>/"
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
            if is_image(name):
                yield os.path.join(directory, name)


class Batch(NamedTuple):
    """One micro-batch, as the loader hands it over: one tensor, as each costs it a descriptor."""

    images: Tensor
    """uint8 [N, 3, size, size], channels last in memory."""
    targets: list[int]
    indices: list[int]
    """Positions in the index."""
    skipped: int
    """Images that could not be read: replaced by a neighbour, or in evaluation left out."""
    error: str
    """Why the batch cannot be used; empty if it can."""


class Images(Dataset[Batch]):
    """Decoded and transformed images, fetched a micro-batch at a time by (epoch, position)."""

    def __init__(
        self, index: Index, config: TrainConfig, for_training: bool, cache: Cache | None = None
    ) -> None:
        self.index = index
        self.config = config
        self.for_training = for_training
        self.cache = cache
        self.ahead = ReadAhead(index.slices) if index.slices and cache is None else None

    def __len__(self) -> int:
        return len(self.index)

    def __getitems__(self, keys: list[Key]) -> Batch:
        """The micro-batch of these keys, all of one epoch's size."""
        config = self.config
        if self.ahead is not None and isinstance(keys, Keys):
            self.ahead.begin(keys.ahead)
        size = config.image_size
        if self.for_training:
            size = transforms.size_of_epoch(config, keys[0][0])
        images = channels_last(len(keys), size)
        indices = [position for _, position in keys]
        kept: list[int] = []
        for row, (epoch, position) in enumerate(keys):
            try:
                found, at = self._usable(epoch, position)
            except InputError as error:
                if self.for_training or config.on_bad_image == "fail":
                    return Batch(images, indices, indices, 0, str(error))
                continue
            if at == position:
                kept.append(row)
            indices[row] = at
            prepared = self.cache is not None
            images[row] = transforms.finish(
                found.image, config, self.for_training, epoch, at, prepared, found[1:]
            )
        skipped = len(keys) - len(kept)
        if skipped and not self.for_training:
            images, indices = images[kept], [indices[row] for row in kept]
        targets = [self.index.targets[at] for at in indices]
        return Batch(images, targets, indices, skipped, "")

    def _usable(self, epoch: int, position: int) -> tuple[Decoded, int]:
        """The image at `position`; training under on_bad_image=skip, else the next readable one."""
        try:
            return self._read(epoch, position), position
        except InputError:
            if self.config.on_bad_image == "fail" or not self.for_training:
                raise
        for offset in range(1, min(len(self.index), 100)):
            at = (position + offset) % len(self.index)
            try:
                return self._read(epoch, at), at
            except InputError:
                continue
        raise InputError(f"100 images in a row cannot be read from {self.index.where(position)}")

    def _read(self, epoch: int, position: int) -> Decoded:
        config, where = self.config, self.index.where(position)
        if self.for_training and self.cache is None and config.images != "strict":
            needed = functools.partial(transforms.needed, config, epoch, position)
            return read_part(where, config.max_pixels, needed)
        if self.cache is not None:
            image = self.cache.read(position, where)
        else:
            image = read(where, config.images == "strict", config.max_pixels)
        return Decoded(image, *image.shape[-2:])


def channels_last(count: int, size: int) -> Tensor:
    """Room for uint8 images [count, 3, size, size] whose channels lie together in memory."""
    return torch.empty(count, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)


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


def evaluation_keys(index: Index, size: int, rank: int, world: int) -> Iterator[Keys]:
    """A rank's share of all images, at most `size` at a time.

    Of plain files it is every `world`-th; of archives every `world`-th batch of what is stored
    together.
    """
    for positions in _shares(index, size, rank, world):
        yield _keys(index, positions)


def _keys(index: Index, positions: Sequence[int]) -> Keys:
    keys = Keys((0, position) for position in positions)
    keys.ahead = pieces(index.slices, positions) if index.slices else ()
    return keys


def _shares(index: Index, size: int, rank: int, world: int) -> Iterator[Sequence[int]]:
    if index.slices is None:
        mine = range(rank, len(index), world)
        yield from (mine[start : start + size] for start in range(0, len(mine), size))
        return
    stored = in_store_order(index.slices)
    size = max(1, min(size, -(-len(stored) // world)))
    for start in range(rank * size, len(stored), world * size):
        yield stored[start : start + size]


def whole_batches(index: Index, size: int, rank: int, world: int) -> Iterator[Keys]:
    """A rank's share of all images in batches that are the same whatever the number of ranks.

    Of them it has every `world`-th; those of archives hold what is stored together.
    """
    stored = in_store_order(index.slices) if index.slices else range(len(index))
    for start in range(rank * size, len(stored), world * size):
        yield _keys(index, stored[start : start + size])


def evaluation_batches(
    index: Index,
    image_size: int,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    on_bad_image: str = "fail",
    max_pixels: int = MAX_PIXELS,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every image once over the ranks, at most `batch_size` at a time; the rest is as in `decoded`.

    Raises:
        InputError: an image that cannot be decoded where `on_bad_image` is fail.
    """
    keys = evaluation_keys(index, batch_size, rank, world)
    yield from decoded(index, image_size, keys, on_bad_image, max_pixels)


def decoded(
    index: Index,
    image_size: int,
    batches: Iterable[Keys],
    on_bad_image: str = "fail",
    max_pixels: int = MAX_PIXELS,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The images of each batch: uint8 [N, 3, S, S], targets [N], positions in the index [N].

    `on_bad_image` and `max_pixels` are as in the run's `TrainConfig`; the position of an image that
    is skipped does not come.

    Raises:
        InputError: an image that cannot be decoded where `on_bad_image` is fail.
    """
    ahead = ReadAhead(index.slices) if index.slices else None
    for keys in batches:
        images = channels_last(len(keys), image_size)
        kept: list[int] = []
        if ahead:
            ahead.begin(keys.ahead)
        for _, position in keys:
            try:
                image = read(index.where(position), max_pixels=max_pixels)
            except InputError:
                if on_bad_image == "fail":
                    raise
                continue
            images[len(kept)] = transforms.evaluate(image, image_size)
            kept.append(position)
        if kept:
            targets = torch.tensor([index.targets[position] for position in kept])
            yield images[: len(kept)], targets, torch.tensor(kept)
