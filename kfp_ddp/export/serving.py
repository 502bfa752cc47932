"""The model repository in a bundle: `serving/<name>/1/model.onnx` and its `config.pbtxt`.

Triton and KServe take `serving/` as the repository, OpenVINO Model Server `serving/<name>`.
"""

from pathlib import Path

from kfp_ddp.export.formats import INPUT, OUTPUT
from kfp_ddp.models.bundle import link

TRITON_BATCH = 64


def write(folder: Path, onnx: Path, name: str, classes: tuple[str, ...], image_size: int) -> None:
    """Write the repository to `folder`; the model is a hard link where the file system has them."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    link(onnx, version / "model.onnx")
    labels = [" ".join(line.split()) for line in classes]  # a line each, whatever a name holds
    (folder / name / "labels.txt").write_text("\n".join(labels) + "\n", encoding="utf-8")
    (folder / name / "config.pbtxt").write_text(config(name, len(classes), image_size))


def config(name: str, classes: int, image_size: int) -> str:
    """Triton's model configuration; the batch dimension is implied by max_batch_size."""
    return f"""name: "{name}"
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
    dims: [ {classes} ]
    label_filename: "labels.txt"
  }}
]
dynamic_batching {{ }}
"""
