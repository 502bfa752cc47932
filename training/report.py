"""What a run says of its steps: a line on the screen, and the metrics."""

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.meter import Meter, Pace
from kfp_ddp.training.metrics import Metrics
from kfp_ddp.training.sinks import sinks


class Report:
    """Tells on rank 0 of each `log_steps`, and of the first and the last one."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        num_classes: int,
        steps_per_epoch: int,
        steps_total: int,
    ) -> None:
        self.config, self.world = config, world
        self.steps_per_epoch, self.steps_total = steps_per_epoch, steps_total
        path = RunFolder(config.output_dir).metrics
        self.metrics = Metrics(path, sinks(config)) if world.first else Metrics(None)
        self.meter = Meter(config, world, num_classes)
        self.first_step = 1

    def begin(self, done: int, exhausted: str, class_weights: Sequence[float]) -> None:
        """Tell of a run that goes on after `done` steps, or why it does not."""
        self.metrics.write(
            "start",
            world_size=self.world.size,
            device=self.meter.device,
            steps_total=self.steps_total,
            resumed_from_step=done,
            **({"class_weights": class_weights} if class_weights else {}),
        )
        self.first_step = done + 1
        if done >= self.steps_total and self.world.first:
            print(
                f"nothing to train: step {done} is saved and epochs={self.config.epochs} "
                f"end at step {self.steps_total}; raise epochs to go on",
                flush=True,
            )
        elif exhausted and self.world.first:
            print(f"nothing to train: {exhausted}; raise early_stop_epochs to go on", flush=True)

    def is_due(self, step: int) -> bool:
        """Whether to tell of `step`: the first and the last one too, so a short run is seen."""
        ends = (self.first_step, self.steps_total)
        return step in ends or step % self.config.log_steps == 0

    def step(
        self, step: int, loss: Tensor, rate: float, skipped: int, scaler: torch.amp.GradScaler
    ) -> None:
        """Tell of `step`; ranks meet and the device is waited for, as nowhere else in a step."""
        figures = self.meter.report(step)
        if scaler.is_enabled():
            figures["loss_scale"] = float(scaler.get_scale())
        own = [0.0] * self.world.size
        own[self.world.rank] = figures.pop("own_seconds")
        sums = self.world.sum([float(loss), figures["data_wait_fraction"], skipped, *own])
        mean = sums[0] / self.world.size
        pace = Pace(sums[3:], figures["step_seconds"])
        if self.world.first:
            speed = figures["images_per_s"]
            print(
                f"step {step}/{self.steps_total}: loss {mean:.4f}, {speed:,.0f} images/s"
                + pace.straggler,
                flush=True,
            )
        self.metrics.write(
            "step",
            step=step,
            epoch=step / self.steps_per_epoch,
            loss=mean,
            lr=rate,
            skipped_images=int(sums[2]),
            **{**figures, "data_wait_fraction": sums[1] / self.world.size},
            slowest_rank=pace.slowest,
            slowest_ratio=pace.ratio,
            rank_seconds=pace.seconds,
        )
        gc.collect(1)

    def evaluation(self, step: int, figures: dict[str, float], seconds: float) -> None:
        """Tell of an evaluation at the end of an epoch, which took so long."""
        epoch = step // self.steps_per_epoch
        self.metrics.write("eval", epoch=epoch, step=step, **figures)
        if self.world.first:
            print(
                f"epoch {epoch}/{self.config.epochs}: accuracy {figures['accuracy']:.2%}, "
                f"loss {figures['loss']:.4f}, evaluated in {seconds:.1f} s",
                flush=True,
            )

    def end(self, status: str, step: int, reason: str) -> None:
        """Tell how the run ended."""
        if status == "done" and step < self.steps_total and self.world.first:
            print(f"ended at step {step} of {self.steps_total}: {reason}", flush=True)
        self.metrics.write("end", status=status, step=step, reason=reason)
        self.metrics.close()
