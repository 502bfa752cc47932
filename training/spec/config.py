"""The settings of a training run, shared by pipeline, launcher and loop; also as flags."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import hint
from kfp_ddp.pictures.reading import LayoutRule, Reading
from kfp_ddp.training.spec import model_file, timm_networks
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

    @property
    def layout_rule(self) -> LayoutRule:
        """What the folders and tables of the dataset mean."""
        return LayoutRule(*(getattr(self, name) for name in LayoutRule._fields))

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


def parse(argv: Sequence[str] | None = None, prog: str | None = None) -> TrainConfig:
    """Parse command line flags, by default those of this process; raise InputError."""
    return TrainConfig.create(**model_file.with_code(read_flags(argv, prog)))


def read_flags(
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields that command line flags set, unvalidated; the help shows `defaults`."""
    parser = argparse.ArgumentParser(
        prog,
        "%(prog)s [flags]",
        "Train an image classifier.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, field in TrainConfig.model_fields.items():
        default = (defaults or {}).get(name, "required" if field.is_required() else field.default)
        choices = [f"one of {', '.join(options)}"] if (options := TrainConfig.choices(name)) else []
        notes = "; ".join([*choices, f"default: {default!r}"])
        text = f"{field.description} ({notes})".replace("%", "%%")
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        if field.annotation is bool:
            parser.add_argument(*flags, help=text, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*flags, help=text, metavar=name.upper())
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        near = hint(unknown[0].lstrip("-").replace("-", "_"), list(TrainConfig.model_fields))
        raise InputError(f"there is no flag {unknown[0]}{near}")
    return vars(parsed)
