"""Bundles as of export, with weights that cannot be loaded."""

import json
from pathlib import Path
from typing import Any

from kfp import dsl

from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import LINEAGE, Bundle
from kfp_ddp.storage.store import Store
from tests.evaluations import Trained, written


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
    written(folder, wrong, "metrics.json", 60)
    config = {"training": {"epochs": wrong}, "export": {"made_of": {"model_name": name}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / LINEAGE).write_text(json.dumps(lineage.record("d" * 64)))
    (folder / "model.safetensors").write_bytes(bytes(100))
    bundle.seal(folder)
    bundle.upload(folder, name, where)
    return bundle.version(folder)


def sealed(folder: Path, documents: dict[str, Any]) -> Bundle:
    """Return a bundle of JSON documents, each given as text or as its content."""
    (folder / "sample").mkdir(parents=True, exist_ok=True)
    for name, content in documents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    for name in (bundle.MANIFEST, bundle.SUCCESS):
        (folder / name).unlink(missing_ok=True)
    bundle.seal(folder)
    return bundle.local_bundle(folder)
