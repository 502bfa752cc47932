"""When a run saves a checkpoint, when it stops early, and how it resumes."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.data.loader import Split
from kfp_ddp.training.distributed import World
from kfp_ddp.training.spec import model_file
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import step_dir
from kfp_ddp.training.spec.metrics import Metrics, read_events
from kfp_ddp.training.spec.time_spent import cost_of
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.learner import Learner, has_separate_body

FORM = "replicated"
"""Form of a saved state in its manifest: all of it, as DDP and a single rank have it."""
FORMS = (FORM, "ddp, single or one rank")
"""What manifests call this form; early ones have the text."""


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest accuracy so far, and of several with the lowest loss."""

    step: int
    epoch: int
    accuracy: float
    waited: int
    """Epochs from it to the last evaluation."""
    loss: float = 0.0
    """0 if an earlier version saved it, which did not compare losses."""

    @property
    def rank(self) -> tuple[float, float]:
        """What the best is highest in; below all others if the loss is not finite."""
        return (self.accuracy, -self.loss) if math.isfinite(self.loss) else (-1.0, 0.0)


class Saving:
    """The checkpoints of a run on `split`, its training images."""

    def __init__(
        self, config: TrainConfig, world: World, split: Split, val_split: Split, learner: Learner
    ) -> None:
        self.config = config
        self.world = world
        self.split = split
        self.learner = learner
        self._validation = val_split.contents or val_split.digest
        folder = RunFolder(config.output_dir).checkpoints
        self.writer = checkpoint.Writer(folder, config.keep_checkpoints)
        self.latest: dict[str, float] = {}
        """Figures of the last evaluation."""
        self.best: Best | None = None
        self.saved_step = -1
        self._reason = ""
        events = read_events(RunFolder(config.output_dir).metrics)
        self.hours_before = cost_of(events, {}).gpu_hours
        """GPU-hours of earlier attempts."""
        self.restart_clock()

    def judge(self, step: int, epoch: int, figures: dict[str, float]) -> bool:
        """Record an evaluation, which all ranks have; return whether it is the best."""
        self.latest = figures
        new = Best(step, epoch, figures["accuracy"], 0, figures["loss"])
        better = self.best is None or new.rank > self.best.rank
        if self.best is None or better:
            self.best = new
        else:
            self.best = dataclasses.replace(self.best, waited=epoch - self.best.epoch)
        return better

    def limit_hours(self, over: bool) -> None:
        """Let the run stop if `max_gpu_hours` are over."""
        if over:
            self._reason = f"it has used max_gpu_hours={self.config.max_gpu_hours:g}"

    @property
    def exhausted(self) -> str:
        """Why the run stops before its last epoch; empty if it does not."""
        if self._reason:
            return self._reason
        patience = self.config.early_stop_epochs
        if not patience or self.best is None:
            return ""
        if self.best.waited < patience:
            return ""
        return (
            f"accuracy has not improved for {self.best.waited} epochs since epoch "
            f"{self.best.epoch}, where it was {self.best.accuracy:.2%}"
        )

    def restart_clock(self) -> None:
        """Restart the interval of `checkpoint_minutes`."""
        self._saved_at = time.monotonic()

    def minutes_are_over(self) -> bool:
        """Return whether a save is due by rank 0's clock."""
        seconds = self.config.checkpoint_minutes * 60
        return self.world.first and 0 < seconds < time.monotonic() - self._saved_at

    def is_mine(self, step: int) -> bool:
        """Return whether this rank saves after `step`, if that is not saved yet."""
        return self.saved_step != step and self.world.first

    def save(self, step: int, epoch: float, metrics: Metrics) -> None:
        """Start to save after `step` steps; rank 0 calls this."""
        self.saved_step = step
        state = self.learner.state()
        manifest = checkpoint.manifest_of(
            self.config,
            self.split.index.classes,
            epoch=epoch,
            world_size=self.world.size,
            samples=len(self.split.index),
            images=self.split.digest,
            contents=self.split.contents,
            validation=self._validation,
            metrics=self.latest,
            form=FORM,
            best=dataclasses.asdict(self.best) if self.best else None,
        )
        keep_also = {self.best.step} if self.best and self.config.keep_best else set()
        self.writer.save(step, state, manifest, keep_also, self.learner.volatile())
        metrics.write(
            "checkpoint",
            step=step,
            seconds=time.monotonic() - self._saved_at,
            path=str(step_dir(self.writer.directory, step)),
        )

    def resume(self) -> int:
        """Restore the newest valid checkpoint, the same on all ranks; return its step or 0."""
        path = self.world.from_first(lambda: choose(self.writer.directory, self.config, self.split))
        if path is None:
            return 0
        valid = checkpoint.verify(path)
        # Weights that were frozen in the last step have no optimizer state to restore.
        self.learner.begin_epoch(math.ceil(valid.fields["epoch"]) - 1)
        self.learner.restore(valid.state())
        self.saved_step = valid.step
        self.latest = valid.fields["metrics"]
        best = valid.fields.get("best")
        validation = valid.fields.get("validation")
        same = not (validation and self._validation) or validation == self._validation
        self.best = Best(**best) if best and same else None
        self.world.print(f"resumed from {valid.path}")
        if not same:
            self.world.print("the validation images changed: the best accuracy starts again")
        return valid.step


