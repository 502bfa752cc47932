"""The training loop, its loss and the validation."""

import functools
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data import on_device
from kfp_ddp.training.data.cache import decoded_bytes
from kfp_ddp.training.data.loader import (
    DeviceBatch,
    Images,
    Split,
    evaluation_keys,
    loader,
    pixels_of,
    to_device,
)
from kfp_ddp.training.data.sampler import ResumableSampler, classes_of, windows_of
from kfp_ddp.training.data.transforms import mixed
from kfp_ddp.training.distributed import Stop, World, no_garbage_collection
from kfp_ddp.training.model import own_model
from kfp_ddp.training.model.networks import logits
from kfp_ddp.training.report.meter import before_exchange
from kfp_ddp.training.report.run_report import Report, trace
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state.learner import Learner, learning_rate
from kfp_ddp.training.state.saving import Saving
from kfp_ddp.training.watch import Progress


class Loss:
    """Cross-entropy, or the function `loss` of a user's model file."""

    def __init__(self, config: TrainConfig, index: Index, device: torch.device) -> None:
        self.smoothing = config.label_smoothing
        self.class_weights = weights_of(index, POWERS[config.class_weights])
        """Weight of each class; empty if all weights are equal."""
        weights = self.class_weights
        self._weights = torch.tensor(weights, device=device) if weights else None
        self._user_file = own_model.load_for(config)
        if self._user_file and isinstance(self._user_file.loss, nn.Module):
            self._user_file.loss.to(device)  # it may have weights

    def __call__(self, logits: Tensor, targets: Tensor, share: float = 1.0) -> Tensor:
        """Return the mean over logits [N, classes] and class numbers [N].

        `share` is that of each image itself; the rest is of the previous one (mixup, CutMix).
        """
        loss = self._entropy(logits, targets)
        if share == 1:
            return loss
        return share * loss + (1 - share) * self._entropy(logits, targets.roll(1))

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._user_file and self._user_file.loss:
            return self._user_file.compute_loss(logits, targets)
        # torch's own mean divides by the weights of this micro-batch, not by its images.
        return F.cross_entropy(
            logits, targets, self._weights, reduction="none", label_smoothing=self.smoothing
        ).mean()


POWERS = {"none": 0.0, "sqrt": 0.5, "balanced": 1.0}


def weights_of(index: Index, power: float) -> list[float]:
    """Return weights by class, images ** -power, 1 on average; [] for a power of 0."""
    if not power:
        return []
    counts = torch.bincount(torch.tensor(index.targets), minlength=len(index.classes))
    weights = counts.clamp(min=1).double() ** -power
    weights *= len(index) / (weights * counts).sum()
    return [float(weight) for weight in weights]


NEVER = 2**62
_NAMED = 8
"""Images in the error of a loss that is not finite."""


class Divergence:
    """Records the first step with a NaN or infinite loss, on the device: no step waits for it."""

    def __init__(self, config: TrainConfig, world: World, index: Index) -> None:
        self.config = config
        self.world = world
        self.index = index
        self.first_bad_step = torch.full((), NEVER, dtype=torch.int64, device=world.device)
        self._recent: deque[tuple[int, list[list[int]]]] = deque(maxlen=config.log_steps + 1)

    def note(self, step: int, loss: Tensor, indices: list[list[int]]) -> None:
        """Check the loss of step `step` (from 0) over the images at `indices`."""
        here = self.first_bad_step.clamp(max=step)
        self.first_bad_step = torch.where(torch.isfinite(loss), self.first_bad_step, here)
        self._recent.append((step, indices))

    def check(self, steps_per_epoch: int) -> None:
        """Raise a JobError on all ranks if the loss of any rank was not finite."""
        mine = int(self.first_bad_step)
        files = self._files_of(mine) if mine < NEVER else ""
        # The smallest tuple is that of the first bad step: all ranks name the same one.
        step, rank, files = min(self.world.gather((mine, self.world.rank, files)))
        if step < NEVER:
            rate = learning_rate(self.config, step, steps_per_epoch)
            error = JobError(
                f"the loss became NaN or infinite at step {step} with learning rate {rate:.3g} on "
                f"rank {rank} in the batch of {files}: lower learning_rate or lengthen "
                "warmup_epochs; the newest checkpoint is from before"
            )
            self.world.raise_on_all(error, rank)

    def _files_of(self, step: int) -> str:
        """Name the first images of a recent step."""
        micro_batches = dict(self._recent).get(step, [])
        positions = [position for micro_batch in micro_batches for position in micro_batch]
        names = ", ".join(Path(self.index.paths[position]).name for position in positions[:_NAMED])
        more = len(positions) - _NAMED
        return f"{names} and {more} more" if more > 0 else names


