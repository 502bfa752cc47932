"""A loss that is no number: noticed on the device, told where ranks meet anyway."""

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.core.errors import JobError
from kfp_ddp.training import optim
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Index
from kfp_ddp.training.distributed import World

NEVER = 2**62


class Divergence:
    """Remembers the first step whose loss was NaN or infinite; no step waits for it."""

    def __init__(self, config: TrainConfig, world: World, index: Index) -> None:
        self.config, self.world, self.index = config, world, index
        self.first_bad_step = torch.full((), NEVER, dtype=torch.int64, device=world.device)
        self._recent: deque[tuple[int, list[list[int]]]] = deque(maxlen=config.log_steps + 1)

    def note(self, step: int, loss: Tensor, indices: list[list[int]]) -> None:
        """Look at the loss of step `step` (from 0) over the images at `indices`."""
        here = self.first_bad_step.clamp(max=step)
        self.first_bad_step = torch.where(torch.isfinite(loss), self.first_bad_step, here)
        self._recent.append((step, indices))

    @property
    def found(self) -> bool:
        """Whether there was one on this rank; waits for the device."""
        return int(self.first_bad_step) < NEVER

    def refuse(self, steps_per_epoch: int) -> None:
        """Raise a JobError if the loss of a rank was no number, and end the others with it."""
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
