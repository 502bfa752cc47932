"""The loop: steps, evaluation, checkpoints, and how they begin and end."""

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from kfp_ddp.training import checkpoint, data, model, optim
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import Stop, World
from kfp_ddp.training.errors import InputError
from kfp_ddp.training.metrics import Metrics

NEVER = 2**62


class Trainer:
    """One run on this rank."""

    def __init__(
        self, config: TrainConfig, world: World, training: data.Index, validation: data.Index
    ) -> None:
        self.config = config
        self.world = world
        self.training = training
        self.validation = validation
        self.stop = Stop(world)
        self.output = Path(config.output_dir)
        self.metrics = Metrics(self.output / "metrics.jsonl" if world.first else None)
        self.writer = checkpoint.Writer(self.output / "checkpoints", config.keep_checkpoints)
        self.sampler = data.ResumableSampler(
            samples=len(training),
            batch=config.batch_size,
            micro=config.micro_batch_size,
            rank=world.rank,
            world=world.size,
            seed=config.seed,
        )
        self.steps_per_epoch = self.sampler.steps
        self.steps_total = config.epochs * self.steps_per_epoch
        self.step = 0
        self.latest: dict[str, float] = {}

        torch.manual_seed(config.seed)
        bf16 = config.precision == "bf16"
        self.layout = (
            torch.channels_last if bf16 or world.device.type == "cuda" else torch.contiguous_format
        )
        network = model.build(config.model, len(training.classes)).to(world.device)
        self.network = network.to(memory_format=self.layout)
        self.ema = optim.Ema(self.network, config.ema_decay) if config.ema_decay else None
        self.optimizer = optim.sgd(self.network, config)
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
        self.accumulate = len(range(world.rank, self.sampler.per_step, world.size))
        self.replicas = self._replicate()
        self.first_bad_step = torch.full((), NEVER, dtype=torch.int64, device=world.device)
        self.recent: deque[tuple[int, list[Tensor]]] = deque(maxlen=config.log_steps + 1)
        self.skipped = 0

    def _replicate(self) -> nn.Module:
        """The network as the steps call it: gradients averaged over the ranks."""
        if self.world.size == 1:
            return self.network
        return DistributedDataParallel(
            self.network,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            forward_sync_buffers=False,  # training uses batch statistics; synchronised at need
            gradient_as_bucket_view=True,
            static_graph=self.accumulate == 1,
        )

    def fit(self) -> bool:
        """Train to the last epoch; False if the ranks agreed to stop before."""
        self._resume()
        self.metrics.write(
            "start",
            world_size=self.world.size,
            steps_total=self.steps_total,
            resumed_from_step=self.step,
        )
        batches = iter(self._loader())
        self._mark_window()
        self.saved_at = time.monotonic()
        while self.step < self.steps_total:
            self.stop.post()
            loss = self._train_step(batches)
            self.step += 1
            if self.step % self.config.log_steps == 0:
                self._log(loss)
            if self.step % self.steps_per_epoch == 0:
                self._end_epoch()
            elif self._minutes_are_over():
                self._save()
            if self.stop.agreed() and self.step < self.steps_total:
                return self._finish("preempted")
        return self._finish("done")

    def _loader(self) -> "DataLoader[data.Batch]":
        epochs = data.Epochs(self.sampler, self.step, self.config.epochs)
        images = data.Images(self.training, self.config, training=True)
        return data.loader(images, epochs, self.config.workers, self.world.device.type == "cuda")

    def _train_step(self, batches: Any) -> Tensor:
        """One optimizer step over this rank's micro-batches; returns the mean of their losses.

        Each micro-batch weighs the same in the global batch, also where ranks have unequal numbers
        of them: DistributedDataParallel divides by the world size, so that is multiplied in.
        """
        rate = optim.learning_rate(self.config, self.step, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        weight = self.world.size / self.sampler.per_step
        total = torch.zeros((), device=self.world.device)
        indices = []
        for number in range(self.accumulate):
            batch = next(batches)
            if batch.error:
                raise InputError(batch.error)
            self.skipped += batch.skipped
            indices.append(batch.indices)
            images, targets = self._to_device(batch)
            with self._without_sync(number < self.accumulate - 1):
                with self.autocast:
                    output = self.replicas(images)
                    loss = F.cross_entropy(
                        output, targets, label_smoothing=self.config.label_smoothing
                    )
                torch.autograd.backward(loss * weight)
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.step)
        total = total / self.accumulate
        self.first_bad_step = torch.where(
            torch.isfinite(total), self.first_bad_step, self.first_bad_step.clamp(max=self.step)
        )
        self.recent.append((self.step, indices))
        return total

    def _without_sync(self, more_follow: bool) -> contextlib.AbstractContextManager[None]:
        if more_follow and isinstance(self.replicas, DistributedDataParallel):
            return self.replicas.no_sync()
        return contextlib.nullcontext()

    def _to_device(self, batch: data.Batch) -> tuple[Tensor, Tensor]:
        images = batch.images.to(self.world.device, non_blocking=True)
        targets = batch.targets.to(self.world.device, non_blocking=True)
        return model.normalise(images).contiguous(memory_format=self.layout), targets

    def _mark_window(self) -> None:
        self.window_began, self.window_step = time.monotonic(), self.step

    def _log(self, loss: Tensor) -> None:
        """Report a step; the only place in a step that waits for the device."""
        self._refuse_nan()
        seconds = time.monotonic() - self.window_began
        images = (self.step - self.window_step) * self.config.batch_size
        mean_loss = self.world.sum([float(loss)])[0] / self.world.size
        self.metrics.write(
            "step",
            step=self.step,
            epoch=self.step / self.steps_per_epoch,
            loss=mean_loss,
            lr=self.optimizer.param_groups[0]["lr"],
            images_per_s=images / seconds,
        )
        self._mark_window()

    def _refuse_nan(self) -> None:
        """Raise the same InputError on all ranks if the loss of one was no number."""
        mine = int(self.first_bad_step)
        files = ""
        if mine < NEVER:
            recent = dict(self.recent).get(mine, [])
            positions = [int(i) for micro in recent for i in micro]
            files = ", ".join(Path(self.training.paths[i]).name for i in positions[:8])
            files += f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        step, rank, files = min(self.world.gather((mine, self.world.rank, files)))
        if step < NEVER:
            rate = optim.learning_rate(self.config, step, self.steps_per_epoch)
            raise InputError(
                f"the loss became NaN or infinite at step {step} with learning rate {rate:.3g} on "
                f"rank {rank} in the batch of {files}: lower learning_rate or lengthen "
                "warmup_epochs; the newest checkpoint is from before"
            )

    def _end_epoch(self) -> None:
        epoch = self.step // self.steps_per_epoch
        last = self.step == self.steps_total
        if last or epoch % self.config.eval_epochs == 0:
            self._refuse_nan()
            self._evaluate(epoch)
        every = self.config.checkpoint_epochs
        if last or (every and epoch % every == 0) or self._minutes_are_over():
            self._save()
        self._mark_window()

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        """Loss, top-1 and top-5 on the validation split, each image exactly once over the ranks."""
        began = time.monotonic()
        network = self._synchronised()
        network.eval()
        images = data.Images(self.validation, self.config, training=False)
        size = self.config.micro_batch_size
        mine = range(self.world.rank, len(self.validation), self.world.size)
        batches = [[(0, i) for i in mine[k : k + size]] for k in range(0, len(mine), size)]
        cuda = self.world.device.type == "cuda"
        sums = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        for batch in data.loader(images, batches, self.config.workers, pin=cuda):
            if batch.error:
                raise InputError(batch.error)
            self.skipped += batch.skipped
            inputs, targets = self._to_device(batch)
            with self.autocast:
                output = network(inputs)
            top = output.topk(min(5, output.shape[1])).indices == targets[:, None]
            loss = F.cross_entropy(output.float(), targets, reduction="sum")
            sums += torch.stack([loss, top[:, 0].sum(), top.sum(), loss.new_tensor(len(targets))])
        network.train(network is self.network)
        loss_sum, first, five, count = self.world.sum(sums.tolist())
        count = max(count, 1)
        self.latest = {"loss": loss_sum / count, "accuracy": first / count, "top5": five / count}
        self.metrics.write("eval", epoch=epoch, step=self.step, **self.latest)
        if self.world.first:
            print(
                f"epoch {epoch}/{self.config.epochs}: accuracy {self.latest['accuracy']:.2%}, "
                f"loss {self.latest['loss']:.4f}, evaluated in {time.monotonic() - began:.1f} s",
                flush=True,
            )

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
        minutes = self.config.checkpoint_minutes
        return 0 < minutes * 60 < time.monotonic() - self.saved_at

    def _save(self) -> None:
        """Begin to save on rank 0, which holds all there is to save; the others go on."""
        self.saved_at = time.monotonic()
        if not self.world.first:
            return
        if int(self.first_bad_step) < NEVER:
            return  # the weights are NaN; the next log or evaluation says so on all ranks
        if self.ema:
            self.ema.copy_buffers(self.network)
        state = {
            "model": self.network.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
        }
        manifest = checkpoint.manifest_of(
            self.config,
            self.training.classes,
            epoch=self.step / self.steps_per_epoch,
            world_size=self.world.size,
            samples=len(self.training),
            metrics=self.latest,
        )
        began = time.monotonic()
        self.writer.save(self.step, state, manifest)
        self.metrics.write(
            "checkpoint",
            step=self.step,
            seconds=time.monotonic() - began,
            path=str(self.writer.directory / f"step-{self.step:08d}"),
        )

    def _resume(self) -> None:
        """Take over the newest checkpoint that verifies; rank 0 chooses, all load the same."""
        directory = self.writer.directory
        path = self.world.from_first(lambda: _choose(directory, self.config, self.training))
        if path is None:
            return
        found = checkpoint.verify(Path(path))
        state = found.state()
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema:
            self.ema.model.load_state_dict(state["ema"] or state["model"])
        self.step = found.step
        self.latest = found.manifest["metrics"]
        if self.world.first:
            print(f"resumed from {found.path}", flush=True)

    def _finish(self, status: str) -> bool:
        """Make the last save durable before any rank leaves."""
        if status == "preempted":
            self._save()
        self.world.from_first(self.writer.wait)
        self.metrics.write("end", status=status, reason=self.stop.reason)
        self.metrics.close()
        return status == "done"


