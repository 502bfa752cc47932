"""Bundles as of export, with weights that cannot be loaded."""

import json
from pathlib import Path
from typing import Any

from kfp import dsl

from kfp_ddp.evaluation.results import samples_digest
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import LINEAGE
from kfp_ddp.models.evaluation import ClassResult
from kfp_ddp.storage.store import Store
from tests.evaluations import Trained, record

SAMPLES = 60


def evaluated(folder: Path, name: str, wrong: int) -> Path:
    """Write an evaluation with its predictions, of which the first `wrong` are wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    result = record(
        SAMPLES - wrong,
        SAMPLES,
        classes=[ClassResult(name="cat", samples=SAMPLES, precision=1, recall=0.9, f1=0.9)],
        predictions="predictions.csv",
        split_digest="e" * 64,
        samples_digest=samples_digest((f"{i}.png", "cat") for i in range(SAMPLES)),
    )
    (folder / name).write_text(result.model_dump_json())
    rows = [f"{i}.png,cat,{'dog' if i < wrong else 'cat'},0.9,0.1\n" for i in range(SAMPLES)]
    text = "path,target,predicted,confidence,loss\n" + "".join(rows)
    (folder / "predictions.csv").write_text(text)
    return folder / name


def arguments(trained: Trained, out: Path) -> dict[str, Any]:
    """Return the inputs of the step `export`, whose artifacts are in a folder."""
    return {
        "checkpoint": str(trained.checkpoint),
        "run_dir": str(trained.run_dir),
        "dataset_path": str(trained.dataset),
        "evaluation": str(trained.evaluation),
        "model_name": "squares",
        "exported_model": dsl.Model(name="model", uri=str(out / "model")),
        "export_summary": dsl.Markdown(name="summary", uri=str(out / "summary")),
    }


def exported(where: Store, name: str, folder: Path, wrong: int, lineage: Lineage) -> str:
    """Upload a bundle of a model; return its version. The champion does not change."""
    evaluated(folder, "metrics.json", wrong)
    (folder / "config.json").write_text(json.dumps({"training": {"epochs": wrong}}))
    (folder / LINEAGE).write_text(json.dumps(lineage.record("d" * 64)))
    (folder / "model.safetensors").write_bytes(bytes(100))
    bundle.seal(folder)
    bundle.upload(folder, name, where)
    return bundle.version(folder)
