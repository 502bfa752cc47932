"""What a run saves and when, and how it goes on from what was saved."""

import time

from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.training import checkpoint, resume
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.learner import Learner
from kfp_ddp.training.manifest import step_dir
from kfp_ddp.training.metrics import Metrics
from kfp_ddp.training.prepared import Split


class Saving:
    """The checkpoints of a run on `split`, its training images."""

    def __init__(self, config: TrainConfig, world: World, split: Split, learner: Learner) -> None:
        self.config, self.world, self.split, self.learner = config, world, split, learner
        folder = RunFolder(config.output_dir).checkpoints
        self.writer = checkpoint.Writer(folder, config.keep_checkpoints)
        self.latest: dict[str, float] = {}
        """What the last evaluation came to."""
        self.saved_step = -1
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count `checkpoint_minutes` from now on."""
        self._saved_at = time.monotonic()

    def minutes_are_over(self) -> bool:
        """Whether rank 0's clock says that a save is due."""
        seconds = self.config.checkpoint_minutes * 60
        return self.world.first and 0 < seconds < time.monotonic() - self._saved_at

    def is_mine(self, step: int) -> bool:
        """Whether this rank takes part in a save after `step`, which is not saved yet."""
        collective = self.learner.strategy.collective_state
        return self.saved_step != step and (self.world.first or collective)

    def save(self, step: int, epoch: float, diverged: bool, metrics: Metrics) -> None:
        """Begin to save on rank 0, after `step` steps; replicas let the others go on at once.

        With `diverged` nothing is kept: the next log or evaluation stops all ranks.
        """
        self.saved_step = step
        state = self.learner.state()
        if not self.world.first or diverged:
            return
        manifest = checkpoint.manifest_of(
            self.config,
            self.split.index.classes,
            epoch=epoch,
            world_size=self.world.size,
            samples=len(self.split.index),
            images=self.split.digest,
            metrics=self.latest,
            form=self.learner.strategy.form,
        )
        self.writer.save(step, state, manifest)
        metrics.write(
            "checkpoint",
            step=step,
            seconds=time.monotonic() - self._saved_at,
            path=str(step_dir(self.writer.directory, step)),
        )

    def resume(self) -> int:
        """Take over the newest checkpoint that verifies, the same on all ranks; its step or 0."""
        split, strategy = self.split, self.learner.strategy
        path = self.world.from_first(
            lambda: resume.choose(
                self.writer.directory, self.config, split.index, strategy.form, split.digest
            )
        )
        if path is None:
            return 0
        found = checkpoint.verify(path)
        self.learner.restore(found.state())
        self.saved_step = found.step
        self.latest = found.manifest["metrics"]
        if self.world.first:
            print(f"resumed from {found.path}", flush=True)
        return found.step