def _choose(directory: Path, config: TrainConfig, training: data.Index) -> str | None:
    """The checkpoint to go on from, as a path; None to begin.

    Raises:
        InputError: it belongs to another model, other classes or another order of the data.
    """
    if config.resume == "never":
        if checkpoint.steps(directory):
            number = len(list(directory.parent.glob("checkpoints.old-*")))
            directory.rename(directory.with_name(f"checkpoints.old-{number}"))
        return None
    found = checkpoint.newest_valid(directory)
    for path in checkpoint.set_aside(directory, found):
        print(f"warning: {path} does not verify and was set aside", flush=True)
    if found is None:
        return None
    before = found.manifest
    for name, ours, theirs in (
        ("model", config.model, before["model"]),
        ("the number of classes", len(training.classes), len(before["classes"])),
        ("the list of classes", list(training.classes), before["classes"]),
        ("image_size", config.image_size, before["image_size"]),
        ("batch_size", config.batch_size, before["config"]["batch_size"]),
        ("seed", config.seed, before["config"]["seed"]),
        ("the number of training images", len(training), before["samples"]),
    ):
        if ours != theirs:
            raise InputError(
                f"cannot resume from {found.path}: {name} was {theirs} and is now {ours}; "
                "use another output_dir, or resume=never to begin anew"
            )
    return str(found.path)
