"""Settings of the optimisation and of the augmentation of images."""

from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, WrapValidator, model_validator

from kfp_ddp.core.settings import SettingsPart

ADAMW = {"learning_rate": 1e-3, "weight_decay": 1e-2}
"""Defaults of optimizer=adamw, for fields that were not set."""
AUTO = -1
"""Value of micro_batch_size=auto, which divides each batch."""
MicroBatch = Annotated[
    int,
    Field(ge=0),
    WrapValidator(lambda size, check: AUTO if size == "auto" else check(size)),
    PlainSerializer(lambda size: "auto" if size == AUTO else size),
]


class OptimizerSettings(SettingsPart):
    """Epochs, batches, the optimizer with its schedule, and the loss."""

    epochs: int = Field(90, ge=1)
    """Passes over the training images."""
    batch_size: int = Field(256, ge=1)
    """Images in a step, over all ranks."""
    batch_size_per_rank: int = Field(0, ge=0)
    """Images in a step on each rank, instead of batch_size; 0: not used."""
    micro_batch_size: MicroBatch = 0
    """Images in one forward pass of a rank; gradients of several passes accumulate in a step; 0:
    one pass for all images of the rank; auto: the largest part of them that fits into the memory of
    each GPU, tried before the first step."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum, or AdamW, for which learning_rate and weight_decay default to
    0.001 and 0.01."""
    learning_rate: float = Field(0.1, gt=0, le=10)
    """Highest learning rate, reached after the warm-up."""
    lr_reference_batch: int = Field(0, ge=0)
    """Batch size that learning_rate is meant for; with another batch size the rate is scaled in
    proportion; 0: never scaled."""
    clip_norm: float = Field(0.0, ge=0)
    """Clip the gradient of a step to this norm; 0: no clipping."""
    freeze_epochs: int = Field(0, ge=0)
    """First epochs in which only the classifier is trained; weights and BatchNorm statistics below
    it are frozen. Equal to epochs: throughout."""
    body_lr_factor: float = Field(1.0, gt=0, le=1)
    """Learning rate of the layers below the classifier, as a fraction of learning_rate."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of SGD."""
    weight_decay: float = Field(5e-5, ge=0)
    """L2 penalty on the weights of convolutions and linear layers."""
    warmup_epochs: float = Field(5.0, ge=0)
    """Epochs in which the learning rate rises linearly, before it falls as a cosine; unless set, at
    most a tenth of epochs."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of a target that is distributed over all classes."""
    class_weights: Literal["none", "sqrt", "balanced"] = "none"
    """Weight of a class in the loss: equal for all, or inversely proportional to its number of
    training images (balanced), or to the square root of that number (sqrt)."""
    sampling: Literal["uniform", "sqrt", "balanced"] = "uniform"
    """Share of a class in an epoch: in proportion to its images, to their square root, or equal for
    all classes (balanced). Images of small classes are then repeated, with other augmentation."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Evaluate and export an exponential moving average of the weights, with this decay per step;
    0: the weights themselves."""

    @model_validator(mode="after")
    def _fill_defaults(self) -> Self:
        if not self.is_set("warmup_epochs"):
            self._fill(warmup_epochs=min(self.warmup_epochs, self.epochs / 10))
        if self.optimizer == "adamw":
            self._fill(**{name: value for name, value in ADAMW.items() if not self.is_set(name)})
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs:g} leaves nothing of epochs={self.epochs}; "
                "lower it below the number of epochs"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        divides = not self.micro_batch_size or self.batch_size % self.micro_batch_size == 0
        if self.is_set("batch_size") and not divides:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _check_balance(self) -> Self:
        if self.sampling == self.class_weights == "balanced":
            raise ValueError("sampling and class_weights are both balanced: use one of them")
        return self


class AugmentationSettings(SettingsPart):
    """Random changes of training images, and the flip in evaluation."""

    mixup: float = Field(0.0, ge=0, le=10)
    """Mix each training image and target with another one of its batch, by a share drawn from
    Beta(mixup, mixup) (Zhang et al. 2017); 0: off."""
    cutmix: float = Field(0.0, ge=0, le=10)
    """Paste a part of another image into each training image, of an area drawn from Beta(cutmix,
    cutmix) (Yun et al. 2019). With mixup, each batch gets one of the two at random; 0: off."""
    augment: Literal["auto", "none", "shift", "shift-flip", "crop", "crop-flip"] = "auto"
    """Random shift or resized crop of training images, with or without a horizontal flip; auto is
    shift for cifar models and crop-flip for the others."""
    crop_min_area: float = Field(0.08, gt=0, le=1)
    """Smallest area of a resized crop, as a share of the image."""
    randaugment: int = Field(0, ge=0, le=30)
    """Magnitude of two random operations on each training image, such as rotating it or changing
    its colours (RandAugment, Cubuk et al. 2019; often 9); 0: none."""
    test_time_flip: bool = False
    """Average the logits of an image and its mirror image, in evaluation and in the exported model;
    inference takes twice the time."""
