"""Inputs of the gate: evaluations, bundles and champions."""

import json
from pathlib import Path
from typing import Any

from kfp import dsl

from kfp_ddp.components.gate.component import gate
from kfp_ddp.evaluation.results import samples_digest
from kfp_ddp.models import bundle, variants
from kfp_ddp.models.evaluation import ClassResult, Evaluation, wilson
from tests.evaluations import record

CLASSES = [
    ClassResult(name="cat", samples=50, precision=0.9, recall=0.95, f1=0.9),
    ClassResult(name="dog|x", samples=50, precision=0.9, recall=0.8, f1=0.9),
    ClassResult(name="absent", samples=0, precision=0, recall=0, f1=0),
]


def evaluation(folder: Path, hits: list[bool], **changed: Any) -> str:
    """Write an evaluation with these correct and incorrect samples, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = samples_digest((f"{i}.png", "cat") for i in range(len(hits)))
    values = {"classes": CLASSES, "samples_digest": digest, **changed}
    result = record(sum(hits), len(hits), **values)
    path = folder / "evaluation.json"
    path.write_text(result.model_dump_json())
    rows = [f"{i}.png,cat,{'cat' if hit else 'dog|x'},0.9,0.1" for i, hit in enumerate(hits)]
    text = "path,target,predicted,confidence,loss\n" + "\n".join(rows) + "\n"
    (folder / "predictions.csv").write_text(text)
    return str(path)


def hits(wrong: int, n: int = 100) -> list[bool]:
    return [i >= wrong for i in range(n)]


def judged(tmp_path: Path, accuracy: float, **rules: Any) -> tuple[bool, str]:
    verdict = dsl.Markdown(name="verdict", uri=str(tmp_path / "verdict.md"))
    inputs = {
        name: rules.pop(name) for name in ("evaluation", "champion", "bundle") if name in rules
    }
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
    champion = Path(evaluation(exports / "made", hits(wrong), **changed))
    champion.rename(champion.with_name("metrics.json"))
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
    measured = variants.Measured(
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
    return variants.Record(variants=[measured]).model_dump(mode="json")
