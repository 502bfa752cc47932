"""The champion on the samples of today, where its own evaluation is of others."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from kfp_ddp.base.errors import InputError, StorageError
from kfp_ddp.components.evaluate import results
from kfp_ddp.components.evaluate.predict import predict
from kfp_ddp.components.shared import champion, weights
from kfp_ddp.components.shared.evaluation import PREDICTIONS, Evaluation
from kfp_ddp.training.data import Index


def evaluate_again(
    held: champion.Champion,
    challenger: Evaluation,
    dataset: Path,
    index: Index,
    batch_size: int,
    device: torch.device,
    max_pixels: int,
    target: Path,
) -> Evaluation | None:
    """Evaluate the champion on the challenger's samples and write that to `target`.

    None where the champion's own compares already, or none can be made: it is no bundle, or lacks
    a class. The gate says which.

    Raises:
        InputError: the champion's bundle is damaged.
    """
    own = held.evaluation
    if own.same_samples(challenger) or held.unknown_class(challenger) or not held.version:
        return None
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = held.fetch_weights(Path(folder))
        try:
            model, info = weights.read(file, own.step)
        except (InputError, StorageError) as error:
            raise type(error)(
                f"the champion {held.uri} cannot be evaluated on this split: {error}"
            ) from None
    number = {name: at for at, name in enumerate(info.classes)}
    targets = tuple(number[index.classes[target]] for target in index.targets)
    index = replace(index, classes=info.classes, targets=targets)
    # The challenger read all of these, so the champion is held to them.
    found = predict(model, info, index, batch_size, device, "fail", max_pixels)
    result = results.summarise(
        found,
        info,
        dataset=dataset,
        split=challenger.split,
        checkpoint=held.uri,
        checkpoint_digest=own.checkpoint_digest,
        device=device.type,
        started=started,
        skipped=challenger.skipped,
    )
    results.write(target, target.parents[1], result, {PREDICTIONS: found.to_csv()})
    return result
