"""The files of a bundle except its manifest: formats, descriptions, measurements, model card."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from kfp_ddp.core.files import link_or_copy
from kfp_ddp.export import card, formats, infra, prove, provenance, variants
from kfp_ddp.export.formats import INPUT, MAX_BATCH, OUTPUT
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants
from kfp_ddp.pictures.reading import PADDING
from kfp_ddp.training.data.transforms import short_side
from kfp_ddp.training.spec import model_file
from kfp_ddp.training.state.checkpoint import ModelInfo, load_model

_PACKAGES = ("kfp-ddp", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "safetensors")
TRITON_BATCH = 64


def write(
    folder: Path,
    checkpoint: Path,
    split: Path,
    evaluation: Path,
    model_name: str,
    requested: Variants,
    export: Mapping[str, Any],
) -> None:
    """Write all of them into a new folder, as of `engine.make`; `export` describes the inputs."""
    model, info = load_model(checkpoint)
    result = Evaluation.read(evaluation)
    images = prove.real_samples(split, info)
    left_out = formats.write_all(model, info, folder)
    reference = formats.from_checkpoint(checkpoint)
    loaded = formats.from_bundle(folder)
    parity = prove.parity(reference, loaded, images)
    source = variants.VariantSource(folder, info, split, evaluation, result)
    record, further = variants.add(source, requested)
    # Loaded from safetensors it is the eager model again.
    timed = {"eager": reference, **loaded, **further}
    del timed[bundle.WEIGHTS]
    signature = describe_signature(info)
    config = describe_config(info, export)
    if left_out:
        parity["left_out"] = signature["left_out"] = left_out
    onnx = folder / bundle.ONNX
    allowed = parity["allowed_abs_difference"]
    if onnx.exists():
        write_repository(folder / "serving", onnx, model_name, info.classes, info.image_size)
        image = infra.pattern(info.image_size)
        logits = reference(torch.from_numpy(image)[None])[0].numpy()
        infra.write_sample(folder, image, logits, model_name, allowed)
    documents: dict[str, Any] = {
        bundle.CLASSES: list(info.classes),
        bundle.INTERFACE: signature,
        bundle.CONFIG: config,
        bundle.PARITY: parity,
        bundle.LATENCY: prove.latency(timed, info.image_size),
        bundle.PROVENANCE: provenance.record(folder, model_name, result),
        bundle.INFRA: infra.validate(folder, images.numpy(), reference(images).numpy(), allowed),
    }
    if requested.variants:
        documents[bundle.VARIANTS] = record.model_dump(mode="json")
    for name, content in documents.items():
        bundle.write_json(folder / name, content)
    shutil.copyfile(evaluation, folder / bundle.METRICS)
    shutil.copyfile(evaluation.parent / result.predictions, folder / result.predictions)
    with suppress(FileNotFoundError):  # an evaluation that others made
        shutil.copyfile(evaluation.parent / bundle.REFERENCE, folder / bundle.REFERENCE)
    text = card.readme(model_name, result, signature, parity, record, config)
    (folder / "README.md").write_text(text, encoding="utf-8")


def describe_signature(info: ModelInfo) -> dict[str, Any]:
    """Return input and output of the graphs, preprocessing and postprocessing."""
    size = info.image_size
    fit = info.reading.fit
    short = short_side(size, info.reading.crop) if fit == "crop" else size
    fitting = {
        "crop": (
            f"resize the shorter side to {short}, bilinear with antialiasing",
            f"crop the centre, {size} x {size}",
        ),
        "pad": (
            f"resize the longer side to {size}, bilinear with antialiasing",
            f"centre it on {size} x {size} of the colour {PADDING}",
        ),
        "squash": (f"resize to {size} x {size}, bilinear with antialiasing",),
    }
    background = info.reading.background
    over = f", transparent parts over {background}" if background else ", without alpha"
    values = info.reading.value_range
    over += f", values of more than 8 bits or fractions from {values}" if values else ""
    return {
        "inputs": [
            {
                "name": INPUT,
                "dtype": "uint8",
                "shape": ["batch", 3, size, size],
                "layout": "NCHW",
                "channels": "RGB",
                "range": [0, 255],
            }
        ],
        "outputs": [{"name": OUTPUT, "dtype": "float32", "shape": ["batch", len(info.classes)]}],
        "dynamic": {"batch": {"min": 1, "max": MAX_BATCH}},
        "preprocessing": {
            "before": [
                f"decode to RGB, rotated by EXIF data{over}",
                *fitting[fit],
            ],
            "short_side": short,
            "background": background,
            "value_range": values,
            "fit": fit,
            "max_pixels": info.reading.max_pixels,
            "in_graph": {"scale": 1 / 255, "mean": list(info.mean), "std": list(info.std)},
        },
        "postprocessing": "softmax over the logits; their order is that of classes.json",
    }


def describe_config(info: ModelInfo, export: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the model was trained and exported."""
    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version_of(name)
    code = {"model_sha256": model_file.digest(info.model_code)} if info.model_code else {}
    return {
        "model": info.model,
        **code,
        "image_size": info.image_size,
        "classes": len(info.classes),
        "step": info.step,
        "training": info.config,
        "export": {**export, "versions": versions},
    }


def write_repository(
    folder: Path, onnx: Path, name: str, classes: tuple[str, ...], image_size: int
) -> None:
    """Write the model repository to `folder`; the model is a hard link if possible."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    link_or_copy(onnx, version / bundle.ONNX)
    labels = [" ".join(line.split()) for line in classes]  # names may have line feeds
    (folder / name / "labels.txt").write_text("\n".join(labels) + "\n", encoding="utf-8")
    # For Triton; max_batch_size implies the batch dimension.
    (folder / name / "config.pbtxt").write_text(f"""name: "{name}"
backend: "onnxruntime"
max_batch_size: {TRITON_BATCH}
input [
  {{
    name: "{INPUT}"
    data_type: TYPE_UINT8
    dims: [ 3, {image_size}, {image_size} ]
  }}
]
output [
  {{
    name: "{OUTPUT}"
    data_type: TYPE_FP32
    dims: [ {len(classes)} ]
    label_filename: "labels.txt"
  }}
]
dynamic_batching {{ }}
""")
