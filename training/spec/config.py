"""The settings of a training run, shared by pipeline, launcher and loop."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WrapValidator, model_validator

from kfp_ddp.core.secrets import reason
from kfp_ddp.core.settings import Settings, hint
from kfp_ddp.pictures.reading import BACKGROUND, MAX_PIXELS, VALUE_RANGE, Reading
from kfp_ddp.training.spec import model_file, timm_networks
from kfp_ddp.training.spec.torchvision_weights import TORCHVISION

SMALL_RESNETS = ("cifar_resnet8", "cifar_resnet14", "cifar_resnet20")
MODELS = (*SMALL_RESNETS, *TORCHVISION)
ADAMW = {"learning_rate": 1e-3, "weight_decay": 1e-2}
"""Defaults of optimizer=adamw, for fields that were not set."""


RANDOM = ("auto", "false")
"""Values of `pretrained` with which a training starts from random weights."""
_MLFLOW = re.compile("(https?|file|databricks)(://|$)")
_QUERY = re.compile(
    r"://[^?#]*[?#](?!(?<=#)sha256=[0-9a-f]{64}$|([\w-]+=(true|false|[01])(&|$))+$)"
)
"""An address with a query, which may hold a secret; flags such as download=true, and #sha256=, do
not."""


def is_network(name: str) -> bool:
    """Return whether a network is known by its name, without a user's file."""
    return name in MODELS or timm_networks.is_known(name)


def near(name: str) -> str:
    """Return a hint at the network whose name is the nearest."""
    return hint(name, timm_networks.names() if name.startswith(timm_networks.PREFIX) else MODELS)


def _as_text(pretrained: object) -> object:
    """Return a truth value as text; '' is what older settings have for random weights."""
    if not isinstance(pretrained, bool | str):
        return pretrained
    words = {"true": "true", "false": "false", "": "false"}
    return words.get(str(pretrained).lower(), pretrained)


AUTO = -1
"""Value of micro_batch_size=auto, which divides each batch."""
MicroBatch = Annotated[
    int,
    Field(ge=0),
    WrapValidator(lambda size, check: AUTO if size == "auto" else check(size)),
    PlainSerializer(lambda size: "auto" if size == AUTO else size),
]


