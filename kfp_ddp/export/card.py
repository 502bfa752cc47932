"""The description of a bundle: metadata of the artifact, model card, and summary in the KFP UI."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.text import cell
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.variants import FILES, VariantsRecord
from kfp_ddp.report.summary import figures

if TYPE_CHECKING:
    from kfp import dsl

_FILES = {
    bundle.WEIGHTS: "weights, for `build` and `load_state_dict`; normalisation not included",
    bundle.PROGRAM: "`torch.export` program, normalisation included",
    bundle.ONNX: "ONNX opset 18, IR 8, normalisation included",
    "model.fp16.onnx": "the same in float16",
    "model.int8.onnx": "the same in int8",
    "model.resize.onnx": "the same for images of any size, resizing and cropping included",
    "serving/": "model repository for Triton, KServe and OpenVINO Model Server",
    bundle.CODE: "the file that `build`s the network; it is in `model.safetensors` too",
    bundle.CLASSES: "class names in the order of the logits",
    bundle.INTERFACE: "names, shapes and types of input and output, preprocessing",
    bundle.CONFIG: "configuration of training and export",
    bundle.METRICS: "the evaluation",
    "predictions.csv": "the prediction for each sample, to compare a challenger with",
    bundle.REFERENCE: "what the network computes for a sample of the images, to compare others",
    bundle.PARITY: "agreement of each format with the checkpoint",
    bundle.VARIANTS: "the further forms, evaluated on the complete split, and those left out",
    bundle.PROVENANCE: "checkpoint, data, code, image and packages, as a CycloneDX document",
    bundle.LATENCY: "milliseconds per call on the exporting machine",
    bundle.INFRA: "each ONNX file in a process with its runtime only: results, time, memory",
    "sample/": "a v2 request, and the expected response",
    bundle.MANIFEST: "digests of all files: `sha256sum -c MANIFEST.sha256`",
}
_ONNX_LOAD = """import json, numpy, onnxruntime
from PIL import Image, ImageOps

classes = json.load(open("classes.json"))
session = onnxruntime.InferenceSession("model.onnx")"""
_ONNX_CALL = 'logits = session.run(["logits"], {"images": images})[0]'
_TORCH_LOAD = """import json, numpy, torch
from PIL import Image, ImageOps

classes = json.load(open("classes.json"))
model = torch.export.load("model.pt2").module()"""
_OVER = """\
image = Image.alpha_composite(Image.new("RGBA", image.size, "{}"), image).convert("RGB")
"""
_TORCH_ALONE = (
    'With torch alone: `torch.export.load("model.pt2").module()(torch.from_numpy(images))`.'
)
_KSERVE = """\
Over HTTP: `kfp-ddp serve` with this folder, and `curl -d @sample/request.json` to it. With
KServe: an InferenceService, which `kfp-ddp serve ADDRESS --manifest kserve-tritonserver` prints."""
_TORCH_CALL = "logits = model(torch.from_numpy(images)).detach().numpy()"


def metadata(folder: Path, name: str, uri: str) -> dict[str, Any]:
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


def fill(model: "dsl.Model", facts: Mapping[str, Any]) -> None:
    """Fill the artifact of a bundle; its file has the metadata, as KFP sets its URI."""
    model.metadata.update(facts)
    Path(model.path).parent.mkdir(parents=True, exist_ok=True)
    Path(model.path).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


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
    size, short = result.image_size, signature["preprocessing"]["short_side"]
    before, over = (signature["preprocessing"][name] for name in ("before", "background"))
    missing = {*left_out, *(["serving/", "sample/"] if bundle.ONNX in left_out else [])}
    missing |= set() if code_digest else {bundle.CODE}
    missing |= set(FILES.values()) - {one.file for one in record.variants}
    missing |= set() if record.requested else {bundle.VARIANTS}
    files = "\n".join(f"| `{f}` | {text} |" for f, text in _FILES.items() if f not in missing)
    table = "\n".join(figures(result))
    worst = sorted((c for c in result.classes if c.samples), key=lambda c: c.recall)[:3]
    weak = ", ".join(f"{cell(c.name)} ({c.recall:.3f})" for c in worst)
    ways = {bundle.PROGRAM: _TORCH_ALONE, bundle.ONNX: _KSERVE}
    other_ways = "\n".join(way for file, way in ways.items() if file not in left_out)
    return f"""# {name}

