"""The champion on the samples of today, where its own evaluation is of others."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.evaluation import results
from kfp_ddp.evaluation.predict import Predictions, merged, predict_share
from kfp_ddp.models import champion, weights
from kfp_ddp.models.evaluation import PREDICTIONS, Evaluation
from kfp_ddp.training.distributed import World
from kfp_ddp.training.splits import Index


def samples_for(
    held: champion.Champion, found: Predictions, challenger: Evaluation
) -> Index | None:
    """What the champion is evaluated on: samples of its classes that the challenger could read.

    None where the champion's own evaluation compares already, or none can be made: it is no bundle,
    or knows no class of these. The gate says which.
    """
    own, index = held.evaluation, found.index
    if own.same_samples(challenger) or not held.version:
        return None
    taught = {one.name for one in own.classes}
    known = [at for at, target in enumerate(index.targets) if index.classes[target] in taught]
    return index.only(known) if known else None


def evaluate_again(
    held: champion.Champion,
    index: Index,
    challenger: Evaluation | None,
    dataset: Path,
    batch_size: int,
    max_pixels: int,
    world: World,
    target: Path,
) -> Evaluation | None:
    """Evaluate the champion on the challenger's samples and write that to `target`.

    Args:
        held: The champion.
        index: The samples.
        challenger: Its evaluation, on the first rank.
        dataset: Folder of the version.
        batch_size: Images at a time.
        max_pixels: Above how many an image cannot be.
        world: This rank.
        target: Folder of the champion's evaluation.

    Returns:
        What it came to, on the first rank.

    Raises:
        InputError: the champion's bundle is damaged.
    """
    own, started = held.evaluation, time.monotonic()
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
    share = predict_share(model, info, index, batch_size, world, "fail", max_pixels)
    shares = world.to_first(share)
    if shares is None or challenger is None:
        return None
    found = merged(index, shares)
    result = results.summarise(
        found,
        info,
        dataset=dataset,
        split=challenger.split,
        checkpoint=held.uri,
        checkpoint_digest=own.checkpoint_digest,
        device=world.device.type,
        started=started,
        skipped=challenger.skipped,
    )
    results.write(target, target.parents[1], result, {PREDICTIONS: found.to_csv()})
    return result
