"""The model repository of a bundle, checked by rules of Triton and OpenVINO Model Server.

Of Triton: `<name>/config.pbtxt`, `<name>/<number>/model.onnx`, the name of the folder in the
configuration, and dims without the batch. Of OpenVINO Model Server: numbers, with a model in each.
"""

from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from kfp_ddp.export import contents
from kfp_ddp.export.formats import INPUT, OUTPUT
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


def test_triton_can_parse_the_configuration(repository: Path, tmp_path: Path) -> None:
    text = (repository / "flowers" / "config.pbtxt").read_text()
    config = triton.parsed(text, tmp_path)
    assert config.name == "flowers"
    assert config.backend == "onnxruntime"
    assert config.HasField("dynamic_batching")
    with pytest.raises(text_format.ParseError):
        triton.parsed(text + "batching { }", tmp_path)


def test_the_configuration_fits_the_model(repository: Path, tmp_path: Path) -> None:
    config = triton.parsed((repository / "flowers" / "config.pbtxt").read_text(), tmp_path)
    graph = onnx.load(repository / "flowers" / "1" / "model.onnx").graph
    types: dict[int, int] = {TensorProto.UINT8: 2, TensorProto.FLOAT: 11}  # of its enum DataType
    assert config.max_batch_size > 1
    for configured, values in ((config.input, graph.input), (config.output, graph.output)):
        (one,), (tensor,) = configured, values
        shape: Any = tensor.type.tensor_type.shape.dim
        assert one.name == tensor.name
        assert one.data_type == types[tensor.type.tensor_type.elem_type]
        assert shape[0].dim_param, "a batch of any size"
        assert list(one.dims) == [dim.dim_value for dim in shape[1:]]
    assert config.output[0].label_filename == "labels.txt"
