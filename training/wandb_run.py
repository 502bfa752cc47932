"""A run of Weights & Biases, which a resume goes on in: its id is made of the run's name."""

import hashlib
from collections.abc import Sequence

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.trackers import Event


class WandbRun:
    """The run of a training."""

    def __init__(self, config: TrainConfig) -> None:
        """Begin it, or go on in it.

        Raises:
            Exception: those of wandb.
        """
        import wandb

        name = config.run_id or config.output_dir
        self._run = wandb.init(
            project=config.wandb_project,
            id=hashlib.sha256(name.encode()).hexdigest()[:16],
            name=name,
            resume="allow",
            dir=config.output_dir,
            config=config.model_dump(exclude={"model_code", "mlflow_uri"}),
        )

    def log(self, events: Sequence[Event]) -> None:
        """Keep the numbers of events, and how the run ended."""
        for event in events:
            if event.name in ("step", "eval"):
                numbers = {
                    f"{event.name}/{name}": value
                    for name, value in event.fields.items()
                    if isinstance(value, int | float) and name != "step"
                }
                self._run.log(numbers, step=event.fields["step"])
            elif event.name == "end":
                self._run.finish(exit_code=int(event.fields["status"] != "done"))
