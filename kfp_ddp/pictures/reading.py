"""How pictures are read: settings of the decoder, with the defaults of runs without them."""

from typing import Literal, NamedTuple

MAX_PIXELS = 100_000_000
BACKGROUND = "^(#[0-9a-fA-F]{6})?$"
_NUMBER = r"-?\d{1,15}(\.\d{1,15})?"
VALUE_RANGE = f"^({_NUMBER},{_NUMBER})?$"
Fit = Literal["crop", "pad", "squash"]
PADDING = (124, 116, 104)
"""Colour around a picture with fit=pad: the mean of ImageNet, which networks take for zero."""


class Reading(NamedTuple):
    """How images are read; fields are as in `TrainConfig`, defaults as in runs without them."""

    on_bad_image: str = "fail"
    max_pixels: int = MAX_PIXELS
    background: str = ""
    images: str = "convert"
    value_range: str = ""
    fit: Fit = "crop"
    crop: float = 0.0
    """As in `timm_networks.Preprocessing`; not a field."""

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest file: pixels of 8 bytes, profiles and thumbnails."""
        return 8 * self.max_pixels + 2**26


READING = Reading()
