"""Bundles as of export, with weights that cannot be loaded."""

import json
from pathlib import Path

from kfp_ddp.evaluation.results import samples_digest
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import LINEAGE
from kfp_ddp.models.evaluation import ClassResult, Evaluation, wilson
from kfp_ddp.storage.store import Store

SAMPLES = 60


def evaluated(folder: Path, name: str, wrong: int) -> Path:
    """Write an evaluation with its predictions, of which the first `wrong` are wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    correct = SAMPLES - wrong
    low, high = wilson(correct, SAMPLES)
    record = Evaluation(
        split="val", samples=SAMPLES, correct=correct, accuracy=correct / SAMPLES,
        accuracy_low=low, accuracy_high=high, loss=0.3, top5=None, macro_precision=0.9,
        macro_recall=0.9, macro_f1=0.9, calibration_error=0.04, roc_auc=0.99,
        classes=[ClassResult(name="cat", samples=SAMPLES, precision=1, recall=0.9, f1=0.9)],
        calibration=[], confusion=None, model="resnet18", image_size=32, step=7, checkpoint="c",
        checkpoint_digest="c" * 64, dataset_digest="d" * 64, device="cpu", seconds=1.0,
        predictions="predictions.csv", split_digest="e" * 64,
        samples_digest=samples_digest((f"{i}.png", "cat") for i in range(SAMPLES)),
    )  # fmt: skip
    (folder / name).write_text(record.model_dump_json())
    rows = [f"{i}.png,cat,{'dog' if i < wrong else 'cat'},0.9,0.1\n" for i in range(SAMPLES)]
    text = "path,target,predicted,confidence,loss\n" + "".join(rows)
    (folder / "predictions.csv").write_text(text)
    return folder / name


def exported(where: Store, name: str, folder: Path, wrong: int, lineage: Lineage) -> str:
    """Upload a bundle of a model; return its version. The champion does not change."""
    evaluated(folder, "metrics.json", wrong)
    (folder / "config.json").write_text(json.dumps({"training": {"epochs": wrong}}))
    (folder / LINEAGE).write_text(json.dumps(lineage.record("d" * 64)))
    (folder / "model.safetensors").write_bytes(bytes(100))
    bundle.seal(folder)
    bundle.upload(folder, name, where)
    return bundle.version(folder)