class TrainConfig(Settings):
    """A training run; the defaults train a ResNet-50 on 224 px images."""

    old_names: ClassVar[Mapping[str, str]] = {"init_from": "pretrained"}
    set_by_step: ClassVar[frozenset[str]] = frozenset(
        {"data", "output_dir", "run_id", "stop_epochs", "stop_when_stale", "stale_seconds"}
    )
    patterns: ClassVar[dict[str, str]] = {
        BACKGROUND: "#rrggbb or ''",
        VALUE_RANGE: "two numbers BLACK,WHITE or ''",
    }

    data: str
    """Folder with the images, as <class>/, or as train/<class>/ and val/<class>/."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the images for validation where the dataset has no val/. An image's name decides, so
    it keeps its split when images are added, except in small classes; 0: the dataset must have a
    val/."""
    labels: str = ""
    """Table of path, label and optionally split in the dataset, as labels.csv; several with commas
    between, and columns after #, as labels.csv#id,breed; '' where folders name the classes."""
    layout: Literal["auto", "classes", "splits"] = "auto"
    """What the dataset's top folders are: classes, or splits, whose folders are the classes (those
    without a split's name are for training if none is named so); auto: as their names and folders
    show, or an error if they can be both."""
    output_dir: str
    """Folder for checkpoints, metrics and logs."""

    model: str = "resnet50"
    """Network to train: a torchvision classifier by its name, timm/NAME or timm/NAME.WEIGHTS of
    timm, cifar_resnet8, 14 or 20 for small images, or mine.py:build for a function of your own
    file."""
    model_code: str = ""
    """Text of that file, packed; the command line reads it from the file."""
    script: str = ""
    """Text of a Python file, packed, that replaces the training loop; every rank runs it as under
    torchrun. A command line takes the name of the file, such as mine.py."""
    script_args: str = ""
    """Arguments of that file, written as on a command line."""
    blur_pool: bool = False
    """Put a low-pass filter before convolutions with a stride (Zhang 2019)."""
    pretrained: Annotated[str, BeforeValidator(_as_text)] = "auto"
    """Initial weights. true: those of torchvision or timm. auto: the same if they can be had and
    there are fewer than 50,000 images, or random ones needed a smaller image_size; never without a
    pipeline. false: random ones. Or a path or an address (https, gs, s3, az, hf) of a file .pth or
    .safetensors, a checkpoint, a bundle or a model's exports; torchvision:NAME for others of
    torchvision."""
    image_size: int = Field(224, ge=4, le=2048)
    """Height and width in pixels, in evaluation and serving."""
    train_image_size: int = Field(0, ge=0, le=2048)
    """Height and width in training; 0 for image_size."""
    start_image_size: int = Field(0, ge=0, le=2048)
    """Height and width in the first epoch; they grow to the training size over three quarters of
    the run; 0 for one size throughout."""

    epochs: int = Field(90, ge=1)
    """Passes over the training images."""
    batch_size: int = Field(256, ge=1)
    """Images in a step, over all ranks; unless set, it is lowered to fit the dataset and the number
    of ranks."""
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
    mixup: float = Field(0.0, ge=0, le=10)
    """Mix each training image and target with another one of its batch, by a share drawn from
    Beta(mixup, mixup) (Zhang et al. 2017); 0: off."""
    cutmix: float = Field(0.0, ge=0, le=10)
    """Paste a part of another image into each training image, of an area drawn from Beta(cutmix,
    cutmix) (Yun et al. 2019). With mixup, each batch gets one of the two at random; 0: off."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Evaluate and export an exponential moving average of the weights, with this decay per step;
    0: the weights themselves."""

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
    images: Literal["convert", "strict"] = "convert"
    """Images that are not RGB or not square: convert them, with a warning if they are not RGB, or
    refuse them (strict)."""
    background: str = Field("#ffffff", pattern=BACKGROUND)
    """Colour behind transparent pixels, as #rrggbb; '' drops the alpha channel, as earlier versions
    did. Evaluation, predict and serve take that of the training."""
    value_range: str = Field("", pattern=VALUE_RANGE)
    """Values of black and white, such as -1000,1000, of images of one channel with more than 8 bits
    or fractions; '': 0 and the largest value of the bits, or 1, and images for which that is not
    clear are unreadable. Evaluation, predict and serve take that of the training."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """An image that cannot be read: fail with its name, or skip and count it."""
    max_pixels: int = Field(MAX_PIXELS, ge=1)
    """An image of more pixels is not decoded; it counts as unreadable (on_bad_image)."""
    verify_images: int = Field(10_000, ge=0)
    """Decode up to this many images before the first epoch to find broken ones; 0: none."""
    workers: int = Field(4, ge=0)
    """Loader processes of each rank; 0: the rank loads images itself."""
    cache_gb: float = Field(0.25, ge=0)
    """Cache decoded images on disk if they take at most this many gigabytes; 0: never."""
    cache_dir: str = ""
    """Folder for the decoded images; '' for the temporary folder."""
    shuffle_buffer_mb: float = Field(1024.0, gt=0)
    """Shuffle images of archives (pack=tar) within windows of this many megabytes, over all ranks,
    of chunks in random order; a smaller dataset is shuffled completely."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the shuffling and the augmentation."""
    eval_epochs: int = Field(1, ge=1)
    """Evaluate every this many epochs, and after the last one."""
    checkpoint_epochs: int = Field(1, ge=0)
    """Save a checkpoint every this many epochs, and after the last one; 0: only after the last."""
    checkpoint_minutes: float = Field(15.0, ge=0)
    """Also save a checkpoint every this many minutes; 0: never."""
    checkpoint_steps: int = Field(0, ge=0)
    """Also save a checkpoint every this many steps; 0: never."""
    keep_checkpoints: int = Field(2, ge=2)
    """How many of the newest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the checkpoint with the highest validation accuracy, and of several that with the
    lowest loss; it, not the newest, is the result of the training."""
    early_stop_epochs: int = Field(0, ge=0)
    """Stop the training when the validation accuracy, and at the same accuracy the loss, has not
    improved for this many epochs; 0: never."""
    max_gpu_hours: float = Field(0.0, ge=0)
    """Evaluate, save a checkpoint and end the training when all its attempts have used so many
    GPU-hours, or on CPUs hours of its ranks; 0: no limit."""
    gpu_hour_price: float = Field(0.0, ge=0)
    """Price of a GPU-hour, for the costs in reports; prices of job has one for each kind of node;
    0: not known."""
    resume: Literal["auto", "never"] = "auto"
    """Resume from the newest valid checkpoint, or start from scratch (never)."""

    run_id: str = ""
    """Name of this run: with resume=never a later attempt of the same run still resumes it; '' if
    each start is a separate run."""
    stop_epochs: int = Field(0, ge=0)
    """Save and stop after this many of the epochs, with the schedule of all; a start with more
    continues exactly; 0: after the last one."""

    strategy: Literal["ddp", "single"] = "ddp"
    """A copy of the network on every rank (ddp), or a single rank."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Compute on GPUs (cuda), on an Apple GPU (mps, one rank only) or on CPUs; auto: on a GPU if
    there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of autocast; auto: bf16 on a GPU that has it, fp16 with dynamic loss scaling on
    one with tensor cores for it alone, otherwise fp32."""
    decode: Literal["cpu", "gpu", "auto"] = "cpu"
    """Decode JPEG files of training in loader processes, or on the GPU (NVIDIA) except large ones;
    auto: in the way in which 20 steps took less time. Evaluation decodes on CPUs."""
    compile: bool = False
    """Compile the network with torch.compile."""
    deterministic: bool = False
    """Use deterministic algorithms only: the same bits in every run; others raise an error."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Minutes that ranks wait for each other before the run fails."""

    log_steps: int = Field(50, ge=1)
    """Write metrics every this many steps."""
    tensorboard: bool = False
    """Also write TensorBoard events, to tensorboard/ in the output folder."""
    prometheus_port: int = Field(0, ge=0, le=65535)
    """Serve the metrics to Prometheus on this port of rank 0; 0: off."""
    mlflow_uri: str = ""
    """URI of an MLflow server that also gets settings and metrics, such as
    https://mlflow.example.com; '' for none. Do not put a login into it: use MLFLOW_TRACKING_TOKEN,
    or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the bucket's secret."""
    mlflow_experiment: str = Field("kfp-ddp", min_length=1)
    """MLflow experiment of the run; created if it does not exist."""
    profile_steps: int = Field(0, ge=0)
    """Profile this many steps of rank 0, to profile/ in the output folder; 0: none."""
    peak_tflops: float = Field(0.0, ge=0)
    """Peak TFLOP/s of one device, for its utilisation (MFU); 0: the known peak of the GPU."""
    stop_when_stale: str = ""
    """Heartbeat file: save and stop when it no longer changes; '' for none."""
    stale_seconds: float = Field(120.0, gt=0)
    """Seconds without a change of that file before the run stops."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.script:
            model_file.check_script(self.script, self.script_args)
        elif self.script_args:
            raise ValueError("script_args is set, but no script takes them: set script, too")
        if model_file.is_file(self.model):
            if self.script and not self.model_code:
                self._fill(model_code=self.script)  # not sent twice
            self._fill(model=model_file.checked(self.model, self.model_code))
        elif not is_network(self.model):
            raise ValueError(
                f"model={self.model!r} is unknown: use a torchvision classifier, timm/NETWORK, "
                f"{', '.join(SMALL_RESNETS)} or file.py:function{near(self.model)}"
            )
        elif self.model_code:
            raise ValueError(
                f"model_code is set, but model={self.model} is not a function of a file"
            )
        if reason(self.mlflow_uri):  # messages do not show it
            raise ValueError(
                "mlflow_uri has a login in it, which a run's settings would show: put "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD into the bucket's secret"
            )
        if self.mlflow_uri and not _MLFLOW.match(self.mlflow_uri):
            raise ValueError(
                f"mlflow_uri={self.mlflow_uri!r} is not a URI such as https://mlflow.example.com"
            )
        if reason(self.pretrained) or _QUERY.search(self.pretrained):
            raise ValueError(
                "pretrained has a login or a query in it, which a run's settings would show: put "
                "the file into a bucket or on a claim, and use that"
            )
        if not self.is_set("warmup_epochs"):
            self._fill(warmup_epochs=min(self.warmup_epochs, self.epochs / 10))
        if self.optimizer == "adamw":
            self._fill(**{name: value for name, value in ADAMW.items() if not self.is_set(name)})
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs:g} leaves nothing of epochs={self.epochs}; "
                "lower it below the number of epochs"
            )
        divides = not self.micro_batch_size or self.batch_size % self.micro_batch_size == 0
        if self.is_set("batch_size") and not divides:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        black, _, white = self.value_range.partition(",")
        if black and float(black) == float(white):
            raise ValueError(f"value_range={self.value_range} is one value: give black and white")
        final = self.train_image_size or self.image_size
        if self.start_image_size > final:
            raise ValueError(
                f"start_image_size={self.start_image_size} is more than the final size of {final}"
            )
        if self.sampling == self.class_weights == "balanced":
            raise ValueError("sampling and class_weights are both balanced: use one of them")
        return self

    def _fill(self, **values: Any) -> None:
        """Change fields of this frozen model while it is validated; they do not count as set."""
        self.__dict__.update(values)

    @property
    def reading(self) -> Reading:
        """How images are read."""
        fields = {name: getattr(self, name) for name in Reading._fields if name != "crop"}
        return Reading(**fields, crop=timm_networks.preprocessing(self.model).crop)

    @property
    def starts_from_weights(self) -> bool:
        """Whether the training starts from existing weights."""
        return self.pretrained not in RANDOM

    def is_set(self, name: str) -> bool:
        """Return whether the field was set; a default may be replaced by a better one."""
        return name in self.model_fields_set

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
