"""The loop: steps, evaluation, checkpoints, and how they begin and end."""

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kfp_ddp.base.errors import JobError
from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.training import checkpoint, model, optim, resume
from kfp_ddp.training.cache import Cache
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.data import Images, Index, loader
from kfp_ddp.training.distributed import Stop, World
from kfp_ddp.training.manifest import step_dir
from kfp_ddp.training.memory import no_garbage_collection
from kfp_ddp.training.meter import Meter, Pace, profiler_of
from kfp_ddp.training.metrics import Metrics
from kfp_ddp.training.prefetch import DeviceBatch, to_device
from kfp_ddp.training.progress import Progress
from kfp_ddp.training.sampler import Epochs, ResumableSampler
from kfp_ddp.training.sinks import sinks
from kfp_ddp.training.strategies import spread

NEVER = 2**62


@dataclass(frozen=True)
class Split:
    """One half of the data, with its decoded images where they are cached."""

    index: Index
    cache: Cache | None
    digest: str = ""
    """Of the paths and sizes of the images."""


class Trainer:
    """One run on this rank."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        train_split: Split,
        val_split: Split,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.train_split, self.val_split = train_split, val_split
        classes = train_split.index.classes
        self.stop = Stop(world)
        self.sampler = ResumableSampler(
            samples=len(train_split.index),
            batch=config.batch_size,
            micro=config.micro_batch_size,
            rank=world.rank,
            world=world.size,
            seed=config.seed,
        )
        self.steps_per_epoch = self.sampler.steps
        self.steps_total = config.epochs * self.steps_per_epoch

        torch.manual_seed(config.seed)
        bf16 = config.precision == "bf16"
        sharded = config.strategy == "fsdp" and world.size > 1
        network = model.build(config.model, len(classes), config.blur_pool)
        if config.init_from:
            resume.initialise(network, config, classes, say=world.first)
        # The strategy moves shards, which must be contiguous, to the device block by block: the
        # whole may not fit there.
        self.network = (
            network if sharded else network.to(world.device).to(memory_format=torch.channels_last)
        )
        self.ema = optim.Ema(self.network, config.ema_decay) if config.ema_decay else None
        self.strategy = spread(
            self.network, config, world, accumulates=self.sampler.per_step > world.size
        )
        self.optimizer = optim.sgd(self.network, config)
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
        self.norms = [m for m in self.network.modules() if isinstance(m, nn.BatchNorm2d)]

        folder = RunFolder(config.output_dir)
        self.writer = checkpoint.Writer(folder.checkpoints, config.keep_checkpoints)
        self.metrics = Metrics(folder.metrics, sinks(config)) if world.first else Metrics(None)
        self.meter = Meter(config, world, len(classes))
        self.first_bad_step = torch.full((), NEVER, dtype=torch.int64, device=world.device)
        self.recent: deque[tuple[int, list[list[int]]]] = deque(maxlen=config.log_steps + 1)
        self.step, self.first_step, self.skipped, self.saved_step = 0, 1, 0, -1
        self.latest: dict[str, float] = {}
        self.saved_at = time.monotonic()
        self.progress = progress or Progress(folder.ranks, world.rank)

    def fit(self) -> bool:
        """Train to the last epoch; False if the ranks agreed to stop before."""
        self._resume()
        self.metrics.write(
            "start",
            world_size=self.world.size,
            steps_total=self.steps_total,
            resumed_from_step=self.step,
        )
        self.first_step = self.step + 1
        if self.step >= self.steps_total and self.world.first:
            print(
                f"nothing to train: step {self.step} is saved and epochs={self.config.epochs} "
                f"end at step {self.steps_total}; raise epochs to go on",
                flush=True,
            )
        batches = self.meter.waits(self.batches())
        profiling = profiler_of(self.config) if self.world.first else contextlib.nullcontext()
        with no_garbage_collection(), profiling as profiler:
            self.saved_at = time.monotonic()
            self.meter.restart(self.step)
            while self.step < self.steps_total:
                if self.advance(batches):
                    return self._finish("preempted")
                if profiler is not None:
                    profiler.step()
        return self._finish("done")

    def advance(self, batches: Iterator[DeviceBatch]) -> bool:
        """One step and what falls due after it; True if the ranks agreed to stop here."""
        self.stop.post(save=self._minutes_are_over())
        loss = self._train_step(batches)
        self.step += 1
        self.progress.step = self.step
        if self._is_logged():
            self._log(loss)
        if self.step % self.steps_per_epoch == 0:
            self._end_epoch(self.step // self.steps_per_epoch)
        stop, save = self.stop.agreed()
        if stop and self.step < self.steps_total:
            return True
        every = self.config.checkpoint_steps
        if save or (every and self.step % every == 0):
            self._save()
        return False

    def batches(self) -> Iterator[DeviceBatch]:
        """This rank's micro-batches from the next step to the end of the run."""
        epochs = Epochs(self.sampler, self.step, self.config.epochs)
        split = self.train_split
        images = Images(split.index, self.config, for_training=True, cache=split.cache)
        pin = self.world.device.type == "cuda"
        loaded = loader(images, epochs, self.config.workers, pin)
        return to_device(iter(loaded), self.world.device)

    def _train_step(self, batches: Iterator[DeviceBatch]) -> Tensor:
        """One optimizer step over this rank's micro-batches; returns the mean of their losses.

        Each micro-batch weighs the same in the global batch, also where ranks have unequal numbers
        of them: the strategies divide by the world size, so that is multiplied in.
        """
        rate = optim.learning_rate(self.config, self.step, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        weight = self.world.size / self.sampler.per_step
        total = torch.zeros((), device=self.world.device)
        indices = []
        self.meter.begin_step()
        for number in range(self.sampler.mine):
            self._keep_statistics_of(number)
            self.progress.phase = "data"
            batch = next(batches)
            self.progress.phase = "step"
            self.skipped += batch.skipped
            indices.append(batch.indices)
            with self.strategy.hold_gradients(number < self.sampler.mine - 1):
                with self.autocast:
                    output = self.strategy.replicas(batch.images)
                    loss = F.cross_entropy(
                        output, batch.targets, label_smoothing=self.config.label_smoothing
                    )
                if number == self.sampler.mine - 1:
                    self.meter.join_others()
                torch.autograd.backward(loss * weight)
            total += loss.detach()
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.strategy.network.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.step)
        total /= self.sampler.mine
        here = self.first_bad_step.clamp(max=self.step)
        self.first_bad_step = torch.where(torch.isfinite(total), self.first_bad_step, here)
        self.recent.append((self.step, indices))
        return total

    def _keep_statistics_of(self, number: int) -> None:
        """Let BatchNorm's running statistics follow the first micro-batch of each rank only.

        Rank 0's are the ones that are saved, and its first is the global batch's first whatever
        the world size, so they do not depend on it.
        """
        if self.sampler.mine > 1 and number < 2:
            for norm in self.norms:
                norm.momentum = 0.1 if number == 0 else 0.0

    def _is_logged(self) -> bool:
        """Each `log_steps`, and the first and the last one, so that a short run is seen too."""
        ends = (self.first_step, self.steps_total)
        return self.step in ends or self.step % self.config.log_steps == 0

    def _log(self, loss: Tensor) -> None:
        """Report a step; the only place in a step that waits for the device."""
        self._refuse_nan()
        figures = self.meter.report(self.step)
        own = [0.0] * self.world.size
        own[self.world.rank] = figures.pop("own_seconds")
        sums = self.world.sum([float(loss), figures["data_wait_fraction"], self.skipped, *own])
        mean = sums[0] / self.world.size
        pace = Pace(sums[3:], figures["step_seconds"])
        if self.world.first:
            rate = figures["images_per_s"]
            print(
                f"step {self.step}/{self.steps_total}: loss {mean:.4f}, {rate:,.0f} images/s"
                + pace.straggler,
                flush=True,
            )
        self.metrics.write(
            "step",
            step=self.step,
            epoch=self.step / self.steps_per_epoch,
            loss=mean,
            lr=self.optimizer.param_groups[0]["lr"],
            skipped_images=int(sums[2]),
            **{**figures, "data_wait_fraction": sums[1] / self.world.size},
            slowest_rank=pace.slowest,
            slowest_ratio=pace.ratio,
            rank_seconds=pace.seconds,
        )
        gc.collect(1)

    def _refuse_nan(self) -> None:
        """Raise a JobError if the loss of a rank was no number, and end the others with it."""
        mine, files = int(self.first_bad_step), ""
        if mine < NEVER:
            positions = [i for micro in dict(self.recent).get(mine, []) for i in micro]
            files = ", ".join(Path(self.train_split.index.paths[i]).name for i in positions[:8])
            files += f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        step, rank, files = min(self.world.gather((mine, self.world.rank, files)))
        if step < NEVER:
            rate = optim.learning_rate(self.config, step, self.steps_per_epoch)
            error = JobError(
                f"the loss became NaN or infinite at step {step} with learning rate {rate:.3g} on "
                f"rank {rank} in the batch of {files}: lower learning_rate or lengthen "
                "warmup_epochs; the newest checkpoint is from before"
            )
            self.world.raise_on_all(error, rank)

    def _end_epoch(self, epoch: int) -> None:
        last = self.step == self.steps_total
        if last or epoch % self.config.eval_epochs == 0:
            self._refuse_nan()
            self._evaluate(epoch)
        every = self.config.checkpoint_epochs
        if last or (every and epoch % every == 0):
            self._save()
        self.meter.restart(self.step)

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        """Loss, top-1 and top-5 on the validation split, each image exactly once over the ranks."""
        began, self.progress.phase = time.monotonic(), "evaluate"
        network = self._synchronised()
        network.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        rounds = samples = 0
        for batch in self._validation_batches():
            self.skipped += batch.skipped
            rounds, samples = rounds + 1, samples + len(batch.targets)
            with self.autocast:
                output = network(batch.images)
            top = output.topk(min(5, output.shape[1])).indices == batch.targets[:, None]
            loss = F.cross_entropy(output.float(), batch.targets, reduction="sum")
            sums += torch.stack([loss, top[:, 0].sum(), top.sum()])
        if self.strategy.collective_state:
            self._forward_with_the_others(network, rounds)
        network.train(network is self.network)
        loss_sum, first, five, count_all = self.world.sum([*sums.tolist(), samples])
        count_all = max(count_all, 1)
        self.latest = {
            "loss": loss_sum / count_all,
            "accuracy": first / count_all,
            "top5": five / count_all,
        }
        self.metrics.write("eval", epoch=epoch, step=self.step, **self.latest)
        if self.world.first:
            print(
                f"epoch {epoch}/{self.config.epochs}: accuracy {self.latest['accuracy']:.2%}, "
                f"loss {self.latest['loss']:.4f}, evaluated in {time.monotonic() - began:.1f} s",
                flush=True,
            )

    def _validation_batches(self) -> Iterator[DeviceBatch]:
        """This rank's share of the validation split: every world-size-th image."""
        index, size = self.val_split.index, self.config.micro_batch_size
        mine = range(self.world.rank, len(index), self.world.size)
        keys = [[(0, i) for i in mine[k : k + size]] for k in range(0, len(mine), size)]
        images = Images(index, self.config, for_training=False, cache=self.val_split.cache)
        pin = self.world.device.type == "cuda"
        # A run's worth of start-up and no gain where decoding is done already.
        workers = 0 if self.val_split.cache else self.config.workers
        loaded = iter(loader(images, keys, workers, pin))
        return to_device(loaded, self.world.device)

    def _forward_with_the_others(self, network: nn.Module, rounds: int) -> None:
        """Sharded weights are gathered by all: pass as many batches as the rank with the most."""
        size = self.config.image_size
        blank = torch.zeros(1, 3, size, size, device=self.world.device)
        for _ in range(max(self.world.gather(rounds)) - rounds):
            network(blank)

    def _synchronised(self) -> nn.Module:
        """The network to evaluate, with rank 0's BatchNorm statistics on every rank."""
        if self.world.size > 1:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, src=0)
        if self.ema is None:
            return self.network
        self.ema.copy_buffers(self.network)
        return self.ema.model

    def _minutes_are_over(self) -> bool:
        seconds = self.config.checkpoint_minutes * 60
        return self.world.first and 0 < seconds < time.monotonic() - self.saved_at

    def _save(self) -> None:
        """Begin to save on rank 0; replicas let the others go on at once."""
        self.saved_at = time.monotonic()
        collective = self.strategy.collective_state
        if self.saved_step == self.step or not (self.world.first or collective):
            return
        self.saved_step, self.progress.phase = self.step, "save"
        state = self.strategy.state(self.optimizer)
        # Weights that are NaN are not kept: the next log or evaluation stops all ranks.
        if not self.world.first or int(self.first_bad_step) < NEVER:
            return
        if self.ema:
            self.ema.copy_buffers(self.network)
        state["ema"] = self.ema.model.state_dict() if self.ema else None
        manifest = checkpoint.manifest_of(
            self.config,
            self.train_split.index.classes,
            epoch=self.step / self.steps_per_epoch,
            world_size=self.world.size,
            samples=len(self.train_split.index),
            images=self.train_split.digest,
            metrics=self.latest,
            form=self.strategy.form,
        )
        self.writer.save(self.step, state, manifest)
        self.metrics.write(
            "checkpoint",
            step=self.step,
            seconds=time.monotonic() - self.saved_at,
            path=str(step_dir(self.writer.directory, self.step)),
        )

    def _resume(self) -> None:
        """Take over the newest checkpoint that verifies; rank 0 chooses, all load the same."""
        directory, split = self.writer.directory, self.train_split
        path = self.world.from_first(
            lambda: resume.choose(
                directory, self.config, split.index, self.strategy.form, split.digest
            )
        )
        if path is None:
            return
        found = checkpoint.verify(path)
        state = found.state()
        settings = optim.settings(self.optimizer)
        self.strategy.restore(self.optimizer, state)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)  # the configuration's, not those of the checkpoint
        if self.ema:
            self.ema.model.load_state_dict(state["ema"] or state["model"])
        self.step = self.saved_step = self.progress.step = found.step
        self.latest = found.manifest["metrics"]
        if self.world.first:
            print(f"resumed from {found.path}", flush=True)

    def _finish(self, status: str) -> bool:
        """Make the last save durable before any rank leaves."""
        if status == "preempted":
            self._save()
        self.progress.phase = "save"
        self.world.from_first(self.writer.wait)
        self.metrics.write("end", status=status, step=self.step, reason=self.stop.reason)
        self.metrics.close()
        return status == "done"
