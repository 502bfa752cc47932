"""Artifacts of a finished training: Model, Metrics and the picture of its curves."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.core.step import write_artifact
from kfp_ddp.report import training_page
from kfp_ddp.runs.record import chosen_checkpoint
from kfp_ddp.training.report.metrics import read_events
from kfp_ddp.training.state.manifest import Manifest


def write_outputs(
    run_dir: Path,
    place: str,
    claim: str,
    record: Mapping[str, Any],
    trained_model: Any,
    metrics: Any,
    loss_curve: Any,
) -> Manifest:
    """Write the step's artifacts; the file of `trained_model` is a JSON pointer to the checkpoint.

    It also has the settings, and the file of `metrics` is a copy of `metrics.jsonl`, so that runs
    can be compared by their artifacts. The first four are those of a `Finished` training. JobError
    if it left no checkpoint.
    """
    newest = chosen_checkpoint(run_dir)
    if newest is None:
        raise JobError(
            f"training ended without a checkpoint in {RunFolder(run_dir).checkpoints}; "
            "see the log of the ranks above"
        )
    figures = _figures(run_dir, newest)
    pointer = {
        "path": f"{place}/{newest.path.relative_to(run_dir).as_posix()}",
        "digest": f"sha256:{newest.digest}",
        "step": newest.step,
        "model": newest.fields.get("model", ""),
        "claim": claim,
        "metrics": figures,
    }
    for name, value in figures.items():
        metrics.log_metric(name, value)
    trained_model.metadata.update(pointer, kfp_ddp=record["kfp_ddp"])
    settings = mapping_of(RunFolder(run_dir).config)
    write_artifact(trained_model, json.dumps({**pointer, "settings": settings}, indent=2) + "\n")
    write_artifact(metrics, RunFolder(run_dir).metrics.read_text(encoding="utf-8"))
    write_artifact(loss_curve, training_page(run_dir))
    return newest


def _figures(run_dir: Path, newest: Manifest) -> dict[str, float]:
    """Return the finite metrics: last loss, speed, accuracy and step of the checkpoint."""
    events = read_events(RunFolder(run_dir).metrics)
    last: dict[str, dict[str, Any]] = {"step": {}, "eval": {}}
    last.update({str(event.get("event")): event for event in events})
    own = [e for e in events if (e.get("event"), e.get("step")) == ("eval", newest.step)]
    last["eval"] = own[-1] if own else last["eval"]  # a resume may have repeated it
    figures = {
        "step": newest.step,
        "train_loss": last["step"].get("loss"),
        "images_per_s": last["step"].get("images_per_s"),
        "val_loss": last["eval"].get("loss"),
        "val_accuracy": last["eval"].get("accuracy"),
        "val_top5": last["eval"].get("top5"),
    }
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
