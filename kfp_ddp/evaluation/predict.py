"""Run a network over images, once each: every sample of a split, or of other batches."""

import contextlib
import io
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.failure import in_memory
from kfp_ddp.core.spreadsheet import write_rows
from kfp_ddp.evaluation.drift import Sample
from kfp_ddp.evaluation.measure import COLUMNS, Tally
from kfp_ddp.models.evaluation import PREDICTION_COLUMNS
from kfp_ddp.pictures.reading import READING, Reading
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data import loader
from kfp_ddp.training.data.loader import Pixels, pixel_format
from kfp_ddp.training.data.sampler import Keys
from kfp_ddp.training.distributed import World, autocast, keep_freed
from kfp_ddp.training.model.networks import heads_of, logits
from kfp_ddp.training.state.checkpoint import ModelInfo

EMBEDDED = 64
LESS_MEMORY = "lower batch_size, or compute with no GPU (evaluate_gpus, predict_gpus)"
FEATURES = EMBEDDED + 3 * 8 * 8
"""Numbers that describe an image: an embedding by the network, and the image at 8x8 pixels."""
MOST_DESCRIBED = 60_000
"""Maximum images of a split that are described: 60 MB; the time to compare grows by its square."""


@dataclass(frozen=True)
class Predictions:
    """Predictions on a split, in the order of the index."""

    index: Index
    """The readable samples."""
    skipped: tuple[str, ...]
    """Paths of the unreadable samples, below the split."""
    tally: Tally
    features: Tensor
    """Descriptions of the images, (N, `FEATURES`); empty for too many."""
    sample: Sample = field(default_factory=Sample)

    def worst(self, count: int, by: str) -> list[int]:
        """Return the positions of the mistakes with the highest values of a column, descending."""
        column = self.tally.column
        mistakes = (column("targets") != column("predicted")).nonzero()[0]
        order = (-column(by)[mistakes]).argsort(kind="stable")[:count]
        positions: list[int] = mistakes[order].tolist()
        return positions

    def relative(self, position: int) -> str:
        """Return the path of a sample below its split, with forward slashes."""
        return Path(self.index.paths[position]).relative_to(self.index.root).as_posix()

    def to_csv(self) -> str:
        """Return a row for each sample: path, true and predicted class, confidence, loss."""
        text = io.StringIO(newline="")
        names = self.index.classes
        columns = [self.tally.column(name).tolist() for name in COLUMNS[:4]]
        rows = (
            (self.relative(at), names[target], names[predicted], f"{sure:z.6f}", f"{loss:z.6f}")
            for at, (target, predicted, sure, loss) in enumerate(zip(*columns, strict=True))
        )
        write_rows(text, [PREDICTION_COLUMNS, *rows])
        return text.getvalue()


@dataclass(frozen=True)
class Share:
    """Results of the samples of one rank, in counting order."""

    positions: Tensor
    """Positions of the readable samples in the index; (N,) int64."""
    tally: Tally
    features: Tensor
    sample: Sample = field(default_factory=Sample)


def predict_share(
    model: nn.Module,
    info: ModelInfo,
    index: Index,
    batch_size: int,
    world: World,
    reading: Reading = READING,
) -> Share:
    """Predict this rank's share of the samples. Batches do not depend on the number of ranks.

    Unreadable images fail, or are left out, as `reading` says; raise InputError as `scored`.
    """
    sample = Sample()
    tally = Tally(len(info.classes))
    counted = [torch.zeros(0, dtype=torch.int64)]
    features = [torch.zeros(0, FEATURES)]
    mine = loader.fixed_batches(index, batch_size, world.rank, world.size)
    work = ((index, keys) for keys in mine)
    for batch in scored(model, info, work, world, reading, "fp32"):
        tally.update(batch.scores, batch.targets)
        counted.append(batch.positions)
        paths = [index.paths[at].removeprefix(str(index.root)) for at in batch.positions.tolist()]
        sample.add(paths, batch.scores)
        if len(index) <= MOST_DESCRIBED:
            features.append(batch.features.clone())
    return Share(torch.cat(counted), tally, torch.cat(features), sample)


