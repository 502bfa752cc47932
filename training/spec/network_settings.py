"""Settings of the network, its initial weights and the sizes of its images."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from kfp_ddp.core.secrets import reason
from kfp_ddp.core.settings import SettingsPart, hint
from kfp_ddp.training.spec import model_file, timm_networks
from kfp_ddp.training.spec.torchvision_weights import TORCHVISION

SMALL_RESNETS = ("cifar_resnet8", "cifar_resnet14", "cifar_resnet20")
MODELS = (*SMALL_RESNETS, *TORCHVISION)
RANDOM = ("auto", "false")
"""Values of `pretrained` with which a training starts from random weights."""
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
    is_timm = name.startswith(timm_networks.PREFIX)
    return hint(name, timm_networks.names() if is_timm else MODELS)


def _as_text(pretrained: object) -> object:
    """Return a truth value as text; '' is what older settings have for random weights."""
    if not isinstance(pretrained, bool | str):
        return pretrained
    words = {"true": "true", "false": "false", "": "false"}
    return words.get(str(pretrained).lower(), pretrained)


class NetworkSettings(SettingsPart):
    """The network, by its name or as a user's file, and what it starts from."""

    old_names: ClassVar[Mapping[str, str]] = {"init_from": "pretrained"}

    model: str = "resnet50"
    """Network, such as resnet50, timm/NAME or mine.py:build."""
    model_code: str = ""
    """Text of that file, packed; the command line reads it from the file."""
    script: str = ""
    """Packed text of a Python file that replaces the training loop, run in every rank."""
    script_args: str = ""
    """Arguments of that file, written as on a command line."""
    blur_pool: bool = False
    """Put a low-pass filter before convolutions with a stride (Zhang 2019)."""
    pretrained: Annotated[str, BeforeValidator(_as_text)] = "auto"
    """Initial weights: auto, true (published), false (random), a path or an address."""
    image_size: int = Field(224, ge=4, le=2048)
    """Height and width in pixels, in evaluation and serving."""
    train_image_size: int = Field(0, ge=0, le=2048)
    """Height and width in training; 0 for image_size."""
    start_image_size: int = Field(0, ge=0, le=2048)
    """Height and width in the first epoch; they grow to the training size over three quarters of
    the run; 0 for one size throughout."""

    @model_validator(mode="after")
    def _check_script(self) -> Self:
        if self.script:
            model_file.check_script(self.script, self.script_args)
        elif self.script_args:
            raise ValueError("script_args is set, but no script takes them: set script, too")
        return self

    @model_validator(mode="after")
    def _check_model(self) -> Self:
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
        return self

    @model_validator(mode="after")
    def _check_pretrained(self) -> Self:
        if reason(self.pretrained) or _QUERY.search(self.pretrained):
            raise ValueError(
                "pretrained has a login or a query in it, which a run's settings would show: put "
                "the file into a bucket or on a claim, and use that"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        final = self.train_image_size or self.image_size
        if self.start_image_size > final:
            raise ValueError(
                f"start_image_size={self.start_image_size} is more than the final size of {final}"
            )
        return self

    @property
    def starts_from_weights(self) -> bool:
        """Whether the training starts from existing weights."""
        return self.pretrained not in RANDOM
