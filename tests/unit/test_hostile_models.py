"""Models that try to run code or to read other files, and damaged documents of a bundle."""

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import bundle, onnx_runtimes, programs
from kfp_ddp.models.interface import read_interface, read_sample
from tests.exports import sealed

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)


class Network(torch.nn.Module):
    """The sum of each channel, scaled by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().sum((2, 3)) * self.weight


@pytest.fixture(scope="module")
def program() -> bytes:
    shapes = {"images": {0: torch.export.Dim("batch", min=1, max=programs.MAX_BATCH)}}
    exported = torch.export.export(Network(), (torch.from_numpy(IMAGES),), dynamic_shapes=shapes)
    content = io.BytesIO()
    torch.export.save(exported, content)
    return content.getvalue()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def rewritten(content: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(output, "w") as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return output.getvalue()


def edit_graph(content: bytes, old: str, new: str) -> bytes:
    def change(name: str, part: bytes) -> bytes:
        if "/models/" in name:
            assert old.encode() in part
            return part.replace(old.encode(), new.encode())
        return part

    return rewritten(content, change)


def hostile_programs(content: bytes, target: Path) -> dict[str, bytes]:
    code = f"__import__('pathlib').Path('{target}').touch()"
    pickled = io.BytesIO()
    torch.save(Payload(target), pickled)

    def weight(name: str, part: bytes) -> bytes:
        if name.endswith("weight_0"):
            return pickled.getvalue()
        return part.replace(b'"use_pickle": false', b'"use_pickle": true')

    def constant(name: str, part: bytes) -> bytes:
        entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False}
        config = json.dumps({"config": {"x": {**entry, "tensor_meta": None}}}).encode()
        return config if name.endswith("constants_config.json") else part

    def context(text: str) -> str:
        return json.dumps(text)[1:-1]  # within a text of the graph

    empty = context('"builtins.dict", "context": "[]"')
    factory = {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []}
    member = [{"__enum__": True, "fqn": "this:s", "name": 0}]
    return {
        "enumeration": edit_graph(
            content, empty, context(f'"builtins.dict", "context": {json.dumps(json.dumps(member))}')
        ),
        "default": edit_graph(
            content, empty, context(f'"collections.defaultdict", "context": {json.dumps(factory)}')
        ),
        "attribute": edit_graph(content, "aten.mul.Tensor", "aten.mul.__class__"),
        "pickled weight": rewritten(content, weight),
        "custom object": rewritten(content, constant),
        "operator": edit_graph(content, "torch.ops.aten.mul.Tensor", "torch.os.system"),
        "name": edit_graph(content, '"name": "images"', '"name": "images=print(1)"'),
        "expression": edit_graph(content, "Symbol('", f"{code} or Symbol('".replace('"', "'")),
        "long number": edit_graph(content, "Symbol('", f"{'1' * 20_000}!Symbol('"),
        "symbols": edit_graph(content, "Symbol('", f"{'s77+' * 1000}!Symbol('"),
        "compressed": zipped(bytes(10_000_000)),
        "entry": zipped(b"", "archive/extra/run.py"),
        "not a zip": b"torn",
    }


def zipped(content: bytes, name: str = "archive/data/weights/weight_0") -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr(name, content)
    return output.getvalue()


def test_a_program_that_would_run_code_is_refused(program: bytes, tmp_path: Path) -> None:
    target = tmp_path / "created"
    for content in hostile_programs(program, target).values():
        with pytest.raises(InputError, match=r"model\.pt2 is refused"):
            programs.load(content)
    assert not target.exists()
    assert "this" not in sys.modules


def test_pickled_samples_and_guards_are_dropped(program: bytes, tmp_path: Path) -> None:
    target = tmp_path / "created"

    def change(name: str, part: bytes) -> bytes:
        if "/sample_inputs/" in name:
            return pickle.dumps(Payload(target))
        if "/models/" in name:
            return json.dumps(
                {**json.loads(part), "guards_code": [f"open({str(target)!r}, 'w')"]}
            ).encode()
        return part

    logits = programs.load(rewritten(program, change))
    many = np.resize(IMAGES, (programs.MAX_BATCH + 1, *IMAGES.shape[1:]))
    np.testing.assert_allclose(logits(many)[-1], logits(many[-1:])[0], atol=1e-5)
    assert not target.exists()


def onnx_model(weight: TensorProto, constant: bool = False) -> bytes:
    """A model that adds a weight, which is an initializer or a constant."""
    nodes = [helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Constant", [], ["w"], value=weight)] if constant else []
    graph = helper.make_graph(
        [*nodes, helper.make_node("Add", ["floats", "w"], ["logits"])],
        "add",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
        [] if constant else [weight],
    )
    opset = [helper.make_opsetid("", 18)]
    content: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return content


@pytest.mark.parametrize("constant", [False, True])
def test_external_weights(constant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = numpy_helper.from_array(np.ones(3, np.float32), "w")
    assert onnx_runtimes.load(onnx_model(inside, constant)).entry[1] == (-1, 3)
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3])
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(np.ones(3, np.float32).tobytes())
    with pytest.raises(InputError, match="weights in other files"):
        onnx_runtimes.load(onnx_model(outside, constant))


DOCUMENTS: dict[str, Any] = {
    "classes.json": ["cat", "dog"],
    "signature.json": {
        "inputs": [{"shape": ["batch", 3, 2, 2]}],
        "preprocessing": {"short_side": 2},
    },
    bundle.REQUEST: {"inputs": [{"name": "images", "shape": [1, 3, 2, 2], "data": [1] * 12}]},
    bundle.RESPONSE: {
        "outputs": [{"name": "logits", "shape": [1, 2], "data": [1.0, 2.0]}],
        "parameters": {"allowed_abs_difference": 0.1},
    },
}
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1.5, 10**7, 10**400, "", "x", [], {}, [[]], [None], {"a": 1}, "\ud800"]
)


def paths(document: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a document."""
    parts = list(document.items() if isinstance(document, dict) else enumerate(document))
    inner = [(*above, key) for key, _ in parts]
    return inner + [
        path
        for key, value in parts
        if isinstance(value, (dict, list))
        for path in paths(value, (*above, key))
    ]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(data=st.data())
def test_damage_is_one_line(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = json.loads(json.dumps(DOCUMENTS))
    name = data.draw(st.sampled_from(sorted(documents)))
    place = data.draw(st.sampled_from(paths(documents[name])))
    holder = documents[name]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(JUNK)
    texts = {name: json.dumps(document) for name, document in documents.items()}
    if data.draw(st.booleans()):
        texts[name] = texts[name][: data.draw(st.integers(0, len(texts[name])))]
    opened = sealed(tmp_path_factory.mktemp("bundle"), texts)
    for read in (read_interface, read_sample):
        line = ""
        try:
            read(opened)
        except InputError as error:
            line = str(error)
        assert not line or "is damaged" in line
