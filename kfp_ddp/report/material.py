"""All that a report is made from, read from the folder of an evaluation and a bundle."""

import csv
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.core.run_folder import VERDICT, RunFolder
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.models.evaluation import FILE, LARGEST_PREDICTIONS, Compared, Evaluation, wilson
from kfp_ddp.report.ingredients import Ingredients
from kfp_ddp.report.pictures import read_events
from kfp_ddp.storage.destination import sha256

_LARGEST = 4 << 20
_OF_A_BUNDLE = ("config.json", "parity.json", "latency.json", "variants.json", "infra.json")


@dataclass(frozen=True)
class Pair:
    """Samples of one class that were taken for another, of how many."""

    target: str
    predicted: str
    count: int
    of: int

    @property
    def share(self) -> float:
        """Of the true class."""
        return self.count / self.of

    @property
    def stands_out(self) -> float:
        """The share that they have at least: low where there are few samples."""
        return wilson(self.count, self.of)[0]


@dataclass(frozen=True)
class Material:
    """All of it; what is not there is empty."""

    folder: Path
    result: Evaluation
    left: Ingredients
    config: Mapping[str, Any]
    events: list[dict[str, Any]]
    verdict: Mapping[str, Any]
    bundle: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its JSON files by name, without their ending."""

    @cached_property
    def pairs(self) -> list[Pair]:
        """Who was taken for whom: first what most certainly is a large part of its class."""
        if self.result.confusion is not None:
            return pairs_of(self.result)
        return _ranked(_confused(self.folder / self.result.predictions), self.result)

    @property
    def name(self) -> str:
        """What the model is called: where it is exported to, or its architecture."""
        made = self.bundle.get("config", {}).get("export", {}).get("made_of", {})
        return str(made.get("model_name") or self.result.model)


def gather(folder: Path, bundle: Path | None) -> Material:
    """Read it.

    Args:
        folder: Of the evaluation.
        bundle: Of the model that it is of; None for none.

    Raises:
        InputError: there is no evaluation, or something that is none.
    """
    result, left = Evaluation.read(folder / FILE), Ingredients.read(folder)
    run, verdict = RunFolder(folder.parent), _verdict(folder)
    return Material(
        folder=folder,
        result=_compared(result, verdict),
        left=left,
        config=left.config or _document(run.path, run.config.name),
        events=left.events or read_events(run.metrics),
        verdict=verdict,
        bundle={name[:-5]: _document(bundle, name) for name in _OF_A_BUNDLE} if bundle else {},
    )


def _verdict(folder: Path) -> dict[str, Any]:
    """What the gate said of this evaluation; {} where it said nothing, or that of another."""
    said = _document(folder, VERDICT)
    other = said.get("evaluation_sha256", "") not in ("", sha256(folder / FILE))
    return {} if other else said


def _compared(result: Evaluation, verdict: Mapping[str, Any]) -> Evaluation:
    """The evaluation with the gate's comparison, which is with the champion that decided."""
    try:
        found = Compared.model_validate(verdict.get("compared"))
    except ValidationError:
        return result
    return result.model_copy(update={"compared": found})


def pairs_of(result: Evaluation) -> list[Pair]:
    """Who was taken for whom, from the matrix; first what most certainly is much of its class."""
    names = [one.name for one in result.classes]
    counts = {
        (names[i], names[j]): count
        for i, row in enumerate(result.confusion or [])
        for j, count in enumerate(row)
        if count and i != j
    }
    return _ranked(counts, result)


def _ranked(counts: Mapping[tuple[str, str], int], result: Evaluation) -> list[Pair]:
    samples = {one.name: one.samples for one in result.classes}
    found = (
        Pair(target, predicted, count, samples[target])
        for (target, predicted), count in counts.items()
        if count <= samples.get(target, 0) and predicted in samples
    )
    return sorted(found, key=lambda p: (-p.stands_out, -p.count, p.target, p.predicted))


def _document(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder; {} where there is none that can be read."""
    try:
        return mapping_in(read_below(folder, name, _LARGEST))
    except (OSError, ValueError):
        return {}


def _confused(predictions: Path) -> Counter[tuple[str, str]]:
    """Each pair of true and predicted class that differ, counted."""
    try:
        text = read_below(predictions.parent, predictions.name, LARGEST_PREDICTIONS).decode()
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return Counter((r["target"], r["predicted"]) for r in rows if r["target"] != r["predicted"])
    except FileNotFoundError:
        return Counter()
    except (OSError, ValueError, KeyError, csv.Error):
        raise InputError(f"{predictions} are no predictions: run evaluate again") from None
