"""The one typed description of a run, shared by pipeline, launcher and loop; free of torch."""

import dataclasses
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.settings import Settings

ModelName = Literal[
    "cifar_resnet8", "cifar_resnet14", "cifar_resnet20", "resnet18", "resnet34", "resnet50"
]
MODELS: tuple[str, ...] = typing.get_args(ModelName)


class TrainConfig(Settings):
    """A training run; the defaults train a ResNet-50 on 224 px images."""

    data: str = Field(description="Folder with train/<class>/ and val/<class>/ images.")
    output_dir: str = Field(description="Folder for checkpoints, metrics and logs.")

    model: ModelName = Field("resnet50", description="Network to train.")
    blur_pool: bool = Field(False, description="Low-pass filter before strides (Zhang 2019).")
    init_from: str = Field(
        "", description="Begin with the weights of this step directory; '' for random weights."
    )
    image_size: int = Field(
        224, ge=4, le=2048, description="Height and width in pixels, for evaluation and serving."
    )
    train_image_size: int = Field(
        0, ge=0, le=2048, description="The same in training; 0 for image_size."
    )
    start_image_size: int = Field(
        0, ge=0, le=2048, description="Grow from this size over three quarters of the run; 0: no."
    )

    epochs: int = Field(90, ge=1, description="Passes over the training split.")
    batch_size: int = Field(256, ge=1, description="Images a step over all ranks together.")
    batch_size_per_rank: int = Field(
        0, ge=0, description="Instead of batch_size: images a step on each rank; 0 for batch_size."
    )
    micro_batch_size: int = Field(
        0, ge=0, description="Images a forward pass on one rank; 0 for batch_size / world size."
    )
    learning_rate: float = Field(0.1, gt=0, description="Peak learning rate, after the warm-up.")
    lr_reference_batch: int = Field(
        0,
        ge=0,
        description="Scale the learning rate by batch_size / this (linear scaling); 0 for never.",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of SGD.")
    weight_decay: float = Field(5e-5, ge=0, description="L2 penalty on weights, not on BatchNorm.")
    warmup_epochs: float = Field(5.0, ge=0, description="Epochs of linear warm-up before cosine.")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Target spread over all classes.")
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="Decay a step of the averaged weights; 0 for none."
    )

    augment: Literal["auto", "none", "shift", "shift-flip", "crop", "crop-flip"] = Field(
        "auto",
        description="Random shift or resized crop, with or without a horizontal flip; "
        "auto is shift for cifar models and crop-flip for the others.",
    )
    crop_min_area: float = Field(
        0.08, gt=0, le=1, description="Smallest share of an image that a resized crop takes."
    )
    images: Literal["convert", "strict"] = Field(
        "convert", description="Images not RGB and square: convert with a warning, or refuse."
    )
    on_bad_image: Literal["fail", "skip"] = Field(
        "fail", description="An unreadable image: fail with its name, or skip and count."
    )
    verify_images: int = Field(
        10_000, ge=0, description="Images decoded in full before the first epoch, at most."
    )
    workers: int = Field(4, ge=0, description="Loader processes for each rank.")
    cache_gb: float = Field(
        0.25, ge=0, description="Keep decoded images in a mapped file of at most this; 0: never."
    )
    cache_dir: str = Field("", description="Where to keep them; '' for the temporary folder.")

    seed: int = Field(0, ge=0, description="Seed of initialisation, order and augmentation.")
    eval_epochs: int = Field(1, ge=1, description="Evaluate each so many epochs, and at the end.")
    checkpoint_epochs: int = Field(1, ge=0, description="Save each so many epochs; 0 for never.")
    checkpoint_minutes: float = Field(
        15.0, ge=0, description="And each so many minutes; 0 for epochs only."
    )
    checkpoint_steps: int = Field(0, ge=0, description="And each so many steps; 0 for never.")
    keep_checkpoints: int = Field(2, ge=2, description="Newest checkpoints to keep, 2 or more.")
    resume: Literal["auto", "never"] = Field(
        "auto", description="Go on from the newest checkpoint that verifies, or start anew."
    )

    run_id: str = Field(
        "", description="resume=never begins anew once for each of these; '' for each launcher."
    )

    strategy: Literal["ddp", "single", "fsdp"] = Field(
        "ddp", description="Replicate the model, insist on one rank, or shard it over the ranks."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where ranks compute: cuda (nccl), cpu (gloo), or what there is."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto is bf16 autocast on a GPU that has it, fp32 on a CPU."
    )
    compile: bool = Field(False, description="Compile the network with torch.compile.")
    deterministic: bool = Field(False, description="Refuse kernels that are not deterministic.")
    timeout_minutes: float = Field(
        10.0, gt=0, description="A collective that waits longer than this fails the run."
    )

    log_steps: int = Field(50, ge=1, description="Steps between two lines of metrics.")
    tensorboard: bool = Field(False, description="Write TensorBoard events to tensorboard/.")
    prometheus_port: int = Field(
        0, ge=0, le=65535, description="Serve /metrics on this port of rank 0; 0 for not."
    )
    profile_steps: int = Field(
        0, ge=0, description="Trace so many steps of rank 0 to profile/; 0 for none."
    )
    peak_tflops: float = Field(
        0.0, ge=0, description="Peak of one device, for MFU; 0 for what is known of the GPU."
    )
    stop_when_stale: str = Field(
        "", description="Save and stop when this heartbeat file is no longer touched."
    )
    stale_seconds: float = Field(
        120.0, gt=0, description="How long the heartbeat may rest before it counts as stale."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs:g} leaves nothing of epochs={self.epochs}; "
                "lower it below the number of epochs"
            )
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        final = self.train_image_size or self.image_size
        if self.start_image_size > final:
            raise ValueError(
                f"start_image_size={self.start_image_size} is more than the final size of {final}"
            )
        if self.strategy == "fsdp" and self.ema_decay:
            raise ValueError("ema_decay needs strategy=ddp: averaged weights are not sharded")
        if self.strategy == "fsdp" and self.compile:
            raise ValueError("compile needs strategy=ddp or single: shards are not compiled")
        return self

    @staticmethod
    def check_one_each(images: int, ranks: int) -> None:
        """Raise InputError unless there is an image for each rank."""
        if images < ranks:
            raise InputError(
                f"{ranks} ranks but only {images} training images; use at most {images} ranks"
            )

    @staticmethod
    def check_dealt(batch: int, micro: int, ranks: int, uneven: bool = False) -> None:
        """Raise InputError unless each rank gets the same; elastic runs may get unequal numbers."""
        if uneven and micro and batch % micro == 0 and batch // micro >= ranks:
            return
        unit = ranks * (micro or 1)
        if batch % unit:
            size = f" with micro_batch_size={micro}" if micro else ""
            near = max(unit, round(batch / unit) * unit)
            raise InputError(
                f"batch_size={batch} cannot be divided evenly among {ranks} ranks{size}; "
                f"use a multiple of {unit}, for example {near}"
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The configuration that `to_json` wrote; raises InputError as `create` does."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise InputError(f"the configuration is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InputError("the configuration must be a JSON object of field names and values")
        return cls.create(**fields)

    def to_json(self) -> str:
        """All fields as an indented JSON object."""
        return self.model_dump_json(indent=2)

    def to_argv(self, short: bool = False) -> list[str]:
        """The command line flags that `parse` turns into this configuration again.

        Args:
            short: Leave out what has its default.
        """
        argv = []
        for name, value in self.model_dump().items():
            flag = name.replace("_", "-")
            if short and value == type(self).model_fields[name].default:
                continue
            if isinstance(value, bool):
                argv.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                argv += [f"--{flag}", str(value)]
        return argv


def parse(
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """The configuration of command line flags.

    Args:
        argv: The flags; `sys.argv` without a value.
        prog: How the usage names the program.
        defaults: Values that stand where no flag says otherwise, over the fields' own.

    Raises:
        InputError: a value that a field does not take, in one line.
        SystemExit: 2 after tyro's message for an unknown flag, 0 after --help.
    """
    import tyro

    fields = [
        (
            name,
            Annotated[info.annotation, tyro.conf.arg(help=info.description)],
            (defaults or {}).get(name, _default(info)),
        )
        for name, info in TrainConfig.model_fields.items()
    ]
    flags = dataclasses.make_dataclass("Flags", fields, kw_only=True)
    flags.__doc__ = "Train a ResNet on image folders with DistributedDataParallel."
    parsed: object = tyro.cli(flags, args=list(sys.argv[1:] if argv is None else argv), prog=prog)
    return TrainConfig.create(**vars(parsed))


def _default(info: Any) -> Any:
    return dataclasses.MISSING if info.is_required() else info.default
