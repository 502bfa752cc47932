"""A bundle in words: the model card, and the summary in the KFP UI."""

from collections.abc import Mapping, Sequence
from typing import Any

from kfp_ddp.core.text import cell
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.variants import FILE, FILES, Record
from kfp_ddp.report.summary import figures

_FILES = {
    "model.safetensors": "weights, for `build` and `load_state_dict`; normalisation not included",
    "model.pt2": "`torch.export` program, normalisation included",
    "model.onnx": "ONNX opset 18, IR 8, normalisation included",
    "model.fp16.onnx": "the same in float16",
    "model.int8.onnx": "the same in int8",
    "model.resize.onnx": "the same for whole images: resizing and cutting included",
    "serving/": "model repository for Triton, KServe and OpenVINO Model Server",
    "network.py": "the file that `build`s the network; it is in `model.safetensors` too",
    "classes.json": "class names in the order of the logits",
    "signature.json": "names, shapes and types of input and output, preprocessing",
    "config.json": "configuration of training and export",
    "metrics.json": "the evaluation",
    "predictions.csv": "the evaluation sample by sample, to compare a challenger with",
    "parity.json": "agreement of each format with the checkpoint",
    "variants.json": "the further forms of the model on the whole split, and those left out",
    "provenance.json": "checkpoint, data, code, image and packages, in the form of CycloneDX",
    "latency.json": "milliseconds a call, where the bundle was made",
    "infra.json": "each ONNX file in a process with its runtime alone: answers, time, memory",
    "sample/": "a v2 request, and what a server of this bundle answers",
    "MANIFEST.sha256": "digests of all files: `sha256sum -c MANIFEST.sha256`",
}
_ONNX = "model.onnx"
_ONNX_LOAD = """import json, numpy, onnxruntime
from PIL import Image, ImageOps

classes = json.load(open("classes.json"))
session = onnxruntime.InferenceSession("model.onnx")"""
_ONNX_CALL = 'logits = session.run(["logits"], {"images": images})[0]'
_TORCH_LOAD = """import json, numpy, torch
from PIL import Image, ImageOps

classes = json.load(open("classes.json"))
model = torch.export.load("model.pt2").module()"""
_TORCH_ALONE = (
    'With torch alone: `torch.export.load("model.pt2").module()(torch.from_numpy(images))`.'
)
_KSERVE = """\
Behind HTTP: `kfp-ddp serve` with this folder, and `curl -d @sample/request.json` to it. With
KServe: an InferenceService, which `kfp-ddp serve ADDRESS --manifest kserve-tritonserver` prints."""
_TORCH_CALL = "logits = model(torch.from_numpy(images)).detach().numpy()"


def readme(
    name: str,
    result: Evaluation,
    signature: Mapping[str, Any],
    parity: Mapping[str, Any],
    record: Record,
    config: Mapping[str, Any],
) -> str:
    """The model card, without times: of the same ingredients it is the same."""
    left_out = parity.get("left_out", {})
    own = config.get("model_sha256", "")
    size, short = result.image_size, signature["preprocessing"]["short_side"]
    before = signature["preprocessing"]["before"]
    without = {*left_out, *(["serving/", "sample/"] if _ONNX in left_out else [])}
    without |= set() if own else {"network.py"}
    without |= set(FILES.values()) - {one.file for one in record.variants}
    without |= set() if record.asked else {FILE}
    files = "\n".join(f"| `{f}` | {what} |" for f, what in _FILES.items() if f not in without)
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
{_TORCH_LOAD if _ONNX in left_out else _ONNX_LOAD}
image = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGB")
scale = {short} / min(image.size)
image = image.resize([max({short}, round(side * scale)) for side in image.size], 2)  # bilinear
left, top = ((side - {size}) // 2 for side in image.size)
image = image.crop((left, top, left + {size}, top + {size}))
images = numpy.asarray(image, dtype=numpy.uint8).transpose(2, 0, 1)[None]
{_TORCH_CALL if _ONNX in left_out else _ONNX_CALL}
print(classes[logits[0].argmax()])
```

{_other_ways(left_out)}

## Files

| file | what |
|---|---|
{files}

{_agreement(parity, record)}
## Where it comes from

| | |
|---|---|
| checkpoint sha256 | `{result.checkpoint_digest}` |
| dataset digest | `{result.dataset_digest or "not recorded"}` |
| samples digest | `{result.samples_digest}` |
{f"| network.py sha256 | `{own}` |" if own else ""}"""


def markdown(
    name: str,
    facts: Sequence[str],
    sizes: Mapping[str, int],
    parity: Mapping[str, Any],
    latency: Mapping[str, Any],
    record: Record,
) -> str:
    """The summary of the export: what there is to say of it, what is in it, how it compares."""
    said = "\n\n".join(cell(fact) for fact in facts if fact)
    rows = "\n".join(f"| `{file}` | {size / 1e6:.2f} |" for file, size in sorted(sizes.items()))
    return f"""## {name}

{said}

| file | MB |
|---|---|
{rows}

{_agreement(parity, record)}
{_speed(latency)}"""


def _other_ways(left_out: Mapping[str, str]) -> str:
    """How else the model is used."""
    ways = {"model.pt2": _TORCH_ALONE, _ONNX: _KSERVE}
    return "\n".join(way for needed, way in ways.items() if needed not in left_out)


def _agreement(parity: Mapping[str, Any], record: Record) -> str:
    agree = "\n".join(
        f"| `{name}` | {found['max_abs_difference']:.2g} | {found['same_top1']:.0%} |"
        for name, found in parity["formats"].items()
    )
    missing = "".join(
        f"\n\n`{name}` is left out, as the model cannot be written in it: {cell(why)}"
        for name, why in parity.get("left_out", {}).items()
    )
    return f"""## Parity

Logits against the checkpoint's, on {parity["samples"]} validation samples:

| format | largest difference | same top 1 |
|---|---|---|
{agree}{missing}
{_further(record)}"""


def _further(record: Record) -> str:
    """The further forms, on all samples; nothing where none was asked for."""
    if not record.asked:
        return ""
    rows = "".join(
        f"| `{one.file}` | {one.size / 1e6:.2f} | {one.evaluation.accuracy:.4f} | {one.gain:+.4f} "
        f"({one.low:+.4f} to {one.high:+.4f}) | {one.agreement:.2%} |\n"
        for one in record.variants
    )
    head = (
        "| form | MB | accuracy | against the model (95 %) | same class |\n|---|---|---|---|---|\n"
    )
    missing = "".join(
        f"`{name}` is left out: {cell(why)}\n\n" for name, why in record.left_out.items()
    )
    samples = record.variants[0].evaluation.samples if rows else 0
    table = f"On all {samples} samples:\n\n{head}{rows}\n" if rows else ""
    return f"\n## Further forms\n\n{table}{missing}"


def _speed(latency: Mapping[str, Any]) -> str:
    fast = "\n".join(
        f"| `{name}` | {found['batch_1']['median_ms']:.3g} | {found['batch_8']['median_ms']:.3g} |"
        for name, found in latency["runtimes"].items()
    )
    return f"""## Latency

Milliseconds a call, median, {latency["machine"]}, {latency["threads"]} threads:

| runtime | batch 1 | batch 8 |
|---|---|---|
{fast}
"""
