"""When a run saves a checkpoint, when it stops early, and how it resumes."""

import dataclasses
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training import checkpoint, resume
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Split
from kfp_ddp.training.distributed import World
from kfp_ddp.training.learner import Learner
from kfp_ddp.training.manifest import step_dir
from kfp_ddp.training.metrics import Metrics

ENOUGH = 2
"""Others that have to be as far before this one is compared with them."""


def behind(output_dir: Path, epoch: int, best: float) -> str:
    """Why this training is not worth going on with; empty where it is.

    It is not where its best accuracy is below the median of what others had by the same epoch, the
    median stopping rule (Golovin et al. 2017, Google Vizier, section 3.2.2).

    Args:
        output_dir: Of this training.
        epoch: How many it has trained.
        best: Its highest accuracy so far.
    """
    others = sorted(output_dir.parent.glob(f"*/{RunFolder('').metrics.name}"))
    told = [_best_by(file, epoch) for file in others if file.parent != output_dir]
    known = [each for each in told if each is not None]
    if len(known) < ENOUGH or best >= (median := statistics.median(known)):
        return ""
    return (
        f"after epoch {epoch} its best accuracy, {best:.2%}, is below {median:.2%}, the median of "
        f"{len(known)} others by then"
    )


def _best_by(metrics: Path, epoch: int) -> float | None:
    """The highest accuracy until an epoch; None where the training is not as far."""
    found: list[tuple[float, float]] = []
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            event = json.loads(line)
            if event["event"] == "eval":
                found.append((float(event["epoch"]), float(event["accuracy"])))
        except (ValueError, LookupError, TypeError):
            continue  # a line that is being written
    until = [accuracy for at, accuracy in found if at <= epoch]
    return max(until) if until and max(at for at, _ in found) >= epoch else None


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest accuracy so far."""

    step: int
    epoch: int
    accuracy: float
    waited: int
    """Epochs from it to the last evaluation."""


class Saving:
    """The checkpoints of a run on `split`, its training images."""

    def __init__(self, config: TrainConfig, world: World, split: Split, learner: Learner) -> None:
        self.config, self.world, self.split, self.learner = config, world, split, learner
        folder = RunFolder(config.output_dir).checkpoints
        self.writer = checkpoint.Writer(folder, config.keep_checkpoints)
        self.latest: dict[str, float] = {}
        """What the last evaluation came to."""
        self.best: Best | None = None
        self.saved_step = -1
        self._behind = ""
        self.restart_clock()

    def judge(self, step: int, epoch: int, figures: dict[str, float]) -> bool:
        """Take note of an evaluation after an epoch; whether it is the best, as rank 0 has it."""
        self.latest = figures
        accuracy = self.world.from_first(lambda: figures["accuracy"])
        better = self.best is None or accuracy > self.best.accuracy
        if self.best is None or better:
            self.best = Best(step, epoch, accuracy, 0)
        else:
            self.best = dataclasses.replace(self.best, waited=epoch - self.best.epoch)
        first, highest = self.config.stop_behind_epochs, self.best.accuracy
        if first and epoch >= first:
            folder = Path(self.config.output_dir)
            self._behind = self.world.from_first(lambda: behind(folder, epoch, highest))
        return better

    @property
    def exhausted(self) -> str:
        """Why the run ends before its last epoch; empty if it does not."""
        if self._behind:
            return self._behind
        patience = self.config.early_stop_epochs
        if not patience or self.best is None or self.best.waited < patience:
            return ""
        return (
            f"accuracy has not risen for {self.best.waited} epochs since epoch {self.best.epoch}, "
            f"where it was {self.best.accuracy:.2%}"
        )

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
            best=dataclasses.asdict(self.best) if self.best else None,
        )
        spared = {self.best.step} if self.best and self.config.keep_best else set()
        self.writer.save(step, state, manifest, spared, self.learner.volatile())
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
        # What did not learn in the last step has no state that could be restored.
        self.learner.begin_epoch(math.ceil(found.manifest["epoch"]) - 1)
        self.learner.restore(found.state())
        self.saved_step = found.step
        self.latest = found.manifest["metrics"]
        best = found.manifest.get("best")
        self.best = Best(**best) if best else None
        if self.world.first:
            print(f"resumed from {found.path}", flush=True)
        return found.step
