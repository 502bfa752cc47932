"""The settings of a training run, shared by pipeline, launcher and loop."""

from typing import ClassVar

from kfp_ddp.pictures.reading import Reading
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.data_settings import DataSettings, ImageSettings
from kfp_ddp.training.spec.network_settings import NetworkSettings
from kfp_ddp.training.spec.optimizer_settings import AugmentationSettings, OptimizerSettings
from kfp_ddp.training.spec.run_settings import (
    CheckpointSettings,
    DistributionSettings,
    ReportSettings,
    StopSettings,
)


# pydantic collects fields and rules from the last base to the first: DataSettings comes first.
class TrainConfig(
    ReportSettings,
    DistributionSettings,
    StopSettings,
    CheckpointSettings,
    ImageSettings,
    AugmentationSettings,
    OptimizerSettings,
    NetworkSettings,
    DataSettings,
):
    """A training run; the defaults train a ResNet-50 on 224 px images."""

    set_by_step: ClassVar[frozenset[str]] = frozenset(
        {"data", "output_dir", "run_id", "stop_epochs", "stop_when_stale", "stale_seconds"}
    )

    @property
    def reading(self) -> Reading:
        """How images are read."""
        fields = {name: getattr(self, name) for name in Reading._fields if name != "crop"}
        return Reading(**fields, crop=timm_networks.preprocessing(self.model).crop)

    def to_argv(self) -> list[str]:
        """Return the command line flags of the fields that were set; `parse` reverses it."""
        argv = []
        for name, value in self.model_dump(exclude_unset=True).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                argv.append(f"--{flag}" if value else f"--no-{flag}")
            elif str(value).startswith("-"):
                argv.append(f"--{flag}={value}")
            else:
                argv += [f"--{flag}", str(value)]
        return argv
