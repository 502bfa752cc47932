"""Records of evaluations, and the step `evaluate` in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kfp import dsl
from torch import nn

from kfp_ddp.components.evaluate.component import evaluate as component
from kfp_ddp.evaluation.predict import merged, predict_share
from kfp_ddp.evaluation.ranks import Evaluated, evaluate_share
from kfp_ddp.evaluation.request import EvaluationRequest
from kfp_ddp.evaluation.results import samples_digest, summarise
from kfp_ddp.export.engine import make
from kfp_ddp.models.bundle import METRICS, REFERENCE
from kfp_ddp.models.evaluation import PREDICTIONS, ClassResult, Evaluation, wilson
from kfp_ddp.models.release import Variants
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training.distributed import alone
from kfp_ddp.training.state import checkpoint as checkpoints
from kfp_ddp.training.state.checkpoint import ModelInfo

State = dict[str, torch.Tensor]


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
    accuracy, path = component.python_func(
        checkpoint=str(checkpoint),
        run_dir=str(run_dir),
        dataset_path=str(dataset),
        **inputs,
        **filled,
    )
    record = Evaluation.read(Path(path))
    assert accuracy == record.accuracy
    return Path(path).parent, record, filled


def evaluate(checkpoint: Path | str, run_dir: Path, dataset: Path, **fields: Any) -> Evaluated:
    """Evaluate in this process; a checkpoint as text may be a bundle or a URI."""
    folders = {"checkpoint": str(checkpoint), "run_dir": str(run_dir), "data": str(dataset)}
    known = {"of_run": isinstance(checkpoint, Path), "batch_size": 64, "worst": 0}
    request = EvaluationRequest.create(**{**known, **folders, **fields})
    evaluate_share(request)
    return Evaluated.read(request.target)


class Trained(NamedTuple):
    """A training as the steps after it see it."""

    checkpoint: Path
    run_dir: Path
    dataset: Path

    @property
    def evaluation(self) -> Path:
        """The record of its evaluation, once `evaluate` has written it."""
        return self.run_dir / "evaluation" / "evaluation.json"

    @property
    def bundle(self) -> Path:
        """The folder of its bundle, once `export` has made it."""
        return self.run_dir / "bundle"

    def evaluate(self, **fields: Any) -> Evaluated:
        return evaluate(*self, **fields)

    def export(self, *release: Variants) -> Path:
        """Return the folder of its bundle."""
        split = self.dataset / "val"
        return make(self.checkpoint, self.run_dir, split, self.evaluation, "squares", *release)

    def rewritten(
        self, folder: Path, weights: Callable[[State], State] | None = None, **fields: Any
    ) -> "Trained":
        """Return this with a checkpoint in a folder: of other weights, or other fields."""
        verified = checkpoints.verify(self.checkpoint)
        state = verified.state()
        if weights is not None:
            state = {"model": weights(state["ema"] or state["model"]), "ema": None}
        manifest = {k: v for k, v in verified.fields.items() if k not in ("files", "step")}
        path = checkpoints.write(folder, 40, state, {**manifest, **fields})
        return self._replace(checkpoint=path)


def measured(folder: Path, network: nn.Module, info: ModelInfo, split: Path) -> None:
    """Write the files of a bundle that an evaluation on a split gives."""
    index = scan(split, info.classes)
    share = predict_share(network.eval(), info, index, 8, alone(torch.device("cpu")))
    predictions = merged(index, [share])
    fields: dict[str, Any] = {"checkpoint": "", "checkpoint_digest": "c" * 64, "device": "cpu"}
    result = summarise(predictions, info, dataset=split.parent, split=split.name, **fields)
    (folder / METRICS).write_text(result.model_dump_json())
    (folder / PREDICTIONS).write_text(predictions.to_csv())
    (folder / REFERENCE).write_text(predictions.sample.to_csv())


def record(correct: int, samples: int = 100, **fields: Any) -> Evaluation:
    """Return the record of an evaluation; fields that are not given have some value."""
    low, high = wilson(correct, samples)
    metrics = ("loss", "macro_precision", "macro_recall", "macro_f1")
    values: dict[str, Any] = {
        "split": "val",
        "samples": samples,
        "correct": correct,
        "accuracy": correct / samples,
        "accuracy_low": low,
        "accuracy_high": high,
        **dict.fromkeys(metrics, 0.5),
        "calibration_error": 0.04,
        **dict.fromkeys(("top5", "roc_auc", "confusion")),
        **dict.fromkeys(("classes", "calibration"), ()),
        "model": "resnet18",
        "image_size": 32,
        "step": 40,
        "checkpoint": "/work/run/checkpoints/step-00000040",
        "checkpoint_digest": "c" * 64,
        "dataset_digest": "d" * 64,
        "samples_digest": "e" * 64,
        "device": "cpu",
        "seconds": 1.0,
    }
    return Evaluation.model_validate(values | fields)


def written(
    folder: Path, wrong: int, name: str = "evaluation.json", samples: int = 100, **fields: Any
) -> Path:
    """Write an evaluation of cats with its predictions, of which the first `wrong` are wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    cats = ClassResult(name="cat", samples=samples, precision=1, recall=0.9, f1=0.9)
    digest = samples_digest((f"{i}.png", "cat") for i in range(samples))
    fields = {"classes": [cats], "samples_digest": digest, **fields}
    (folder / name).write_text(record(samples - wrong, samples, **fields).model_dump_json())
    rows = [f"{i}.png,cat,{'dog' if i < wrong else 'cat'},0.9,0.1\n" for i in range(samples)]
    text = "path,target,predicted,confidence,loss\n" + "".join(rows)
    (folder / "predictions.csv").write_text(text)
    return folder / name