class Validation:
    """Evaluates a learner on this rank's share of `split`; each image counts exactly once."""

    def __init__(self, config: TrainConfig, world: World, split: Split) -> None:
        self.config = config
        self.world = world
        self.split = split
        self.skipped: set[int] = set()
        """Positions of this rank's unreadable images."""

    @torch.no_grad()
    def measure(self, learner: Learner) -> dict[str, float]:
        """Return loss, top-1 (accuracy) and top-5, the same on every rank."""
        network = learner.to_evaluate()
        network.eval()
        # An Apple GPU has no float64.
        exact = torch.float32 if self.world.device.type == "mps" else torch.float64
        sums = torch.zeros(3, dtype=exact, device=self.world.device)
        samples = 0
        for batch in self._batches():
            self.skipped.update(batch.skipped)
            samples += len(batch.targets)
            with learner.autocast:
                output = logits(network, batch.images, self.config.test_time_flip)
            top = output.topk(min(5, output.shape[1])).indices == batch.targets[:, None]
            loss = F.cross_entropy(output.float(), batch.targets, reduction="sum")
            sums += torch.stack([loss, top[:, 0].sum(), top.sum()])
        learner.train()
        by_rank = self.world.gather([*sums.tolist(), samples])
        *totals, count = map(sum, zip(*by_rank, strict=True))
        if not count:
            raise InputError("none of the validation images can be read: repair or replace them")
        figures = zip(("loss", "accuracy", "top5"), totals, strict=True)
        return {name: total / count for name, total in figures}

    def _batches(self) -> Iterator[DeviceBatch]:
        index = self.split.index
        size = self.config.micro_batch_size
        keys = list(evaluation_keys(index, size, self.world.rank, self.world.size))
        images = Images(index, self.config, for_training=False, cache=self.split.cache)
        pin = self.world.device.type == "cuda"
        # Loader processes cost start-up time and gain nothing if images are decoded already.
        workers = 0 if self.split.cache else self.config.workers
        ready = loader(images, keys, workers, pin, self.split.prefetch)
        return to_device(iter(ready), self.world.device, pixels_of(self.config))


