"""Run a checkpoint over every sample of a split, once each."""

import csv
import io
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.models.evaluation import PREDICTION_COLUMNS
from kfp_ddp.training import data
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.config import MAX_PIXELS
from kfp_ddp.training.distributed import World, alone, keep_freed
from kfp_ddp.training.model import affine, logits
from kfp_ddp.training.splits import Index

TOP5 = "top5"
"""The one part of a tally's state that is no column of its samples."""


@dataclass(frozen=True)
class Predictions:
    """What every sample of a split came to, (N,) tensors in the order of the index."""

    index: Index
    """Those that could be read."""
    skipped: tuple[str, ...]
    """Paths below the split of those that could not, and were left out."""
    predicted: Tensor
    confidence: Tensor
    loss: Tensor
    tally: Tally

    def worst(self, count: int) -> list[int]:
        """Positions of the mistakes with the highest loss, the worst first."""
        targets = torch.as_tensor(self.index.targets)
        wrong = (self.predicted != targets).nonzero()[:, 0]
        order = self.loss[wrong].argsort(descending=True, stable=True)[:count]
        return [int(position) for position in wrong[order]]

    def relative(self, position: int) -> str:
        """Path of a sample below its split, with forward slashes."""
        return Path(self.index.paths[position]).relative_to(self.index.root).as_posix()

    def to_csv(self) -> str:
        """One row a sample: path, true and predicted class, confidence, loss."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(PREDICTION_COLUMNS)
        names = self.index.classes
        columns = (self.predicted.tolist(), self.confidence.tolist(), self.loss.tolist())
        for at, (predicted, confidence, loss) in enumerate(zip(*columns, strict=True)):
            classes = (names[self.index.targets[at]], names[predicted])
            writer.writerow((self.relative(at), *classes, f"{confidence:.6f}", f"{loss:.6f}"))
        return text.getvalue()


@dataclass(frozen=True)
class Share:
    """What the samples of one rank came to, in the order in which they were counted."""

    positions: Tensor
    """Of those that could be read, in the index; (N,) int64."""
    tally: Tally


def predict(
    model: torch.nn.Module,
    info: ModelInfo,
    index: Index,
    batch_size: int,
    device: torch.device,
    on_bad_image: str = "fail",
    max_pixels: int = MAX_PIXELS,
) -> Predictions:
    """Class, confidence and loss of every sample of `index`, by this process alone.

    The rest is as in `predict_share` and `merged`.
    """
    world = alone(device)
    share = predict_share(model, info, index, batch_size, world, on_bad_image, max_pixels)
    return merged(index, [share], on_bad_image)


def predict_share(
    model: torch.nn.Module,
    info: ModelInfo,
    index: Index,
    batch_size: int,
    world: World,
    on_bad_image: str = "fail",
    max_pixels: int = MAX_PIXELS,
) -> Share:
    """What this rank's share of the samples of `index` comes to; no batch depends on the ranks.

    Args:
        model: In eval mode.
        info: What it takes and tells apart.
        index: The samples of all ranks.
        batch_size: Images at a time.
        world: This rank, and where it computes.
        on_bad_image: fail, or skip to leave out what cannot be read.
        max_pixels: Above how many pixels an image cannot be.

    Raises:
        InputError: if the model gives NaN or infinity, as after training that diverged, or for an
            image that cannot be read, unless such are skipped.
    """
    tally, counted = Tally(len(info.classes)), [torch.zeros(0, dtype=torch.int64)]
    model.to(world.device).to(memory_format=torch.channels_last)
    if world.device.type == "cpu":
        keep_freed()
    with torch.inference_mode():
        batches = _batches(index, info.image_size, batch_size, world, on_bad_image, max_pixels)
        for said, targets, positions in _fetched(_said(model, info, batches, world.device)):
            finite = said.isfinite().all(1)
            if not finite.all():
                at = int(positions[int((~finite).nonzero()[0])])
                raise InputError(
                    f"the checkpoint gives NaN or infinity for {index.paths[at]}: training "
                    "diverged; train again with a lower learning_rate"
                )
            tally.update(said, targets)
            counted.append(positions)
    return Share(torch.cat(counted), tally)


_Said = tuple[Tensor, Tensor, Tensor]
"""Logits float32, targets and positions of a batch."""


def _said(
    model: torch.nn.Module, info: ModelInfo, batches: Iterator[_Said], device: torch.device
) -> Iterator[_Said]:
    """What the model says of each batch of images, on its device; a GPU is not waited for."""
    scale, shift = (part.to(device).view(1, -1, 1, 1) for part in affine(info.mean, info.std))
    for images, targets, positions in batches:
        given = images.pin_memory() if device.type == "cuda" else images
        pixels = torch.addcmul(shift, given.to(device, non_blocking=True), scale)
        yield logits(model, pixels, info.test_time_flip).float(), targets, positions


def _fetched(said: Iterator[_Said]) -> Iterator[_Said]:
    """The same on the CPU; of a GPU a batch later, while it computes the next one."""
    coming: deque[tuple[_Said, torch.cuda.Event]] = deque()

    def arrived() -> _Said:
        (own, targets, positions), event = coming.popleft()
        event.synchronize()
        return own.clone(), targets, positions  # pinned memory is for those that follow

    for own, targets, positions in said:
        if own.device.type != "cuda":
            yield own, targets, positions
            continue
        here = torch.empty(own.shape, pin_memory=True).copy_(own, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(own.device))
        coming.append(((here, targets, positions), event))
        if len(coming) > 1:
            yield arrived()
    while coming:
        yield arrived()


def merged(index: Index, shares: Sequence[Share], on_bad_image: str = "fail") -> Predictions:
    """What the ranks' shares come to together, whose number and order do not show in it.

    Raises:
        InputError: no image can be read.
        RuntimeError: if a sample came twice, or not at all.
    """
    n, positions = len(index), torch.cat([share.positions for share in shares])
    if not len(positions):
        raise InputError(f"none of the {n} images in {index.root} can be read: replace them")
    kept, order = positions.sort()
    tally = _in_order(shares, order)
    twice = bool((kept[1:] == kept[:-1]).any())
    if twice or tally.samples != len(kept) or (on_bad_image == "fail" and len(kept) < n):
        raise RuntimeError(f"{tally.samples} predictions for {len(kept)} of {n} samples")
    there = torch.zeros(n, dtype=torch.bool)
    there[kept] = True
    left_out = index.only((~there).nonzero()[:, 0].tolist())
    skipped = tuple(Path(path).relative_to(index.root).as_posix() for path in left_out.paths)
    return Predictions(
        index.only(kept.tolist()),
        skipped,
        predicted=torch.from_numpy(tally.column("predicted")),
        confidence=torch.from_numpy(tally.column("confidence")),
        loss=torch.from_numpy(tally.column("loss")),
        tally=tally,
    )


def _in_order(shares: Sequence[Share], order: Tensor) -> Tally:
    """One tally of the shares, its samples in an order that they do not decide."""
    if len(shares) == 1 and bool((order[1:] > order[:-1]).all()):
        return shares[0].tally
    states = [share.tally.state() for share in shares if len(share.positions)]
    joined = {
        name: torch.cat([state[name] for state in states]) for name in states[0] if name != TOP5
    }
    found = {name: v[order] if len(v) == len(order) else v[:0] for name, v in joined.items()}
    found[TOP5] = torch.stack([state[TOP5] for state in states]).sum()
    tally = Tally(shares[0].tally.classes)
    tally.merge([found])
    return tally


def _batches(
    index: Index,
    image_size: int,
    batch_size: int,
    world: World,
    on_bad_image: str,
    max_pixels: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The rank's batches, decoded on its share of the CPUs, in order: the readers take turns."""
    mine = list(data.whole_batches(index, batch_size, world.rank, world.size))
    cpus = (os.cpu_count() or 1) // world.local_size
    readers = max(1, min(cpus, 32, len(mine)))
    shares = [
        data.decoded(index, image_size, mine[number::readers], on_bad_image, max_pixels)
        for number in range(readers)
    ]
    with ThreadPoolExecutor(readers) as pool:
        waiting = deque((share, pool.submit(next, share, None)) for share in shares)
        while waiting:
            share, coming = waiting.popleft()
            batch = coming.result()
            if batch is not None:
                waiting.append((share, pool.submit(next, share, None)))
                yield batch
