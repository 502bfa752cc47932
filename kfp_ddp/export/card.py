"""The description of a bundle: metadata of the artifact, model card, and summary in the KFP UI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core.outputs import ModelFacts
from kfp_ddp.core.text import cell
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.variants import FILES, VariantsRecord
from kfp_ddp.pictures.reading import PADDING
from kfp_ddp.report.render import render_text
from kfp_ddp.report.summary import figures

_FILES = {
    bundle.WEIGHTS: "weights, for `build` and `load_state_dict`; normalisation not included",
    bundle.PROGRAM: "`torch.export` program, normalisation included",
    bundle.ONNX: "ONNX opset 18, IR 8, normalisation included",
    "model.fp16.onnx": "the same in float16",
    "model.int8.onnx": "the same in int8",
    "serving/": "model repository for Triton, KServe and OpenVINO Model Server",
    bundle.CODE: "the file that `build`s the network; it is in `model.safetensors` too",
    bundle.CLASSES: "class names in the order of the logits",
    bundle.INTERFACE: "names, shapes and types of input and output, preprocessing",
    bundle.CONFIG: "configuration of training and export",
    bundle.METRICS: "the evaluation",
    "predictions.csv": "the prediction for each sample, to compare a challenger with",
    bundle.REFERENCE: "confidence and energy of a sample of the images, to compare others",
    bundle.PARITY: "agreement of each format with the checkpoint",
    bundle.VARIANTS: "the further forms, evaluated on the complete split, and those left out",
    bundle.PROVENANCE: "checkpoint, data, code, image and packages, as a CycloneDX document",
    bundle.LATENCY: "milliseconds per call on the exporting machine",
    bundle.INFRA: "each ONNX file in a process with its runtime only: results, time, memory",
    "sample/": "a v2 request, and the expected response",
    bundle.MANIFEST: "digests of all files: `sha256sum -c MANIFEST.sha256`",
}
_SHOWN = ("before", "background", "short_side", "fit")
"""Parts of the preprocessing that the example repeats."""


def metadata(folder: Path, name: str, uri: str) -> ModelFacts:
    """Return the metadata of the artifact of a bundle."""
    result = Evaluation.read(folder / bundle.METRICS)
    models = sorted(path.name for path in folder.glob("model.*"))
    return {
        "name": name,
        "uri": uri,
        "digest": bundle.local_bundle(folder).digest,
        "checkpoint_digest": result.checkpoint_digest,
        "dataset_digest": result.dataset_digest,
        "framework": "PyTorch",
        "architecture": result.model,
        "formats": ", ".join(file for file in models if file != bundle.SIGNATURE),
        "classes": len(result.classes),
        "image_size": result.image_size,
        "accuracy": round(result.accuracy, 6),
        "samples": result.samples,
    }


def readme(
    name: str,
    result: Evaluation,
    signature: Mapping[str, Any],
    parity: Mapping[str, Any],
    record: VariantsRecord,
    config: Mapping[str, Any],
) -> str:
    """Return the model card, without times, so that the same inputs give the same text."""
    left_out = parity.get("left_out", {})
    code_digest = config.get("model_sha256", "")
    missing = set(left_out)
    if bundle.ONNX in left_out:
        missing |= {"serving/", "sample/"}
    if not code_digest:
        missing.add(bundle.CODE)
    missing |= set(FILES.values()) - {form.file for form in record.variants}
    if not record.requested:
        missing.add(bundle.VARIANTS)
    with_samples = [row for row in result.classes if row.samples]
    worst = sorted(with_samples, key=lambda c: c.recall)[:3]
    return render_text(
        "model_card.md.jinja",
        name=name,
        result=result,
        size=result.image_size,
        padding=PADDING,
        **{key: signature["preprocessing"][key] for key in _SHOWN},
        figures=figures(result),
        weak=", ".join(f"{cell(row.name)} ({row.recall:.3f})" for row in worst),
        files=[(file, text) for file, text in _FILES.items() if file not in missing],
        code_digest=code_digest,
        **_forms(parity, record),
    )


def markdown(
    name: str,
    fact: str,
    sizes: Mapping[str, int],
    parity: Mapping[str, Any],
    latency: Mapping[str, Any],
    record: VariantsRecord,
) -> str:
    """Return the summary of the export: a fact, sizes in bytes, agreement and latency."""
    about = {"name": name, "fact": fact, "sizes": sorted(sizes.items()), "latency": latency}
    return render_text("export.md.jinja", **about, **_forms(parity, record))


def _forms(parity: Mapping[str, Any], record: VariantsRecord) -> dict[str, Any]:
    return {"parity": parity, "left_out": parity.get("left_out", {}), "record": record}
