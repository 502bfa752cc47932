"""A bundle in words: the model card, and the summary in the KFP UI."""

from collections.abc import Mapping, Sequence
from typing import Any

from kfp_ddp.components.evaluate.report import figures
from kfp_ddp.components.shared.evaluation import Evaluation
from kfp_ddp.components.shared.markdown import cell

_FILES = {
    "model.safetensors": "weights, for `build` and `load_state_dict`; normalisation not included",
    "model.pt2": "`torch.export` program, normalisation included",
    "model.onnx": "ONNX opset 18, IR 8, normalisation included",
    "serving/": "model repository for Triton, KServe and OpenVINO Model Server",
    "classes.json": "class names in the order of the logits",
    "signature.json": "names, shapes and types of input and output, preprocessing",
    "config.json": "configuration of training and export",
    "metrics.json": "the evaluation",
    "predictions.csv": "the evaluation sample by sample, to compare a challenger with",
    "parity.json": "agreement of each format with the checkpoint",
    "latency.json": "milliseconds a call, where the bundle was made",
    "MANIFEST.sha256": "digests of all files: `sha256sum -c MANIFEST.sha256`",
}


def readme(
    name: str,
    result: Evaluation,
    signature: Mapping[str, Any],
    parity: Mapping[str, Any],
    latency: Mapping[str, Any],
) -> str:
    """The model card."""
    size, short = result.image_size, signature["preprocessing"]["short_side"]
    before = signature["preprocessing"]["before"]
    files = "\n".join(f"| `{file}` | {what} |" for file, what in _FILES.items())
    table = "\n".join(figures(result))
    worst = sorted((c for c in result.classes if c.samples), key=lambda c: c.recall)[:3]
    weak = ", ".join(f"{cell(c.name)} ({c.recall:.3f})" for c in worst)
    return f"""# {name}

{result.model} for images of {size} x {size} pixels in {len(result.classes)} classes, trained to
step {result.step} with PyTorch DDP and exported by kfp-ddp.

## Evaluation

On all {result.samples} samples of the split `{result.split}` that can be read, each counted once:

{table}

Lowest recall: {weak}. Nothing is known beyond this split.

## Use

Before the model: {"; ".join(before)}. Normalisation is in the graph.

```python
import json, numpy, onnxruntime
from PIL import Image, ImageOps

classes = json.load(open("classes.json"))
session = onnxruntime.InferenceSession("model.onnx")
image = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGB")
scale = {short} / min(image.size)
image = image.resize([max({short}, round(side * scale)) for side in image.size], 2)  # bilinear
left, top = ((side - {size}) // 2 for side in image.size)
image = image.crop((left, top, left + {size}, top + {size}))
images = numpy.asarray(image, dtype=numpy.uint8).transpose(2, 0, 1)[None]
logits = session.run(["logits"], {{"images": images}})[0]
print(classes[logits[0].argmax()])
```

With torch alone: `torch.export.load("model.pt2").module()(torch.from_numpy(images))`.
With KServe: an InferenceService with `modelFormat.name: onnx`, `protocolVersion: v2` and this
bundle's `serving/` as `storageUri`.

## Files

| file | what |
|---|---|
{files}

{_measured(parity, latency)}
## Where it comes from

| | |
|---|---|
| checkpoint sha256 | `{result.checkpoint_digest}` |
| dataset digest | `{result.dataset_digest or "not recorded"}` |
| samples digest | `{result.samples_digest}` |
"""


def markdown(
    name: str,
    facts: Sequence[str],
    sizes: Mapping[str, int],
    parity: Mapping[str, Any],
    latency: Mapping[str, Any],
) -> str:
    """The summary of the export: what there is to say of it, what is in it, how it compares."""
    said = "\n\n".join(cell(fact) for fact in facts if fact)
    rows = "\n".join(f"| `{file}` | {size / 1e6:.2f} |" for file, size in sorted(sizes.items()))
    return f"""## {name}

{said}

| file | MB |
|---|---|
{rows}

{_measured(parity, latency)}"""


def _measured(parity: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    agree = "\n".join(
        f"| `{name}` | {found['max_abs_difference']:.2g} | {found['same_top1']:.0%} |"
        for name, found in parity["formats"].items()
    )
    fast = "\n".join(
        f"| `{name}` | {found['batch_1']['median_ms']:.3g} | {found['batch_8']['median_ms']:.3g} |"
        for name, found in latency["runtimes"].items()
    )
    return f"""## Parity and latency

Logits against the checkpoint's, on {parity["samples"]} validation samples:

| format | largest difference | same top 1 |
|---|---|---|
{agree}

Milliseconds a call, median, {latency["machine"]}, {latency["threads"]} threads:

| runtime | batch 1 | batch 8 |
|---|---|---|
{fast}
"""
