"""The step `evaluate` in this process."""

from pathlib import Path
from typing import Any

from kfp import dsl

from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.models.evaluation import Evaluation


def artifacts(folder: Path) -> dict[str, Any]:
    """Return the output artifacts of the step, with their files in a folder."""
    kinds = {"evaluation_metrics": dsl.Metrics, "confusion_matrix": dsl.ClassificationMetrics}
    kinds |= {"evaluation_report": dsl.HTML, "evaluation_summary": dsl.Markdown}
    return {name: kind(name=name, uri=str(folder / name)) for name, kind in kinds.items()}


def run_step(
    folder: Path, checkpoint: Path, run_dir: Path, dataset: Path, **inputs: Any
) -> tuple[Path, Evaluation, dict[str, Any]]:
    """Run the step; return the folder of the evaluation, its record and the artifacts."""
    filled = artifacts(folder)
    accuracy, path = evaluate.python_func(
        checkpoint=str(checkpoint),
        run_dir=str(run_dir),
        dataset_path=str(dataset),
        **inputs,
        **filled,
    )
    record = Evaluation.read(Path(path))
    assert accuracy == record.accuracy
    return Path(path).parent, record, filled
