"""Inputs of the gate: evaluations, bundles and champions."""

import json
from pathlib import Path
from typing import Any

from kfp import dsl

from kfp_ddp.components.gate.component import gate
from kfp_ddp.models import bundle, variants
from kfp_ddp.models.evaluation import ClassResult, Evaluation, wilson
from tests.evaluations import written

CLASSES = [
    ClassResult(name="cat", samples=50, precision=0.9, recall=0.95, f1=0.9),
    ClassResult(name="dog|x", samples=50, precision=0.9, recall=0.8, f1=0.9),
    ClassResult(name="absent", samples=0, precision=0, recall=0, f1=0),
]


def evaluation(folder: Path, wrong: int, **changed: Any) -> str:
    """Write an evaluation of 100 samples, and return its path."""
    return str(written(folder, wrong, **{"classes": CLASSES, **changed}))


def judged(tmp_path: Path, accuracy: float, **rules: Any) -> tuple[bool, str]:
    verdict = dsl.Markdown(name="verdict", uri=str(tmp_path / "verdict.md"))
    others = ("evaluation", "champion", "bundle", "attempt")
    inputs = {name: rules.pop(name) for name in others if name in rules}
    report = dsl.HTML(name="report", uri=str(tmp_path / "report.html"))
    blessed, version = gate.python_func(
        accuracy=accuracy, gate_verdict=verdict, gate_report=report, rules=rules, **inputs
    )
    assert ("Blessed" if blessed else "Not blessed") in (tmp_path / "report.html").read_text()
    assert verdict.metadata["champion"] == version
    reason = verdict.metadata["reason"]
    assert verdict.metadata["blessed"] is blessed
    text = (tmp_path / "verdict.md").read_text()
    assert text.startswith("## Blessed" if blessed else "## Not blessed")
    assert "\n" not in reason
    return blessed, reason


def exported(exports: Path, wrong: int, **changed: Any) -> str:
    """Put a bundle of an evaluation beside others, and return its version."""
    champion = written(exports / "made", wrong, "metrics.json", **{"classes": CLASSES, **changed})
    config = {"export": {"made_of": {"model_name": exports.name}}}
    bundle.write_json(champion.parent / bundle.CONFIG, config)
    version = bundle.seal(champion.parent)[:12]
    champion.parent.rename(exports / version)
    return version


FILES = {
    "model.onnx": {"latency": {"batch_1": {"median_ms": 5.0}}, "memory_mb": 120.0},
    "model.int8.onnx": {"latency": {"batch_1": {"median_ms": 2.0}}, "memory_mb": 80.0},
}
"""Results of processes with only the runtime."""


def bundled(folder: Path, of: str, **content: Any) -> str:
    """Write a bundle of an evaluation, and return its folder.

    Args:
        folder: Where to.
        of: Path of the evaluation, with its predictions beside it.
        content: Of further JSON files by name, without their ending; `megabytes` of weights.
    """
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_bytes(Path(of).read_bytes())
    (folder / "predictions.csv").write_bytes(Path(of).with_name("predictions.csv").read_bytes())
    (folder / "model.onnx").write_bytes(bytes(int(content.pop("megabytes", 0) * 1e6)))
    for name, document in content.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    bundle.seal(folder)
    return str(folder)


def infra(**changed: Any) -> dict[str, Any]:
    """Return the `infra.json` of a bundle that serves."""
    return {"passed": True, "reason": "", "files": FILES, **changed}


def variant(of: str, name: str = "int8", gain: float = -0.01, agreement: float = 0.98) -> Any:
    """Return the `variants.json` of a variant of a model."""
    model = Evaluation.read(Path(of))
    correct = model.correct + round(gain * model.samples)
    low, high = wilson(correct, model.samples)
    share = correct / model.samples
    own = {"correct": correct, "accuracy": share, "accuracy_low": low, "accuracy_high": high}
    measured = variants.MeasuredVariant(
        name=name,
        file=variants.FILES[name],
        size=1,
        evaluation=model.model_copy(update=own),
        agreement=agreement,
        gain=gain,
        low=gain - 0.01,
        high=gain + 0.01,
        won=0,
        lost=round(-gain * model.samples),
    )
    return variants.VariantsRecord(variants=[measured]).model_dump(mode="json")
