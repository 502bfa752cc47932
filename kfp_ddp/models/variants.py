"""Record of the further forms of a model, `variants.json`."""

from typing import Literal, get_args

from pydantic import Field

from kfp_ddp.core.settings import Stored
from kfp_ddp.models.bundle import VARIANTS, Bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variant

FILES: dict[str, str] = {name: f"model.{name}.onnx" for name in get_args(Variant)}
"""The file of each form."""
RETIRED = {"resize": "retired: leave --variant out, the server resizes pictures itself"}
"""Forms of earlier versions, which bundles may still have, and what to do."""
LARGEST = 64 << 20


class MeasuredVariant(Stored):
    """A further form of the model on the complete split, compared with the checkpoint.

    `evaluation.seconds` is 0: times are in latency.json.
    """

    name: str
    file: str
    size: int
    """Bytes of the file."""
    evaluation: Evaluation
    agreement: float
    gain: float
    low: float
    high: float
    won: int
    lost: int
    made: dict[str, str | int] = Field(default_factory=dict)
    """How it was made, such as the number of calibration images."""


class VariantsRecord(Stored):
    """All requested forms: those in the bundle, and why others are not."""

    format: Literal[1] = 1
    variants: list[MeasuredVariant] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def requested(self) -> bool:
        """Whether any form was requested."""
        return bool(self.variants or self.left_out)


def read(bundle: Bundle) -> VariantsRecord:
    """Return the record of a bundle, empty if it has none; refuse a damaged one."""
    return bundle.record(VARIANTS, VariantsRecord, LARGEST) or VariantsRecord()
