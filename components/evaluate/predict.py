"""Run a checkpoint over every sample of a split, once each."""

import csv
import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.evaluate.measure import Tally
from kfp_ddp.components.shared.evaluation import PREDICTION_COLUMNS
from kfp_ddp.training import data
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.config import MAX_PIXELS
from kfp_ddp.training.memory import keep_freed
from kfp_ddp.training.model import logits, normalise


@dataclass(frozen=True)
class Predictions:
    """What every sample of a split came to, (N,) tensors in the order of the index."""

    index: data.Index
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


def predict(
    model: torch.nn.Module,
    info: ModelInfo,
    index: data.Index,
    batch_size: int,
    device: torch.device,
    on_bad_image: str = "fail",
    max_pixels: int = MAX_PIXELS,
) -> Predictions:
    """Class, confidence and loss of every sample of `index`, and the counts over them.

    Args:
        model: In eval mode.
        info: What it takes and tells apart.
        index: The samples.
        batch_size: Images at a time.
        device: Where to compute.
        on_bad_image: fail, or skip to leave out what cannot be read.
        max_pixels: Above how many pixels an image cannot be.

    Raises:
        InputError: if the model gives NaN or infinity, as after training that diverged; for an
            image that cannot be read, unless such are skipped, and where none can.
        RuntimeError: if a sample came twice.
    """
    n = len(index)
    predicted = torch.full((n,), -1, dtype=torch.int64)
    confidence, loss = torch.zeros(n), torch.zeros(n)
    tally = Tally(len(info.classes))
    model.to(device).to(memory_format=torch.channels_last)
    if device.type == "cpu":
        keep_freed()
    with torch.inference_mode():
        for images, targets, positions in _batches(
            index, info.image_size, batch_size, on_bad_image, max_pixels
        ):
            pixels = normalise(images.to(device), info.mean, info.std)
            said = logits(model, pixels, info.test_time_flip).float()
            finite = said.isfinite().all(1)
            if not finite.all():
                at = int(positions[int((~finite).nonzero()[0])])
                raise InputError(
                    f"the checkpoint gives NaN or infinity for {index.paths[at]}: training "
                    "diverged; train again with a lower learning_rate"
                )
            batch = tally.update(said, targets.to(device))
            predicted[positions] = batch.predicted.cpu()
            confidence[positions] = batch.confidence.cpu()
            loss[positions] = batch.loss.cpu()
    kept = (predicted >= 0).nonzero()[:, 0]
    if tally.samples != len(kept) or (on_bad_image == "fail" and len(kept) < n):
        raise RuntimeError(f"{tally.samples} predictions for {len(kept)} of {n} samples")
    if not len(kept):
        raise InputError(f"none of the {n} images in {index.root} can be read: replace them")
    left_out = index.only((predicted < 0).nonzero()[:, 0].tolist())
    skipped = tuple(Path(path).relative_to(index.root).as_posix() for path in left_out.paths)
    of_kept = (predicted[kept], confidence[kept], loss[kept])
    return Predictions(index.only(kept.tolist()), skipped, *of_kept, tally)


def _batches(
    index: data.Index, image_size: int, batch_size: int, on_bad_image: str, max_pixels: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every sample once, decoded on all CPUs, always in the same order: the readers take turns."""
    readers = max(1, min(os.cpu_count() or 1, 32, len(index.paths) // batch_size))
    shares = [
        data.evaluation_batches(
            index, image_size, batch_size, number, readers, on_bad_image, max_pixels
        )
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
