"""The model repository of a bundle, and the graph that resizes and crops whole images.

Rules of Triton: `<name>/config.pbtxt`, `<name>/<number>/model.onnx`, the name of the folder in the
configuration, and dims without the batch. Of OpenVINO Model Server: numbers, with a model in each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from kfp_ddp.export import contents, formats, onnx_forms
from kfp_ddp.export.formats import INPUT, OUTPUT
from kfp_ddp.training import transforms
from tests import triton

CLASSES = ("daisy", "two\nlines", "Löwen zahn")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Own", [INPUT], [OUTPUT], domain="ours")],
        "model",
        [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", len(CLASSES)])],
    )
    made = tmp_path / "model.onnx"
    made.write_bytes(helper.make_model(graph).SerializeToString())
    contents.write_repository(tmp_path / "serving", made, "flowers", CLASSES, 16)
    return tmp_path / "serving"


def test_files_are_in_the_layout_of_the_servers(repository: Path) -> None:
    files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*.*"))
    assert files == ["flowers/1/model.onnx", "flowers/config.pbtxt", "flowers/labels.txt"]
    labels = (repository / "flowers" / "labels.txt").read_text().splitlines()
    assert labels == ["daisy", "two lines", "Löwen zahn"]


def test_the_configuration_fits_the_model(repository: Path, tmp_path: Path) -> None:
    config = triton.parsed((repository / "flowers" / "config.pbtxt").read_text(), tmp_path)
    graph = onnx.load(repository / "flowers" / "1" / "model.onnx").graph
    types: dict[int, int] = {TensorProto.UINT8: 2, TensorProto.FLOAT: 11}  # of its enum DataType
    assert config.backend == "onnxruntime"
    assert config.HasField("dynamic_batching")
    assert config.max_batch_size > 1
    for configured, values in ((config.input, graph.input), (config.output, graph.output)):
        (one,), (tensor,) = configured, values
        shape: Any = tensor.type.tensor_type.shape.dim
        assert one.name == tensor.name
        assert one.data_type == types[tensor.type.tensor_type.elem_type]
        assert shape[0].dim_param, "a batch of any size"
        assert list(one.dims) == [dim.dim_value for dim in shape[1:]]
    assert config.output[0].label_filename == "labels.txt"


def session(folder: Path, size: int) -> Callable[[Any], Any]:
    """Return the form of a model that returns its pixels."""
    value = helper.make_tensor_value_info
    shape: list[str | int | None] = ["batch", 3, size, size]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["images"], ["logits"], to=TensorProto.FLOAT)],
        "pixels",
        [value("images", TensorProto.UINT8, shape)],
        [value("logits", TensorProto.FLOAT, shape)],
    )
    opset = helper.make_opsetid("", formats.OPSET)
    formats.save_onnx(helper.make_model(graph, opset_imports=[opset]), folder / "square.onnx")
    onnx_forms.write_resize(folder / "square.onnx", folder / "whole.onnx", size)
    ready = onnxruntime.InferenceSession(folder / "whole.onnx", providers=["CPUExecutionProvider"])
    return lambda images: ready.run(None, {"images": images})[0]


@pytest.mark.parametrize("size", [16, 160])
def test_pixels_are_those_of_the_evaluation_up_to_rounding(size: int, tmp_path: Path) -> None:
    whole = session(tmp_path, size)
    draw = torch.Generator().manual_seed(0)
    # Unchanged, smaller, larger, wide, high, odd, and scaled to half a pixel.
    for sides in ((size, size), (300, 401), (97, 31), (183, 183), (500, 160), (20, 25), (366, 183)):
        image = torch.randint(0, 256, (3, *sides), dtype=torch.uint8, generator=draw)
        expected = transforms.evaluate(image, size)
        found = whole(image[None].numpy())[0]
        assert found.shape == expected.shape
        difference = np.abs(found - expected.numpy())
        assert difference.max() <= 2, sides
        assert difference.mean() < 0.1, sides


def test_images_of_one_size_form_a_batch(tmp_path: Path) -> None:
    whole = session(tmp_path, 16)
    images = torch.randint(0, 256, (3, 3, 40, 25), dtype=torch.uint8).numpy()
    alone = np.concatenate([whole(image[None]) for image in images])
    np.testing.assert_array_equal(whole(images), alone)