class Trainer:
    """One training run on this rank."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        train_split: Split,
        val_split: Split,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.split = train_split
        self.stop = Stop(world)
        self.sampler = ResumableSampler(
            samples=len(train_split.index),
            batch=config.batch_size,
            micro=config.micro_batch_size,
            rank=world.rank,
            world=world.size,
            seed=config.seed,
            windows=windows_of(train_split.index.slices, config),
            classes=classes_of(train_split.index, config),
        )
        self.steps_total = config.epochs * self.sampler.steps
        self.last_step = (
            min(config.stop_epochs or config.epochs, config.epochs) * self.sampler.steps
        )
        classes = train_split.index.classes
        accumulates = self.sampler.mine > 1
        self.learner = Learner(config, world, classes, accumulates)
        self.loss = Loss(config, train_split.index, world.device)
        self.divergence = Divergence(config, world, train_split.index)
        self.validation = Validation(config, world, val_split)
        self.saving = Saving(config, world, train_split, val_split, self.learner)
        self.report = Report(config, world, len(classes), self.sampler.steps, self.steps_total)
        self.progress = progress or Progress(RunFolder(config.output_dir).ranks, world.rank)
        self.skipped: set[int] = set()
        self.step = 0

    def fit(self) -> bool:
        """Train to the last epoch; return False if the ranks agreed to stop before."""
        self.step = self.progress.step = self.saving.resume()
        if self.step:
            self.saving.limit_hours(self.world.from_first(self._hours_are_over))
        startup = time.perf_counter() - self.progress.began
        self.report.begin(self.step, self.saving.exhausted, self.loss.class_weights, startup)
        meter = self.report.meter
        batches = self.batches()
        with no_garbage_collection(), trace(self.config, self.world) as traced:
            self.saving.restart_clock()
            meter.begin(self.step, self.progress.began)
            while self.step < self.last_step and not self.saving.exhausted:
                if self.advance(batches):
                    return self._finish("preempted")
                traced()
        return self._finish("done")

    def advance(self, batches: Iterator[DeviceBatch]) -> bool:
        """Do one step, and report, evaluate and save if due; True if the ranks agreed to stop."""
        self.stop.post(save=self.saving.minutes_are_over(), over=self._hours_are_over())
        if self.step % self.sampler.steps == 0:
            self.learner.begin_epoch(self.step // self.sampler.steps)
        rate = learning_rate(self.config, self.step, self.sampler.steps)
        loss = self._train_step(batches, rate)
        self.step += 1
        self.progress.step = self.step
        if self.report.is_due(self.step):
            self.divergence.check(self.sampler.steps)
            self.report.unreadable(self.step, self._skipped_files())
            self.report.step(self.step, loss, self.sampler.mine, rate, self.learner.scaler)
        if self.step % self.sampler.steps == 0:
            self._end_epoch(self.step // self.sampler.steps)
        stop, save, over = self.stop.agreed()
        if stop and self.step < self.last_step:
            return True
        if over and self.step < self.last_step:
            self.saving.limit_hours(over)
            if self.step % self.sampler.steps:
                self._evaluate(self.step // self.sampler.steps)
        every = self.config.checkpoint_steps
        due = bool(every) and self.step % every == 0
        requested = save or over
        if requested or due:
            self._save()
        return False

    def _hours_are_over(self) -> bool:
        seconds = self.world.size * (time.perf_counter() - self.progress.began)
        return 0 < self.config.max_gpu_hours <= self.saving.hours_before + seconds / 3600

    def batches(self) -> Iterator[DeviceBatch]:
        """Load this rank's micro-batches from the next step to the end of the run."""
        config = self.config
        sampler = self.sampler
        first = self.step
        if config.decode != "auto" or self.split.cache:
            return self._batches(config.decode, first)
        ready = -(-(config.workers * self.split.prefetch + 2) // sampler.mine)
        left = sampler.steps - first % sampler.steps
        if left < len(on_device.WAYS) * (ready + on_device.STEPS):  # an evaluation would count
            self.world.print(f"decode=cpu: the {left} steps left of an epoch are too few to try")
            return self._batches("cpu", first)

        def begin(way: str, step: int) -> Generator[DeviceBatch]:
            return self._batches(way, first + step)

        return on_device.fastest(begin, sampler.mine, ready, self.world.seconds, self.world.print)

    def _batches(self, decode: str, step: int) -> Generator[DeviceBatch]:
        config = self.config.model_copy(update={"decode": decode})
        images = Images(self.split.index, config, for_training=True, cache=self.split.cache)
        keys = self.sampler.batches(step, config.epochs)
        device = self.world.device
        ready = loader(images, keys, config.workers, device.type == "cuda", self.split.prefetch)
        decoded = functools.partial(images.decode, device)
        return to_device(iter(ready), device, pixels_of(config), decoded)

    def _train_step(self, batches: Iterator[DeviceBatch], rate: float) -> Tensor:
        """Do one optimizer step over this rank's micro-batches; return the mean of their losses."""
        learner = self.learner
        mine = self.sampler.mine
        enter = self.report.meter.timeline.enter
        learner.set_rate(rate)
        epoch = self.step // self.sampler.steps
        total = torch.zeros((), device=self.world.device)
        indices = []
        for number in range(mine):
            learner.limit_statistics(number, mine)
            self.progress.phase = "data"
            enter("data")
            batch = next(batches)
            self.progress.phase = "step"
            enter("forward")
            self.skipped.update(batch.skipped)
            indices.append(batch.indices)
            images, share = mixed(batch.images, self.config, epoch, batch.indices[0])
            learner.seed_step(self.step, self.world.rank + number * self.world.size)
            with learner.strategy.hold_gradients(number < mine - 1):
                with learner.autocast:
                    output = learner.strategy.replicas(images)
                    loss = self.loss(output, batch.targets, share)
                weighted = loss * (1 / mine)  # DDP averages over the ranks
                if number == mine - 1 and self.world.size > 1:
                    before_exchange(weighted, lambda: enter("communication"))
                enter("backward")
                learner.backward(weighted)
            total += loss.detach()
        if self.saving.writer.copying:
            enter("checkpoint")
            self.saving.writer.wait_for_copies()
        enter("optimizer")
        learner.update(self.step)
        enter("other")
        total /= mine
        self.divergence.note(self.step, total, indices)
        return total

    def _skipped_files(self) -> list[str]:
        """Return the unreadable files that any rank met, below the dataset; a collective call."""
        if self.config.on_bad_image == "fail":
            return []
        validation = self.validation
        mine = {self.split.index.paths[position] for position in self.skipped}
        mine |= {validation.split.index.paths[position] for position in validation.skipped}
        files = set[str]().union(*self.world.gather(mine))
        return sorted(path.removeprefix(f"{Path(self.config.data)}/") for path in files)

    def _end_epoch(self, epoch: int) -> None:
        last = self.step == self.last_step
        better = False
        if last or epoch % self.config.eval_epochs == 0:
            self.divergence.check(self.sampler.steps)
            better = self._evaluate(epoch)
        every = self.config.checkpoint_epochs
        is_epoch = bool(every) and epoch % every == 0
        is_best = better and self.config.keep_best
        due = last or is_epoch or is_best
        if due or self.saving.exhausted:
            self._save()
        self.report.meter.restart(self.step)

    def _evaluate(self, epoch: int) -> bool:
        began = time.monotonic()
        self.progress.phase = "evaluate"
        enter = self.report.meter.timeline.enter
        enter("evaluation")
        figures = self.validation.measure(self.learner)
        self.report.evaluation(self.step, figures, time.monotonic() - began)
        better = self.saving.judge(self.step, epoch, figures)
        enter("other")
        return better

    def _save(self) -> None:
        self.divergence.check(self.sampler.steps)
        self.saving.restart_clock()
        if self.saving.is_mine(self.step):
            self.progress.phase = "save"
            enter = self.report.meter.timeline.enter
            enter("checkpoint")
            epoch = self.step / self.sampler.steps
            self.saving.save(self.step, epoch, self.report.metrics)
            enter("other")

    def _finish(self, status: str) -> bool:
        """Wait until the last checkpoint is durable before any rank leaves."""
        if status == "preempted":
            self._save()
        self.progress.phase = "save"
        self.report.meter.timeline.enter("checkpoint")
        self.world.from_first(self.saving.writer.wait)
        stopped = f"stop_epochs={self.config.stop_epochs}" if status == "done" else ""
        reason = (self.saving.exhausted or stopped) if self.step < self.steps_total else ""
        splits = [self.split.index, self.validation.split.index]
        decoded = 0 if self.split.cache else decoded_bytes(self.config, splits)
        self.report.end(status, self.step, reason or self.stop.reason, decoded)
        return status == "done"
