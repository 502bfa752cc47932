"""The model and the samples of an evaluation, as one rank of a world has them."""

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch

from kfp_ddp.evaluation import baseline, results, slices, subject
from kfp_ddp.evaluation.predict import Predictions, merged, predict_share
from kfp_ddp.evaluation.request import Request
from kfp_ddp.evaluation.settings import Measuring
from kfp_ddp.models.champion import Champion
from kfp_ddp.models.evaluation import AGAIN, Evaluation
from kfp_ddp.training.distributed import World, alone
from kfp_ddp.training.sides import TEST
from kfp_ddp.training.splits import Index, sides_of


class Measured(NamedTuple):
    """What the samples of a split came to, and the record of it."""

    found: Predictions
    result: Evaluation


class Evaluator:
    """Evaluates with the other ranks; what it came to is known to the first one."""

    def __init__(self, request: Request, checkpoint: Path | str, world: World | None) -> None:
        """Read the model, and list the samples.

        Args:
            request: The same on all ranks.
            checkpoint: As `subject.read` takes it.
            world: This rank among the others; None for a process alone.

        Raises:
            InputError: for a checkpoint, split or parameter that cannot be used.
        """
        self.request, self.checkpoint = request, checkpoint
        self.dataset = Path(request.data)
        self.world = world or alone(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.model, self.info, self.digest = subject.read(checkpoint)
        self.index, self.test_index = sides_of(
            self.dataset, request.split, self.info.classes, self.info.config
        )
        self.measuring = Measuring.create(**request.options)
        tags = self.measuring.tags
        self.tags = slices.read(tags, self.dataset, self.index) if tags else None

    def split(self, started: float) -> Measured | None:
        """The model on the split that is asked for; `started` is on the monotonic clock."""
        return self._measure(self.index, self.request.split, started, self.tags)

    def test(self) -> Measured | None:
        """The model on the split test, where that is evaluated with val."""
        if self.test_index is None:
            return None
        return self._measure(self.test_index, TEST, time.monotonic())

    def champion_again(self, held: Champion, first: Measured | None) -> Evaluation | None:
        """The champion on the samples of `first`, where its own evaluation is of others."""
        wanted = self.world.from_first(lambda: first and baseline.samples_for(held, *first))
        if not wanted:
            return None
        return baseline.evaluate_again(
            held,
            wanted,
            first and first.result,
            self.dataset,
            self.request.batch_size,
            self.info.max_pixels,
            self.world,
            self.request.target / AGAIN,
        )

    def _measure(
        self, index: Index, split: str, started: float, tags: slices.Tags | None = None
    ) -> Measured | None:
        info = self.info
        reading = (info.on_bad_image, info.max_pixels)
        share = predict_share(
            self.model, info, index, self.request.batch_size, self.world, *reading
        )
        shares = self.world.to_first(share)
        if shares is None:
            return None
        found = merged(index, shares, info.on_bad_image)
        if found.skipped:
            print(
                f"{len(found.skipped)} images that cannot be read are left out, as in training "
                f"under on_bad_image=skip; the first: {found.skipped[0]}"
            )
        result = results.summarise(
            found,
            info,
            dataset=self.dataset,
            split=split,
            checkpoint=str(self.checkpoint),
            checkpoint_digest=self.digest,
            device=self.world.device.type,
            started=started,
            skipped=len(found.skipped),
            tags=tags,
            resamples=self.measuring.resamples,
        )
        return Measured(found, result.model_copy(update=_by_whom(self.world)))


def _by_whom(world: World) -> dict[str, object]:
    """How many ranks it took, and on what."""
    if world.device.type == "cuda":
        kind = torch.cuda.get_device_name(world.device)
    else:
        kind = f"{os.cpu_count()} CPUs, {platform.machine()}"
    return {"world_size": world.size, "hardware": f"{world.size} x {kind}"}
