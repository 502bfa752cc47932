"""The export step: checkpoint and evaluation in, a proven bundle out, on the claim and uploaded."""

import json
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.run_folder import EXPORTED
from kfp_ddp.components.shared import attempts, bundle
from kfp_ddp.components.shared.champion import compared_with, move
from kfp_ddp.components.shared.destination import Destination, open_destination, sha256
from kfp_ddp.components.shared.each_node import at_hand
from kfp_ddp.components.shared.evaluation import Evaluation
from kfp_ddp.components.shared.in_use import using
from kfp_ddp.components.shared.lineage import Lineage
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.shared.workspace import opened
from kfp_ddp.training import mlflow_run
from kfp_ddp.training.manifest import read_manifest

if TYPE_CHECKING:
    from kfp import dsl

_FORMAT = 1  # of the bundle; a new one makes existing bundles be made again
_LARGEST_CONFIG = 16 << 20


@step
def run(
    *,
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    evaluation: str,
    model_name: str,
    destination: str,
    split: str,
    champion: str,
    champion_version: str,
    attempt: str,
    keep: int,
    run_id: str,
    exported_model: "dsl.Model",
    export_summary: "dsl.Markdown",
) -> tuple[str, str]:
    """Make the bundle, upload it and fill the artifacts; its folder, and the uploaded one's URI."""
    started = time.monotonic()
    bundle.check_model_name(model_name)
    target = open_destination(destination) if destination else None
    expected = ""
    if target is not None:
        target.prepare()
        expected = compared_with(champion, champion_version, target, model_name)
    uri = stays = ""
    with (
        opened(run_dir, "export") as task,
        at_hand(dataset_path, task.path) as data,
        using("export", run_dir, data),
    ):
        made_of = (task.here(checkpoint), task.path, data / split, task.file(evaluation))
        folder = make(*made_of, model_name, Lineage(run_id, champion, champion_version))
        found = task.there(folder)
        if target is not None:
            uri, stays = publish(folder, model_name, target, expected, run_id)
            if attempt and not stays:
                _note(f"{target.uri}/{model_name}", attempt, bundle.version(folder), expected, keep)
        _fill(folder, found, uri, stays, model_name, exported_model, export_summary)
    where = f"{found} and {uri}" if uri else found
    print(f"exported {model_name} to {where} in {time.monotonic() - started:.1f} s")
    if stays:
        print(stays)
    return found, uri


def _note(models: str, attempt: str, version: str, champion: str, keep: int) -> None:
    """Note that an attempt came to this bundle, and delete those of old ones."""
    where = open_destination(models)
    attempts.note(where, attempt, version=version, champion=champion, reason="blessed")
    if keep and (gone := attempts.prune(where, keep)):
        print(f"deleted {len(gone)} old bundle(s): {', '.join(gone)}")


def publish(
    folder: Path, name: str, where: Destination, expected: str, run_id: str = ""
) -> tuple[str, str]:
    """Upload a bundle and make it the champion, if that still is what it was compared with.

    Args:
        folder: The bundle.
        name: Of the model.
        where: The destination.
        expected: The version that it was compared with; '' for none.
        run_id: Of the run that exports it.

    Returns:
        The bundle's URI, and why it is not the champion, '' if it is.

    Raises:
        KfpDdpError: it cannot be written, or arrives different.
    """
    uri, version = bundle.upload(folder, name, where), bundle.version(folder)
    found = move(where, name, version, expected, run_id)
    if found == version:
        return uri, ""
    return uri, (
        f"{version} was uploaded, but {expected or 'none'}, which it was compared with, is not the "
        f"champion any more: CHAMPION names {found or 'none'} and stays; run the gate again"
    )


