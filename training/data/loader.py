"""Images in batches: decoded by loader processes, and moved to the device one step ahead."""

import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.pictures.reading import READING, Reading
from kfp_ddp.pictures.shards import ReadAhead, pieces, sort_by_offset
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data import on_device, transforms
from kfp_ddp.training.data.cache import Cache
from kfp_ddp.training.data.image_files import Decoded, read, read_part
from kfp_ddp.training.data.sampler import Key, Keys
from kfp_ddp.training.distributed import number_format
from kfp_ddp.training.model.networks import MEAN, STD, affine
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.shared_memory import PREFETCH, REMEDY


class Batch(NamedTuple):
    """A micro-batch from the loader; one tensor, as each one costs a file descriptor."""

    images: Tensor
    """uint8 [N, 3, size, size], channels last in memory."""
    targets: list[int]
    indices: list[int]
    """Positions in the index."""
    skipped: list[int]
    """Positions of unreadable images: replaced by a neighbour in training, left out otherwise."""
    error: str
    """Why the batch is invalid; empty if it is valid."""
    rows: on_device.Rows | None = None
    """What `images` are where the device decodes them: bytes."""


class Images(Dataset[Batch]):
    """Decoded and transformed images, by micro-batches of (epoch, position)."""

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
        """Load the micro-batch of these keys, all of one epoch's size."""
        config = self.config
        index = self.index
        cache = self.cache
        if self.ahead is not None and isinstance(keys, Keys):
            self.ahead.begin(keys.ahead)
        if not self.for_training:
            return _evaluated(index, config.image_size, keys, config.reading, cache)
        images = transforms.channels_last(len(keys), transforms.size_of_epoch(config, keys[0][0]))
        indices: list[int] = []
        skipped: list[int] = []
        files: list[on_device.File | None] = [None] * len(keys)
        if config.decode == "gpu" and cache is None:
            places = (index.where(drawn % len(index)) for _, drawn in keys)
            files = on_device.files_in(places, config.reading, images.shape[-1])
        for row, (epoch, drawn) in enumerate(keys):
            position = drawn % len(index)
            again = drawn - position
            if files[row]:
                indices.append(position)
                continue
            try:
                decoded, usable = self._usable(epoch, position, again)
            except InputError as error:
                return Batch(images, [], [], [], str(error))
            # The next readable image, where on_bad_image is skip.
            if usable != position:
                skipped.append(position)
            indices.append(usable)
            images[row] = transforms.finish(
                decoded, config, epoch, usable + again, cache is not None
            )
        targets = [index.targets[position] for position in indices]
        packed, rows = on_device.pack(images, files, keys) if any(files) else (images, None)
        return Batch(packed, targets, indices, skipped, "", rows)

    def decode(self, device: torch.device, batch: Batch) -> Batch:
        """Decode the files of a batch; if the device refuses one, all are decoded as by loaders.

        Raise InputError for an unreadable image.
        """
        if batch.rows is None:
            return batch
        try:
            images = on_device.unpack(batch.images, batch.rows, self.config, device)
            return batch._replace(images=images, rows=None)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            on_device.warn(one_line(error))
        here = Images(self.index, self.config.model_copy(update={"decode": "cpu"}), True)
        batch = here.__getitems__([(batch.rows.epoch, drawn) for drawn in batch.rows.drawn])
        if batch.error:
            raise InputError(batch.error)
        return batch

    def _usable(self, epoch: int, position: int, again: int) -> tuple[Decoded, int]:
        """Load the image at `position`, or with on_bad_image=skip the next readable one."""
        for offset in range(min(len(self.index), 100)):
            candidate = (position + offset) % len(self.index)
            try:
                return self._read(epoch, candidate, again), candidate
            except InputError:
                if self.config.on_bad_image == "fail":
                    raise
        raise InputError(f"100 images in a row cannot be read from {self.index.where(position)}")

    def _read(self, epoch: int, position: int, again: int) -> Decoded:
        config = self.config
        where = self.index.where(position)
        if self.cache is None and config.images != "strict":
            needed = functools.partial(transforms.needed, config, epoch, position + again)
            return read_part(where, config.reading, needed)
        image = self.cache.read(position, where) if self.cache else read(where, config.reading)
        return Decoded(image, *image.shape[-2:])


