"""What an evaluation leaves for its report, as `report.json` beside it holds it. Free of torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.core.settings import Stored, first_fault
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.pictures import MAX_POINTS, is_number

FILE = "report.json"
_LARGEST = 64 << 20
_MOST_EVENTS = 2000
_MEANS = ("loss", "images_per_s", "data_wait_fraction")
_LAST = ("event", "time", "step", "epoch", "lr", "skipped_images")


class Mistake(Stored):
    """A sample told wrong: its path below the split, true and predicted class, and its picture."""

    path: str
    target: str
    predicted: str
    confidence: float
    loss: float
    picture: str
    """WebP in base64."""
    tiny: bool = False
    """Whether its pixels are to be seen as squares."""


class Dataset(Stored):
    """What the version's manifest tells; all of it empty where there is none."""

    name: str = ""
    source: str = ""
    digest: str = ""
    files: int = 0
    bytes: int = 0
    sides: dict[str, int] = Field(default_factory=dict)
    """Images on each side."""
    training: dict[str, int] = Field(default_factory=dict)
    """Training images of each class."""
    problems: list[str] = Field(default_factory=list)
    """In words."""


class Ingredients(Stored):
    """All of it; what an evaluation of an earlier version did not leave is empty."""

    format: Literal[1] = 1
    config: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the training."""
    events: list[dict[str, Any]] = Field(default_factory=list)
    """Of the training, few enough to be drawn."""
    dataset: Dataset = Dataset()
    mistakes: list[Mistake] = Field(default_factory=list)
    """Those of the highest loss, the worst first."""
    surest: list[Mistake] = Field(default_factory=list)
    """Of the others those that the model was surest of."""
    test: Evaluation | None = None
    """What the same checkpoint came to on the test split."""

    @classmethod
    def read(cls, folder: Path) -> "Ingredients":
        """Those in the folder of an evaluation; empty where it has none.

        Raises:
            InputError: there is something else.
        """
        try:
            return cls.model_validate_json(read_below(folder, FILE, _LARGEST))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise InputError(
                f"{folder / FILE} cannot be read: {error.strerror}; run evaluate again"
            ) from None
        except ValidationError as error:
            raise InputError(
                f"{folder / FILE} is not what evaluate leaves for its report: "
                f"{first_fault(error)}; run evaluate again"
            ) from None


def fewer(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a training, so few that they can be drawn and kept: steps become their mean.

    A step that was done again counts once, as last recorded.
    """
    steps = {e["step"]: e for e in events if e.get("event") == "step" and is_number(e.get("step"))}
    lines = [steps[step] for step in sorted(steps)]
    size = -(-len(lines) // MAX_POINTS) or 1
    drawn = [_mean(lines[at : at + size]) for at in range(0, len(lines), size)]
    kinds = ("start", "eval", "checkpoint", "ranks", "end")
    others = [e for e in events if e.get("event") in kinds]
    kept = [{k: v for k, v in e.items() if k != "class_weights"} for e in others[-_MOST_EVENTS:]]
    return sorted([*drawn, *kept], key=lambda e: e["time"] if is_number(e.get("time")) else 0.0)


def _mean(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last of several steps, with the means of what goes up and down."""
    found = {key: lines[-1].get(key) for key in _LAST}
    for key in _MEANS:
        values = list(_numbers(line.get(key) for line in lines))
        found[key] = sum(values) / len(values) if values else None
    found["skipped_images"] = sum(_numbers(line.get("skipped_images") for line in lines))
    return found


def _numbers(values: Iterable[Any]) -> Iterable[float]:
    return (value for value in values if is_number(value))