def choose(directory: Path, config: TrainConfig, split: Split) -> Path | None:
    """Return the checkpoint to resume from, or None; set invalid ones aside; raise InputError."""
    newest = checkpoint.newest_valid(directory)
    if newest is None and (invalid := checkpoint.steps(directory)):
        raise StorageError(
            f"none of the {len(invalid)} checkpoints in {directory} is valid: "
            "copy a complete one there, or set resume=never to start from scratch"
        )
    for path in checkpoint.set_aside(directory, newest):
        log.warning(f"{path} is invalid and was set aside")
    if newest is None:
        return None
    was = newest.fields
    if was["form"] not in FORMS:
        raise InputError(
            f"cannot resume from {newest.path}: its state has the form {was['form']!r}, of the "
            "retired strategy=fsdp or of another version; to start from its weights, set another "
            f"output_dir and pretrained={newest.path}"
        )
    for name, (now, then) in _compared(config, split, was).items():
        if now != then:
            raise InputError(
                f"cannot resume from {newest.path}: {name} was {then} and is now {now}; "
                "use another output_dir, or resume=never to start from scratch"
            )
    return newest.path


def _compared(
    config: TrainConfig, split: Split, was: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Return what must not change within a run: by name its value now, and in the checkpoint."""
    training = split.index
    saved: Mapping[str, Any] = was["config"]
    pairs: dict[str, tuple[object, object]] = {
        "model": (config.model, was["model"]),
        "the digest of the model's file": (
            model_file.digest(config.model_code)[:12],
            model_file.digest(saved.get("model_code", ""))[:12],
        ),
        "the number of classes": (len(training.classes), len(was["classes"])),
        "image_size": (config.image_size, was["image_size"]),
        **{
            name: (getattr(config, name), saved[name])
            for name in ("blur_pool", "batch_size", "seed")
        },
        "optimizer": (config.optimizer, saved.get("optimizer", "sgd")),
        "sampling": (config.sampling, saved.get("sampling", "uniform")),
        "a separate classifier group (freeze_epochs, body_lr_factor)": (
            has_separate_body(config.freeze_epochs, config.body_lr_factor),
            has_separate_body(saved.get("freeze_epochs", 0), saved.get("body_lr_factor", 1.0)),
        ),
        "the number of training images": (len(training), was["samples"]),
    }
    for number, names in enumerate(zip(training.classes, was["classes"], strict=False)):
        pairs[f"class {number}"] = (repr(names[0]), repr(names[1]))
    if training.slices is not None and "shuffle_buffer_mb" in saved:  # the order depends on it
        pairs["shuffle_buffer_mb"] = (config.shuffle_buffer_mb, saved["shuffle_buffer_mb"])
    for field, now, what in (
        ("images", split.digest, "paths and sizes"),
        ("contents", split.contents, "contents"),
    ):
        if now and was.get(field):  # checkpoints of early versions have none
            pairs[f"the digest of {what} of the training images"] = (now[:12], was[field][:12])
    return pairs


def continues(config: TrainConfig, launches: Sequence[str]) -> bool:
    """Return whether a run with resume=never was started before, by its `run_id` or launchers."""
    if config.resume != "never":
        return False
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    try:
        starts = RunFolder(config.output_dir).begun_by.read_text().splitlines()
    except FileNotFoundError:
        return False
    return not _names(config, launches).isdisjoint(starts)


def begin(config: TrainConfig, launches: Sequence[str]) -> None:
    """Write the settings; with resume=never, move checkpoints away, and record this start."""
    folder = RunFolder(config.output_dir)
    with atomic_write(folder.config) as file:  # others read it meanwhile
        file.write(f"{config.model_dump_json(indent=2)}\n".encode())
    if config.resume != "never":
        return
    if checkpoint.steps(folder.checkpoints):
        names = (folder.path / f"{folder.checkpoints.name}.old-{i}" for i in itertools.count())
        folder.checkpoints.rename(next(name for name in names if not os.path.lexists(name)))
    folder.begun_by.write_text("\n".join(sorted(_names(config, launches))))


def _names(config: TrainConfig, launches: Sequence[str]) -> set[str]:
    return {config.run_id} if config.run_id else set(launches) - {""}


def earlier_config(config: TrainConfig) -> dict[str, Any] | None:
    """Return the configuration of the checkpoint to resume from, as JSON; None without one."""
    if config.resume == "never":
        return None
    newest = checkpoint.newest_valid(RunFolder(config.output_dir).checkpoints)
    return None if newest is None else newest.fields["config"]
