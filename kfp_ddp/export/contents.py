"""The files of a bundle, but for its manifest: the model in its formats, and what is told of it."""

import shutil
from pathlib import Path
from typing import Any

from kfp_ddp.export import (
    card,
    describe,
    formats,
    infra,
    prove,
    provenance,
    runtimes,
    serving,
    variants,
)
from kfp_ddp.models import bundle
from kfp_ddp.models import variants as further_forms
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants
from kfp_ddp.training.checkpoint import load_model


def write(
    folder: Path,
    checkpoint: Path,
    split: Path,
    evaluation: Path,
    model_name: str,
    asked: Variants,
    made_of: dict[str, Any],
) -> None:
    """Write all of them into a new folder.

    Args:
        folder: The bundle.
        checkpoint: Its step folder.
        split: `<dataset>/<name>`, whose images the formats are compared on.
        evaluation: `evaluation.json` of the checkpoint on it.
        model_name: The model's.
        asked: Which further forms of the model there shall be.
        made_of: What the bundle is known by.

    Raises:
        KfpDdpError: for input that cannot be used; a `ParityError` if a format does not agree.
    """
    model, info = load_model(checkpoint)
    result = Evaluation.read(evaluation)
    images = prove.real_samples(split, info)
    left_out = formats.write_all(model, info, folder)
    reference, loaded = runtimes.from_checkpoint(checkpoint), runtimes.from_bundle(folder)
    parity = prove.parity(reference, loaded, images)
    source = variants.Source(folder, info, split, evaluation, result)
    record, further = variants.add(source, asked)
    # Loaded from safetensors it is the eager model again.
    timed = {"eager": reference, **loaded, **further}
    del timed[bundle.WEIGHTS]
    signature, config = describe.signature(info), describe.config(info, made_of)
    if left_out:
        parity["left_out"] = signature["left_out"] = left_out
    onnx = folder / formats.ONNX
    if onnx.exists():
        serving.write(folder / "serving", onnx, model_name, info.classes, info.image_size)
    told: dict[str, Any] = {
        "classes.json": list(info.classes),
        "signature.json": signature,
        "config.json": config,
        "parity.json": parity,
        "latency.json": prove.latency(timed, info.image_size),
        provenance.FILE: provenance.record(folder, model_name, result),
    }
    if asked.variants:
        told[further_forms.FILE] = record.model_dump(mode="json")
    for name, content in told.items():
        bundle.write_json(folder / name, content)
    infra.try_out(folder, reference, images, parity["allowed_abs_difference"], model_name)
    shutil.copyfile(evaluation, folder / bundle.METRICS)
    shutil.copyfile(evaluation.parent / result.predictions, folder / result.predictions)
    text = card.readme(model_name, result, signature, parity, record, config)
    (folder / "README.md").write_text(text, encoding="utf-8")