def _evaluated(
    index: Index, size: int, keys: Sequence[Key], reading: Reading, cache: Cache | None = None
) -> Batch:
    """Load images as for an evaluation; unreadable ones are left out, or an error."""
    images = transforms.channels_last(len(keys), size)
    positions: list[int] = []
    skipped: list[int] = []
    for _, position in keys:
        where = index.where(position)
        try:
            image = cache.read(position, where) if cache else read(where, reading)
        except InputError as error:
            if reading.on_bad_image == "fail":
                return Batch(images, [], [], [], str(error))
            skipped.append(position)
            continue
        images[len(positions)] = image if cache else transforms.evaluate(image, size, reading)
        positions.append(position)
    targets = [index.targets[position] for position in positions]
    return Batch(images[: len(positions)], targets, positions, skipped, "")


def loader(
    dataset: Images, batches: Any, workers: int, pin: bool, prefetch: int = PREFETCH
) -> "DataLoader[Batch]":
    """Create a loader; its processes ignore signals to stop, which their parent handles."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=pin,
        worker_init_fn=_start_worker if workers else None,
        prefetch_factor=prefetch if workers else None,
    )


def _as_is(batch: Any) -> Any:
    """Return the batch; the dataset makes complete batches."""
    return batch


def _start_worker(number: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Its own way is to print the error and lose the batch, which the rank would wait for.
    setattr(Queue, "_on_queue_feeder_error", _send_error)  # noqa: B010


def _send_error(queue: "Queue[Any]", error: Exception, unsent: Any) -> None:
    """Send why a batch cannot be sent, in its place; end the process if this fails too."""
    number, batch = unsent
    if getattr(batch, "error", ""):
        os._exit(1)
    line = f"a loader process cannot send its images: {one_line(error)}; {REMEDY}, or ulimit -n"
    queue.put((number, Batch(torch.empty(0), [], [], [], line)))


def evaluation_keys(index: Index, size: int, rank: int, world: int) -> Iterator[Keys]:
    """Yield a rank's share of all images, at most `size` at a time, in storage order."""
    if index.slices is not None:
        yield from fixed_batches(index, max(1, min(size, -(-len(index) // world))), rank, world)
        return
    mine = range(rank, len(index), world)
    for start in range(0, len(mine), size):
        yield Keys((0, position) for position in mine[start : start + size])


def fixed_batches(index: Index, size: int, rank: int, world: int) -> Iterator[Keys]:
    """Yield every `world`-th of batches, of archives in storage order, for any number of ranks."""
    stored = sort_by_offset(index.slices) if index.slices else range(len(index))
    for start in range(rank * size, len(stored), world * size):
        positions = stored[start : start + size]
        keys = Keys((0, position) for position in positions)
        keys.ahead = pieces(index.slices, positions) if index.slices else ()
        yield keys


def evaluation_batches(
    index: Index, image_size: int, batch_size: int, reading: Reading = READING
) -> Iterator[Batch]:
    """Yield all images as `decoded` does, at most `batch_size` at a time."""
    return decoded(index, image_size, fixed_batches(index, batch_size, 0, 1), reading)


def decoded(
    index: Index, image_size: int, batches: Iterable[Keys], reading: Reading = READING
) -> Iterator[Batch]:
    """Yield batches with images; an unreadable image is left out, or InputError."""
    ahead = ReadAhead(index.slices) if index.slices else None
    for keys in batches:
        if ahead:
            ahead.begin(keys.ahead)
        batch = _evaluated(index, image_size, keys, reading)
        if batch.error:
            raise InputError(batch.error)
        if batch.indices:
            yield batch


class DeviceBatch(NamedTuple):
    """A micro-batch on the device."""

    images: Tensor
    """[N, 3, S, S], normalised, channels last in memory."""
    targets: Tensor
    """int64 [N]."""
    indices: list[int]
    skipped: list[int]


class Pixels(NamedTuple):
    """How a network takes pixels: statistics of channels, and their number format."""

    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD
    kind: torch.dtype = torch.float32


def pixels_of(config: TrainConfig) -> Pixels:
    """Return how the network of a run takes pixels."""
    mean, std, _ = timm_networks.preprocessing(config.model)
    return Pixels(mean, std, pixel_format(config.precision, config.model_code))


def pixel_format(precision: str, model_code: str) -> torch.dtype:
    """Return the number format of pixels; a user's network is checked with float32 and gets it."""
    return torch.float32 if model_code else number_format(precision)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream: the allocator has a separate pool for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_device(
    batches: Iterator[Batch],
    device: torch.device,
    pixels: Pixels,
    decode: Callable[[Batch], Batch] = lambda batch: batch,
) -> Generator[DeviceBatch]:
    """Decode, move and normalise batches, on a GPU in a side stream; raise a batch's error."""
    if device.type != "cuda":
        for images, targets, *others in _on_cpu(map(decode, batches), pixels):
            yield DeviceBatch(images.to(device), targets.to(device), *others)
        return
    side = _side_stream(device)
    scale, shift = (value.to(device).view(1, -1, 1, 1) for value in affine(pixels.mean, pixels.std))

    def move(batch: Batch) -> DeviceBatch:
        with torch.cuda.stream(side):
            batch = decode(batch)
            images = normalised(batch.images.to(device, non_blocking=True), scale, shift, pixels)
            targets = torch.tensor(batch.targets, dtype=torch.long, pin_memory=True)
            targets = targets.to(device, non_blocking=True)
            return DeviceBatch(images, targets, batch.indices, batch.skipped)

    def arrive(batch: DeviceBatch) -> None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in (batch.images, batch.targets):
            tensor.record_stream(current)

    yield from one_ahead(batches, move, arrive)


def normalised(images: Tensor, scale: Tensor, shift: Tensor, pixels: Pixels) -> Tensor:
    """Return uint8 images as `pixels` has them; a GPU's kernel makes no float32 copy."""
    out = torch.empty_like(images, dtype=pixels.kind, memory_format=torch.channels_last)
    return torch.addcmul(shift, images, scale, out=out)


def one_ahead(
    batches: Iterator[Batch],
    move: Callable[[Batch], DeviceBatch],
    arrive: Callable[[DeviceBatch], None],
) -> Iterator[DeviceBatch]:
    """Yield moved batches, each while the next one is on its way; the first waits for none.

    `arrive` lets the current stream wait for all that was moved.
    """
    ahead: DeviceBatch | None = None
    for number, batch in enumerate(batches):
        if batch.error:
            raise InputError(batch.error)
        following = move(batch)
        if ahead is not None:
            yield ahead
        arrive(following)
        ahead = following
        if number == 0:
            yield ahead
            ahead = None
    if ahead is not None:
        yield ahead


def _on_cpu(batches: Iterator[Batch], pixels: Pixels) -> Iterator[DeviceBatch]:
    """Normalise image by image in the CPU's cache; a batch is valid until the next is requested."""
    scale, shift = affine(pixels.mean, pixels.std)
    buffer = torch.empty(0, dtype=pixels.kind)
    for batch in batches:
        if batch.error:
            raise InputError(batch.error)
        count, channels, height, width = batch.images.shape
        if buffer.numel() < batch.images.numel():
            buffer = torch.empty(batch.images.numel(), dtype=pixels.kind)
        values = buffer[: batch.images.numel()].view(count, height, width * channels)
        rows = batch.images.permute(0, 2, 3, 1).reshape(count, height, width * channels)
        across = scale.repeat(width)
        up = shift.repeat(width)
        exact = torch.empty(height, width * channels)
        for source, target in zip(rows, values, strict=True):
            torch.addcmul(up, exact.copy_(source), across, out=target)
        images = values.view(count, height, width, channels).permute(0, 3, 1, 2)
        targets = torch.tensor(batch.targets, dtype=torch.long)
        yield DeviceBatch(images, targets, batch.indices, batch.skipped)


@dataclass(frozen=True)
class Split:
    """A split, with the cache of its decoded images if there is one."""

    index: Index
    cache: Cache | None
    digest: str = ""
    """Digest of the paths and sizes of the images."""
    contents: str = ""
    """Digest of their names and checksums, if the dataset is a version."""
    prefetch: int = PREFETCH
    """Batches that each loader process has ready."""