def make(
    checkpoint: Path,
    run_dir: Path,
    samples: Path,
    evaluation: Path,
    model_name: str,
    lineage: Lineage = Lineage(),  # noqa: B008
) -> Path:
    """Make `<run_dir>/bundle`, unless it is there already, intact and of the same ingredients.

    `samples` is the split whose images the formats are compared on, `evaluation` the
    `evaluation.json` of this checkpoint, `model_name` the name in the serving layout, `lineage`
    what else the bundle shall say of where it comes from.

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
    }
    if lineage.run_id:
        ingredients["run_id"] = lineage.run_id
    target = run_dir / bundle.NAME
    if _made_of(target) == bundle.key(ingredients) and bundle.intact(target):
        return target
    # From here on torch is needed, which takes seconds to import.
    from kfp_ddp.components.export import card, describe, formats, prove, runtimes, serving
    from kfp_ddp.training.checkpoint import load_model

    model, info = load_model(checkpoint)
    images = prove.real_samples(samples, info)
    with bundle.replacing(run_dir) as folder:
        left_out = formats.write_all(model, info, folder)
        reference = runtimes.from_checkpoint(checkpoint)
        loaded = runtimes.from_bundle(folder)
        parity = prove.parity(reference, loaded, images)
        # Loaded from safetensors it is the eager model again.
        timed = {"eager": reference, **loaded}
        del timed[bundle.WEIGHTS]
        latency = prove.latency(timed, info.image_size)
        if formats.ONNX not in left_out:
            serving.write(
                folder / "serving", folder / formats.ONNX, model_name, info.classes, info.image_size
            )
        signature = describe.signature(info)
        if left_out:
            parity["left_out"] = signature["left_out"] = left_out
        config = describe.config(info, ingredients, bundle.key(ingredients))
        config["lineage"] = lineage.record(result.dataset_digest)
        bundle.write_json(folder / "classes.json", list(info.classes))
        bundle.write_json(folder / "signature.json", signature)
        bundle.write_json(folder / "config.json", config)
        bundle.write_json(folder / "parity.json", parity)
        bundle.write_json(folder / "latency.json", latency)
        shutil.copyfile(evaluation, folder / "metrics.json")
        shutil.copyfile(evaluation.parent / result.predictions, folder / result.predictions)
        text = card.readme(model_name, result, signature, parity, latency, config)
        (folder / "README.md").write_text(text, encoding="utf-8")
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
        config = json.loads(bundle.read(target, "config.json", _LARGEST_CONFIG))
        return str(config["export"]["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _fill(
    folder: Path,
    place: str,
    uri: str,
    stays: str,
    model_name: str,
    model: "dsl.Model",
    summary: "dsl.Markdown",
) -> None:
    """Fill the artifacts from the bundle alone, so that a reused one says the same."""
    from kfp_ddp.components.export import card

    content: dict[str, Any] = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "parity", "latency", "signature", "classes")
    }
    result = Evaluation.read(folder / "metrics.json")
    digest = bundle.digest(folder)
    weights = {p.name: p.stat().st_size for p in sorted(folder.glob("model.*"))}
    described = {
        "name": model_name,
        "uri": uri or place,
        "digest": digest,
        "checkpoint_digest": result.checkpoint_digest,
        "dataset_digest": result.dataset_digest,
        "run_id": content["config"].get("lineage", {}).get("run_id", ""),
        "champion_version": content["config"].get("lineage", {}).get("champion_version", ""),
        "framework": "PyTorch",
        "architecture": result.model,
        "formats": ", ".join(weights),
        "classes": len(content["classes"]),
        "image_size": result.image_size,
        "accuracy": round(result.accuracy, 6),
        "samples": result.samples,
        "champion": bool(uri) and not stays,
        "champion_stays": stays,
    }
    model.metadata.update(described)
    # The artifact's own object points to the bundle: its URI is KFP's to give.
    Path(model.path).parent.mkdir(parents=True, exist_ok=True)
    Path(model.path).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    (folder.parent / EXPORTED).write_text(json.dumps(described, indent=1) + "\n")
    told = {name: str(described[name]) for name in ("uri", "digest", "champion")}
    mlflow_run.note(folder.parent, {}, {f"kfp_ddp.bundle.{k}": v for k, v in told.items()})
    where = f"{uri or place}, digest {digest}"
    text = card.markdown(model_name, [where, stays], weights, content["parity"], content["latency"])
    Path(summary.path).write_text(text, encoding="utf-8")
