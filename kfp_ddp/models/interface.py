"""The input and output of a bundle's model, and its sample, as records of the bundle."""

import math
from typing import Annotated, NamedTuple, Self

from pydantic import ConfigDict, Field, RootModel, model_validator

from kfp_ddp.core.settings import Stored
from kfp_ddp.models.bundle import CLASSES, INTERFACE, REQUEST, RESPONSE, Bundle
from kfp_ddp.pictures.reading import BACKGROUND, MAX_PIXELS, READING, VALUE_RANGE, Fit, Reading

LARGEST_SIDE = 16384
_LARGEST = 64 << 20
_Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]


class _Classes(RootModel[Annotated[tuple[str, ...], Field(min_length=1)]]):
    """The content of classes.json."""


class _Input(Stored):
    shape: tuple[str | int, int, _Side, _Side]


class _Preprocessing(Stored):
    short_side: _Side
    background: str = Field("", pattern=BACKGROUND)
    value_range: str = Field("", pattern=VALUE_RANGE)
    fit: Fit = "crop"
    """Bundles of earlier versions have none."""
    max_pixels: int = Field(MAX_PIXELS, ge=1)


class _Signature(Stored):
    """The content of signature.json."""

    inputs: Annotated[tuple[_Input, ...], Field(min_length=1, max_length=1)]
    preprocessing: _Preprocessing

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if not self.inputs[0].shape[2] == self.inputs[0].shape[3] <= self.preprocessing.short_side:
            raise ValueError("images are not squares of at most short_side pixels")
        return self


class _Tensor(Stored):
    model_config = ConfigDict(allow_inf_nan=True)

    name: str
    shape: tuple[Annotated[int, Field(ge=1)], ...] = ()
    data: tuple[float, ...]


class _Image(_Tensor):
    data: tuple[Annotated[int, Field(ge=0, le=255)], ...]

    @model_validator(mode="after")
    def _is_full(self) -> Self:
        if math.prod(self.shape) != len(self.data):
            raise ValueError("data are not of the shape")
        return self


class _Request(Stored):
    inputs: Annotated[tuple[_Image, ...], Field(min_length=1, max_length=1)]


class _Parameters(Stored):
    allowed_abs_difference: float = Field(ge=0)


class _Response(Stored):
    outputs: Annotated[tuple[_Tensor, ...], Field(min_length=1, max_length=1)]
    parameters: _Parameters


class Interface(NamedTuple):
    """How to prepare a picture, and what the logits mean; sizes in pixels."""

    classes: tuple[str, ...]
    short_side: int
    size: int
    reading: Reading = READING


class Sample(NamedTuple):
    """A request of the v2 protocol with its image, and the expected logits of an output."""

    request: bytes
    image: _Image
    output: str
    logits: tuple[float, ...]
    allowed: float
    """Largest difference of a logit."""


def read_interface(bundle: Bundle) -> Interface:
    """Return the interface of a bundle; raise InputError if it is missing or invalid."""
    signature = bundle.record(INTERFACE, _Signature)
    classes = bundle.record(CLASSES, _Classes)
    if signature is None or classes is None:
        raise bundle.damaged(f"{'classes' if signature else 'signature'}.json is missing")
    size = signature.inputs[0].shape[2]
    before = signature.preprocessing
    reading = Reading(**before.model_dump(exclude={"short_side"}))
    return Interface(classes.root, before.short_side, size, reading)


def read_sample(bundle: Bundle) -> Sample | None:
    """Return the sample of a bundle, None for none; raise InputError if it is invalid."""
    content = bundle.read(REQUEST, _LARGEST)
    request = bundle.record(REQUEST, _Request, _LARGEST)
    response = bundle.record(RESPONSE, _Response, _LARGEST)
    if content is None or request is None or response is None:
        return None
    output = response.outputs[0]
    allowed = response.parameters.allowed_abs_difference
    return Sample(content, request.inputs[0], output.name, output.data, allowed)
