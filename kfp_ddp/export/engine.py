"""The export step: checkpoint and evaluation in, a proven bundle out."""

import json
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.core.step import step
from kfp_ddp.datasets.access import local_dataset, using
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants, part_of
from kfp_ddp.models.variants import Record
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.storage.store import sha256
from kfp_ddp.training.manifest import read_manifest

if TYPE_CHECKING:
    from kfp import dsl

_FORMAT = 2  # of the bundle; a new one makes existing bundles be made again


@step
def run(
    *,
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    evaluation: str,
    model_name: str,
    split: str,
    release: Mapping[str, Any],
    exported_model: "dsl.Model",
    export_summary: "dsl.Markdown",
) -> str:
    """Make the bundle and fill the artifacts; its folder."""
    started = time.monotonic()
    bundle.check_model_name(model_name)
    asked = part_of(release, Variants)
    with (
        open_workspace(run_dir, "export") as task,
        local_dataset(dataset_path, task.path) as data,
        using("export", run_dir, data),
    ):
        task.download_below(f"{bundle.NAME}/")
        made_of = (
            task.download(checkpoint),
            task.path,
            data / split,
            task.download_file(evaluation),
        )
        folder = make(*made_of, model_name, asked)
        found = task.to_uri(folder)
        _fill(folder, found, model_name, exported_model, export_summary)
    print(f"exported {model_name} to {found} in {time.monotonic() - started:.1f} s")
    return found


def make(
    checkpoint: Path,
    run_dir: Path,
    samples: Path,
    evaluation: Path,
    model_name: str,
    asked: Variants = Variants(),  # noqa: B008
) -> Path:
    """Make `<run_dir>/bundle`, unless it is there already, intact and of the same ingredients.

    `samples` is the split whose images the formats are compared on, `evaluation` the
    `evaluation.json` of this checkpoint, `model_name` the name in the serving layout, `asked` which
    further forms of the model there shall be.

    Raises:
        KfpDdpError: for input that cannot be used; a `ParityError` if a format does not agree.
    """
    result = _evaluation_of(evaluation, checkpoint)
    ingredients: dict[str, Any] = {
        "format": _FORMAT,
        "checkpoint": result.checkpoint_digest,
        "evaluation": sha256(evaluation),
        "model_name": model_name,
        "torch": version("torch"),
        **asked.given(),
    }
    target = run_dir / bundle.NAME
    if _made_of(target) == bundle.key(ingredients) and bundle.intact(target):
        return target
    # From here on torch is needed, which takes seconds to import.
    from kfp_ddp.export import contents

    with bundle.replacing(run_dir) as folder:
        contents.write(folder, checkpoint, samples, evaluation, model_name, asked, ingredients)
    return target


def _evaluation_of(evaluation: Path, checkpoint: Path) -> Evaluation:
    """The evaluation, if it is whole and of this checkpoint."""
    if not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: give the step folder that train returned"
        )
    result = Evaluation.read(evaluation)
    if not (evaluation.parent / result.predictions).is_file():
        raise InputError(
            f"there is no {evaluation.parent / result.predictions}: it belongs to the evaluation, "
            "run evaluate again"
        )
    try:
        digest = read_manifest(checkpoint).digest
    except (OSError, ValueError) as error:
        raise InputError(
            f"{checkpoint} is not a complete checkpoint: {error}; use another or train again"
        ) from None
    if digest != result.checkpoint_digest:
        raise InputError(
            f"{evaluation} is of another checkpoint ({result.checkpoint_digest[:12]}) than "
            f"{checkpoint} ({digest[:12]}): evaluate this one first"
        )
    return result


def _made_of(target: Path) -> str:
    """The key of what an existing bundle was made from, '' if there is none."""
    try:
        config = json.loads(read_below(target, "config.json", bundle.LARGEST_CONFIG))
        return str(config["export"]["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _fill(
    folder: Path,
    place: str,
    model_name: str,
    model: "dsl.Model",
    summary: "dsl.Markdown",
) -> None:
    """Fill the artifacts from the bundle alone, so that a reused one says the same."""
    from kfp_ddp.export import card

    content: dict[str, Any] = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "parity", "latency", "signature", "classes")
    }
    result = Evaluation.read(folder / bundle.METRICS)
    digest = bundle.digest(folder)
    weights = {p.name: p.stat().st_size for p in sorted(folder.glob("model.*"))}
    described = {
        "name": model_name,
        "uri": place,
        "digest": digest,
        "checkpoint_digest": result.checkpoint_digest,
        "dataset_digest": result.dataset_digest,
        "framework": "PyTorch",
        "architecture": result.model,
        "formats": ", ".join(weights),
        "classes": len(content["classes"]),
        "image_size": result.image_size,
        "accuracy": round(result.accuracy, 6),
        "samples": result.samples,
    }
    model.metadata.update(described)
    # The artifact's own object points to the bundle: its URI is KFP's to give.
    Path(model.path).parent.mkdir(parents=True, exist_ok=True)
    Path(model.path).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    where = f"{place}, digest {digest}"
    measured = (content["parity"], content["latency"], Record.read(folder))
    text = card.markdown(model_name, [where], weights, *measured)
    Path(summary.path).write_text(text, encoding="utf-8")
