"""Reports of a run: lines on the screen, metrics, and a trace by torch.profiler."""

import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kfp_ddp.core import machine
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.distributed import World
from kfp_ddp.training.report.meter import Meter
from kfp_ddp.training.report.trackers import sinks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.metrics import Metrics
from kfp_ddp.training.spec.time_spent import (
    OWN,
    PHASES,
    REPORTED,
    Environment,
    Pace,
    TimeSpent,
    advice,
    room_for_a_cache,
)
from kfp_ddp.training.watch import NODE

_FILES = 100
"""Names of unreadable images in an event."""


class Report:
    """Reports each `log_steps`, the first and the last step, on rank 0."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        num_classes: int,
        steps_per_epoch: int,
        steps_total: int,
    ) -> None:
        self.config = config
        self.world = world
        self.steps_per_epoch = steps_per_epoch
        self.steps_total = steps_total
        path = RunFolder(config.output_dir).metrics
        self.metrics = Metrics(path, sinks(config)) if world.first else Metrics(None)
        self.meter = Meter(config, world, num_classes)
        self.first_step = 1
        self.skipped = 0

    def begin(
        self, done: int, exhausted: str, class_weights: Sequence[float], startup: float
    ) -> None:
        """Report the start of a run after `done` steps, or why there is nothing to train.

        `startup` is how many seconds its processes took so far.
        """
        self.metrics.write(
            "start",
            world_size=self.world.size,
            device=self.meter.device,
            steps_total=self.steps_total,
            micro_batch_size=self.config.micro_batch_size,
            resumed_from_step=done,
            startup_seconds=startup,
            **({"class_weights": class_weights} if class_weights else {}),
        )
        if self.world.device.type == "cuda" and not self.meter.flops:
            why = "its peak (see peak_tflops), or the cost of the network, is not known"
            self.world.print(f"no mfu on {self.meter.device}: {why}")
        self.first_step = done + 1
        if done >= self.steps_total:
            self.world.print(
                f"nothing to train: step {done} is saved and epochs={self.config.epochs} "
                f"end at step {self.steps_total}; raise epochs to continue"
            )
        elif exhausted:
            self.world.print(f"nothing to train: {exhausted}; raise that limit to continue")

    def is_due(self, step: int) -> bool:
        """Return whether to report `step`: also the first and the last one, for short runs."""
        ends = (self.first_step, self.steps_total)
        return step in ends or step % self.config.log_steps == 0

    def step(
        self, step: int, loss: Tensor, micro_batches: int, rate: float, scaler: torch.amp.GradScaler
    ) -> None:
        """Report `step`, waiting for all ranks; `loss` is the mean of this rank."""
        figures = self.meter.report(step)
        if scaler.is_enabled():
            figures["loss_scale"] = float(scaler.get_scale())
        phases = [f"{phase}_seconds" for phase in REPORTED]
        mine = [figures[name] for name in phases]
        gathered = self.world.gather((mine, float(loss) * micro_batches, micro_batches))
        rows, losses, counts = zip(*gathered, strict=True)
        mean = sum(losses) / sum(counts)
        pace = Pace([row[: len(OWN)] for row in rows], figures["step_seconds"])
        columns = zip(*rows, strict=True)
        means = {name: fmean(column) for name, column in zip(phases, columns, strict=True)}
        speed = f"{figures['images_per_s']:,.0f} images/s"
        self.world.print(
            f"step {step}/{self.steps_total}: loss {mean:.4f}, {speed}{pace.straggler}"
        )
        self.metrics.write(
            "step",
            step=step,
            epoch=step / self.steps_per_epoch,
            loss=mean,
            lr=rate,
            skipped_images=self.skipped,
            data_wait_fraction=means["data_seconds"] / figures["step_seconds"],
            **{**figures, **means},
            slowest_rank=pace.slowest,
            slowest_ratio=pace.ratio,
            slowest_phase=pace.phase,
            straggles=pace.late,
            rank_seconds=pace.seconds,
        )
        gc.collect(1)

    def unreadable(self, step: int, files: Sequence[str]) -> None:
        """Report the files that were skipped so far, if there are more than before."""
        if len(files) > self.skipped:
            self.skipped = len(files)
            self.metrics.write("unreadable", step=step, images=len(files), files=files[:_FILES])

    def evaluation(self, step: int, figures: dict[str, float], seconds: float) -> None:
        """Report an evaluation at the end of an epoch, and its duration."""
        epoch = step // self.steps_per_epoch
        self.metrics.write("eval", epoch=epoch, step=step, **figures)
        self.world.print(
            f"epoch {epoch}/{self.config.epochs}: accuracy {figures['accuracy']:.2%}, "
            f"loss {figures['loss']:.4f}, evaluated in {seconds:.1f} s"
        )

    def end(self, status: str, step: int, reason: str, decoded: int) -> None:
        """Report how the run ended, and how all ranks spent their time; a collective call."""
        if status == "done" and step < self.steps_total:
            self.world.print(f"ended at step {step} of {self.steps_total}: {reason}")
        times = self._report_time_spent(step, decoded)
        self.metrics.write("end", status=status, step=step, reason=reason, **times)
        self.metrics.close()

    def _report_time_spent(self, step: int, decoded: int) -> dict[str, Any]:
        """Return the fields of the last event; rank 0 prints them as text."""
        seconds = self.meter.timeline.read()
        node = os.environ.get(NODE) or socket.gethostname()
        gathered = self.world.to_first(([seconds[phase] for phase in PHASES], node))
        if gathered is None:
            return {}
        rows, nodes = zip(*gathered, strict=True)
        spent = TimeSpent(rows)
        steps = step - self.first_step + 1
        fields: dict[str, Any] = {"seconds": spent.total}
        fields |= {f"{phase}_seconds": took for phase, took in spent.mean.items()}
        hints: list[str] = []
        line = spent.line()
        if steps > 0:
            cpus = machine.cpus() / self.world.local_size
            room = room_for_a_cache(self.config)
            hints = advice(spent, self.config, Environment(nodes, cpus, decoded, room))
            if self.meter.flops:
                used = self.meter.mfu(steps * self.config.batch_size / spent.stepping)
                fields["mfu"] = used
                line = f"{line}; MFU {used * 100:.1f} %"
        log.info("\n".join([line, *hints]))
        by_rank = {phase: [round(value, 3) for value in spent.by_rank(phase)] for phase in PHASES}
        self.metrics.write("ranks", step=step, nodes=nodes, seconds=by_rank)
        return {**fields, "advice": hints}


_WAIT = 8
"""Steps before the profiler starts."""
_WARM = 2
"""Steps that the profiler does not keep."""


@contextlib.contextmanager
def trace(config: TrainConfig, world: World) -> Iterator[Callable[[], None]]:
    """Yield what is called after each step; it writes the trace that `profile_steps` asks for."""
    if not config.profile_steps or not world.first:
        yield lambda: None
        return
    from torch import profiler

    plan = profiler.schedule(wait=_WAIT, warmup=_WARM, active=config.profile_steps, repeat=1)
    keep = profiler.tensorboard_trace_handler(str(RunFolder(config.output_dir).profile))
    with profiler.profile(schedule=plan, on_trace_ready=keep) as profile:
        yield profile.step