{result.model} for images of {size} x {size} pixels in {len(result.classes)} classes, trained to
step {result.step} with PyTorch DDP and exported by kfp-ddp.

## Evaluation

On all {result.samples} readable samples of the split `{result.split}`, each counted once:

{table}

Lowest recall: {weak}. Other data were not evaluated.

## Use

Before the model: {"; ".join(before)}. Normalisation is in the graph.

```python
{_TORCH_LOAD if bundle.ONNX in left_out else _ONNX_LOAD}
image = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("{"RGBA" if over else "RGB"}")
{_OVER.format(over) if over else ""}\
scale = {short} / min(image.size)
image = image.resize([max({short}, round(side * scale)) for side in image.size], 2)  # bilinear
left, top = ((side - {size}) // 2 for side in image.size)
image = image.crop((left, top, left + {size}, top + {size}))
images = numpy.asarray(image, dtype=numpy.uint8).transpose(2, 0, 1)[None]
{_TORCH_CALL if bundle.ONNX in left_out else _ONNX_CALL}
print(classes[logits[0].argmax()])
```

{other_ways}

## Files

{_table("file | content", files)}

{_agreement(parity, record)}
## Provenance

| | |
|---|---|
| checkpoint sha256 | `{result.checkpoint_digest}` |
| dataset digest | `{result.dataset_digest or "not recorded"}` |
| samples digest | `{result.samples_digest}` |
{f"| network.py sha256 | `{code_digest}` |" if code_digest else ""}"""


def markdown(
    name: str,
    fact: str,
    sizes: Mapping[str, int],
    parity: Mapping[str, Any],
    latency: Mapping[str, Any],
    record: VariantsRecord,
) -> str:
    """Return the summary of the export: a fact, sizes in bytes, agreement and latency."""
    rows = "\n".join(f"| `{file}` | {size / 1e6:.2f} |" for file, size in sorted(sizes.items()))
    times = "\n".join(
        f"| `{runtime}` | {one['batch_1']['median_ms']:.3g} | {one['batch_8']['median_ms']:.3g} |"
        for runtime, one in latency["runtimes"].items()
    )
    return f"""## {name}

{cell(fact)}

{_table("file | MB", rows)}

{_agreement(parity, record)}
## Latency

Milliseconds per call, median, {latency["machine"]}, {latency["threads"]} threads:

{_table("runtime | batch 1 | batch 8", times)}
"""


def _table(head: str, rows: str) -> str:
    return f"| {head} |\n|{'---|' * (head.count('|') + 1)}\n{rows}"


def _agreement(parity: Mapping[str, Any], record: VariantsRecord) -> str:
    rows = "\n".join(
        f"| `{name}` | {one['max_abs_difference']:.2g} | {one['same_top1']:.0%} |"
        for name, one in parity["formats"].items()
    )
    left_out = "".join(
        f"\n\n`{name}` is left out, as the model cannot be written in it: {cell(why)}"
        for name, why in parity.get("left_out", {}).items()
    )
    return f"""## Parity

Logits compared with those of the checkpoint, on {parity["samples"]} validation samples:

{_table("format | largest difference | same top 1", rows)}{left_out}
{_further_forms(record) if record.requested else ""}"""


def _further_forms(record: VariantsRecord) -> str:
    rows = "".join(
        f"| `{one.file}` | {one.size / 1e6:.2f} | {one.evaluation.accuracy:.4f} | {one.gain:+.4f} "
        f"({one.low:+.4f} to {one.high:+.4f}) | {one.agreement:.2%} |\n"
        for one in record.variants
    )
    left_out = "".join(
        f"`{name}` is left out: {cell(why)}\n\n" for name, why in record.left_out.items()
    )
    head = "form | MB | accuracy | difference to the model (95 %) | same class"
    samples = record.variants[0].evaluation.samples if rows else 0
    table = f"On all {samples} samples:\n\n{_table(head, rows)}\n" if rows else ""
    return f"\n## Further forms\n\n{table}{left_out}"
