"""The loss of a training step, and the check that it is a finite number."""

from collections import deque
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kfp_ddp.core.errors import JobError
from kfp_ddp.training import optim, own_model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.splits import Index


class Loss:
    """Cross-entropy, or the function `loss` of a user's model file."""

    def __init__(self, config: TrainConfig, index: Index, device: torch.device) -> None:
        self.smoothing = config.label_smoothing
        self.class_weights = balanced(index) if config.class_weights == "balanced" else []
        """Weight of each class; empty if all weights are equal."""
        weights = torch.tensor(self.class_weights, device=device)
        self._weights = weights if self.class_weights else None
        own = own_model.load_for(config)
        self._own = own.loss if own else None
        if isinstance(self._own, nn.Module):
            self._own = self._own.to(device)  # it may have weights

    def __call__(self, logits: Tensor, targets: Tensor, own: float = 1.0) -> Tensor:
        """Return the mean over a micro-batch.

        Args:
            logits: [N, classes].
            targets: Class numbers [N].
            own: Share of each image itself; the rest comes from the previous image (mixup, CutMix).
        """
        loss = self._entropy(logits, targets)
        if own == 1:
            return loss
        return own * loss + (1 - own) * self._entropy(logits, targets.roll(1))

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._own is not None:
            return self._own(logits, targets)
        return F.cross_entropy(logits, targets, self._weights, label_smoothing=self.smoothing)


def balanced(index: Index) -> list[float]:
    """Return class weights inversely proportional to the images of each class, 1 on average."""
    counts = torch.bincount(torch.tensor(index.targets), minlength=len(index.classes))
    weights = len(index) / (len(index.classes) * counts.clamp(min=1).double())
    return [float(weight) for weight in weights]


NEVER = 2**62


class Divergence:
    """Records the first step with a NaN or infinite loss, on the device: no step waits for it."""

    def __init__(self, config: TrainConfig, world: World, index: Index) -> None:
        self.config, self.world, self.index = config, world, index
        self.first_bad_step = torch.full((), NEVER, dtype=torch.int64, device=world.device)
        self._recent: deque[tuple[int, list[list[int]]]] = deque(maxlen=config.log_steps + 1)

    def note(self, step: int, loss: Tensor, indices: list[list[int]]) -> None:
        """Check the loss of step `step` (from 0) over the images at `indices`."""
        here = self.first_bad_step.clamp(max=step)
        self.first_bad_step = torch.where(torch.isfinite(loss), self.first_bad_step, here)
        self._recent.append((step, indices))

    @property
    def detected(self) -> bool:
        """Whether this rank had such a loss; waits for the device."""
        return int(self.first_bad_step) < NEVER

    def check(self, steps_per_epoch: int) -> None:
        """Raise a JobError on all ranks if the loss of any rank was not finite."""
        mine, files = int(self.first_bad_step), ""
        if mine < NEVER:
            positions = [i for micro in dict(self._recent).get(mine, []) for i in micro]
            files = ", ".join(Path(self.index.paths[i]).name for i in positions[:8])
            files += f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        step, rank, files = min(self.world.gather((mine, self.world.rank, files)))
        if step < NEVER:
            rate = optim.learning_rate(self.config, step, steps_per_epoch)
            error = JobError(
                f"the loss became NaN or infinite at step {step} with learning rate {rate:.3g} on "
                f"rank {rank} in the batch of {files}: lower learning_rate or lengthen "
                "warmup_epochs; the newest checkpoint is from before"
            )
            self.world.raise_on_all(error, rank)