Work = Iterable[tuple[Index, Keys]]
"""Batches: an index, and positions in it."""


class Scored(NamedTuple):
    """The readable images of a batch, on the CPU."""

    images: Index
    positions: Tensor
    """In `images`; (N,) int64."""
    targets: Tensor
    scores: Tensor
    """Logits, (N, classes) float32."""
    features: Tensor
    """Descriptions of the images, (N, `FEATURES`); not to be retained."""


def scored(
    model: nn.Module, info: ModelInfo, work: Work, world: World, reading: Reading, precision: str
) -> Iterator[Scored]:
    """Yield the logits of each batch of `work`, in order; batches without images are left out.

    The model is in eval mode. Raise InputError if it returns NaN or infinity, as after a diverged
    training, or an image is unreadable and not skipped.
    """
    classes = len(info.classes)
    model.to(world.device).to(memory_format=torch.channels_last)
    if world.device.type == "cpu":
        keep_freed()
    with torch.inference_mode(), in_memory(LESS_MEMORY):
        images = batches(work, info.image_size, world, reading)
        computed = _forward(model, info, images, world.device, precision)
        for rows, targets, positions, index in _to_cpu(computed):
            scores = rows[:, :classes].contiguous()
            finite = scores.isfinite().all(1)
            if not finite.all():
                at = int(positions[int((~finite).nonzero()[0])])
                raise InputError(
                    f"the checkpoint returns NaN or infinity for {index.paths[at]}: training "
                    "diverged; train again with a lower learning_rate"
                )
            yield Scored(index, positions, targets, scores, rows[:, classes:])


_Loaded = Iterator[tuple[loader.Batch, Index]]
_Batch = tuple[Tensor, Tensor, Tensor, Index]
"""Logits with features, float32, targets and positions of a batch in its index."""


def _forward(
    model: nn.Module, info: ModelInfo, batches: _Loaded, device: torch.device, precision: str
) -> Iterator[_Batch]:
    """Yield logits and features of each batch, on the device, without waiting for a GPU."""
    inputs: list[Any] = []
    taken = Pixels(info.mean, info.std, pixel_format(precision, info.model_code))
    ahead, same = itertools.tee(batches)
    moved = loader.to_device((batch for batch, _ in ahead), device, taken)
    with _inputs_of_classifier(model, inputs):
        for (pixels, *_), (batch, index) in zip(moved, same, strict=True):
            with autocast(device, precision):
                scores = logits(model, pixels, info.test_time_flip).float()
            # A network of the user may call its classifier in another way.
            given = inputs[0] if inputs else scores
            known = isinstance(given, Tensor) and given.dim() > 1 and len(given) == len(scores)
            described = _features(given if known else scores, pixels)
            inputs.clear()
            rows = torch.cat([scores, described], 1)
            yield rows, torch.tensor(batch.targets), torch.tensor(batch.indices), index


def _inputs_of_classifier(
    model: nn.Module, inputs: list[Any]
) -> contextlib.AbstractContextManager[object]:
    """Collect them within a block; none if the network has another kind of classifier."""
    try:
        # One of several takes the same features as the others.
        classifier = model.get_submodule(heads_of(model)[-1].removesuffix("."))
    except InputError:
        return contextlib.nullcontext()
    return classifier.register_forward_pre_hook(lambda _, given: inputs.extend(given))


def _features(embedding: Tensor, pixels: Tensor) -> Tensor:
    """Return a projection of embeddings, which keeps distances, and each image at 8x8 pixels.

    A random projection to 64 numbers changes a distance by about an eighth (Johnson and
    Lindenstrauss 1984), and they are of equal size for all networks.
    """
    embedding = embedding.float()
    while embedding.dim() > 2:
        embedding = embedding.mean(-1)
    small = nn.functional.adaptive_avg_pool2d(pixels, 8).flatten(1).float()
    projection = _projection(embedding.shape[1], embedding.device)
    return torch.cat([embedding @ projection, small], 1).nan_to_num()


