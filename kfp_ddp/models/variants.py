"""Record of the further forms of a model, `variants.json`. Does not import torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.core.settings import Stored, first_fault
from kfp_ddp.models.evaluation import Evaluation

FILE = "variants.json"
FILES = {name: f"model.{name}.onnx" for name in ("fp16", "int8", "resize")}
"""The file of each form."""
LARGEST = 64 << 20


class Measured(Stored):
    """A further form of the model, evaluated on the complete split.

    `agreement` is the share of samples with the same prediction as the checkpoint, `gain` the gain
    of accuracy with Newcombe's 95 % interval, `won` and `lost` the samples that only the form or
    only the checkpoint predicted correctly. `evaluation.seconds` is 0: times are in latency.json.
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


class Record(Stored):
    """All requested forms: those in the bundle, and why others are not."""

    format: Literal[1] = 1
    variants: list[Measured] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def requested(self) -> bool:
        """Whether any form was requested."""
        return bool(self.variants or self.left_out)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Return the record of a bundle, empty if it has none; refuse an invalid one."""
        try:
            return cls.model_validate_json(read_below(folder, FILE, LARGEST))
        except OSError:
            return cls()
        except ValidationError as error:
            raise InputError(
                f"{folder / FILE} is not a record of forms: {first_fault(error)}; "
                "export the model again"
            ) from None