@cache
def _projection(size: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, EMBEDDED, generator=draw).to(device)


def _to_cpu(batches: Iterator[_Batch]) -> Iterator[_Batch]:
    """Yield the logits on the CPU; from a GPU one batch later, while it computes the next one."""
    pending: deque[tuple[_Batch, torch.cuda.Event]] = deque()

    def next_batch() -> _Batch:
        (scores, targets, positions, index), event = pending.popleft()
        event.synchronize()
        return scores.clone(), targets, positions, index  # the pinned memory is reused

    for scores, targets, positions, index in batches:
        if scores.device.type != "cuda":
            yield scores, targets, positions, index
            continue
        local = torch.empty(scores.shape, pin_memory=True).copy_(scores, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(scores.device))
        pending.append(((local, targets, positions, index), event))
        if len(pending) > 1:
            yield next_batch()
    while pending:
        yield next_batch()


def merged(index: Index, shares: Sequence[Share], on_bad_image: str = "fail") -> Predictions:
    """Merge the shares of the ranks. The result does not depend on their number and order.

    Raise InputError if no image is readable, RuntimeError if a sample was not counted once.
    """
    n = len(index)
    positions = torch.cat([share.positions for share in shares])
    if not len(positions):
        raise InputError(f"none of the {n} images in {index.root} can be read: replace them")
    counted, order = positions.sort()
    tally = _reorder(shares, order)
    twice = bool((counted[1:] == counted[:-1]).any())
    lacking = on_bad_image == "fail" and len(counted) < n
    if twice or lacking or tally.samples != len(counted):
        raise RuntimeError(f"{tally.samples} predictions for {len(counted)} of {n} samples")
    readable = torch.zeros(n, dtype=torch.bool)
    readable[counted] = True
    left_out = index.only((~readable).nonzero()[:, 0].tolist())
    skipped = tuple(Path(path).relative_to(index.root).as_posix() for path in left_out.paths)
    features = torch.cat([share.features for share in shares])
    features = features[order] if len(features) else features
    sample = Sample().merge(share.sample.rows for share in shares)
    return Predictions(index.only(counted.tolist()), skipped, tally, features, sample)


def _reorder(shares: Sequence[Share], order: Tensor) -> Tally:
    """Return one tally of the shares, with the samples in the order of the index."""
    if len(shares) == 1 and bool((order[1:] > order[:-1]).all()):
        return shares[0].tally
    tallies = [share.tally for share in shares if share.tally.samples]
    columns = {}
    for name in COLUMNS:
        values = np.concatenate([tally.column(name) for tally in tallies])
        # Logits may be left out.
        columns[name] = values[order] if len(values) == len(order) else values[:0]
    ordered = Tally(shares[0].tally.classes)
    ordered.add(columns)
    return ordered


def batches(work: Work, image_size: int, world: World, reading: Reading) -> _Loaded:
    """Yield the batches in order, decoded by threads, which start the next ones meanwhile."""
    readers = max(1, min(int(machine.cpus() / world.local_size), 32))
    pending = deque[tuple[Index, Future[list[loader.Batch]]]]()

    def decode(index: Index, keys: Keys) -> list[loader.Batch]:
        decoded = loader.decoded(index, image_size, [keys], reading)
        if world.device.type == "cuda":
            return [batch._replace(images=batch.images.pin_memory()) for batch in decoded]
        return list(decoded)

    def oldest() -> _Loaded:
        index, future = pending.popleft()
        for batch in future.result():
            yield batch, index

    with ThreadPoolExecutor(readers) as pool:
        for index, keys in work:
            pending.append((index, pool.submit(decode, index, keys)))
            if len(pending) > readers:
                yield from oldest()
        while pending:
            yield from oldest()
