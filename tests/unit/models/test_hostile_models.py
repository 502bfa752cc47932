"""Models that try to run code or to read other files, and damaged documents of a bundle."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError
from kfp_ddp.models import bundle, onnx_runtimes, weights
from kfp_ddp.models.interface import read_interface, read_sample
from kfp_ddp.predict import load
from kfp_ddp.serve.served import ready
from kfp_ddp.training.state.checkpoint import ModelInfo
from tests.exports import sealed


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


OUTSIDE = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3])
OUTSIDE.data_location = TensorProto.EXTERNAL
OUTSIDE.external_data.add(key="location", value="secret")
PLACES = {
    "initializer": (7, 5),
    "constant": (7, 1, 5, 5),
    "list of tensors": (7, 1, 5, 10),
    "branch": (7, 1, 5, 6, 5),
    "list of graphs": (7, 1, 5, 11, 1, 5, 5),
    "sparse": (7, 15, 1),
    "indices of sparse": (7, 1, 5, 22, 2),
    "function": (25, 7, 5, 5),
    "default of a function": (25, 11, 5),
    "training": (20, 1, 5),
    "field of a later format": (99, 5),
}
"""Numbers of the fields that lead from the model to a tensor."""


def varint(value: int, size: int = 0) -> bytes:
    """An integer in at least `size` bytes."""
    parts: list[int] = []
    while value or len(parts) < max(1, size):
        parts.append(value & 0x7F)
        value >>= 7
    return bytes([*(part | 0x80 for part in parts[:-1]), parts[-1]])


def spellings(field: int) -> Iterator[bytes]:
    """All spellings of the tag of a message that some parser may take for it."""
    tag = field << 3 | 2
    yield from (varint(tag, size) for size in range(11))
    yield from (varint(tag | 1 << bit, size) for bit in range(32, 70) for size in (0, 10))


def nested(path: tuple[int, ...], odd: int = -1, spelling: bytes = b"", size: int = 0) -> bytes:
    """A message with a tensor at a place; the tag at the level `odd` has another spelling."""
    content = bytes(OUTSIDE.SerializeToString())
    if odd == len(path):  # of the location itself
        content = bytes(OUTSIDE.external_data[0].SerializeToString())
        content = spelling + varint(len(content), size) + content
    for level in reversed(range(len(path))):
        tag = spelling if level == odd else varint(path[level] << 3 | 2)
        content = tag + varint(len(content), size if level == odd else 0) + content
    return content


@pytest.mark.parametrize("place", PLACES)
def test_weights_in_other_files_are_refused_in_every_spelling(place: str) -> None:
    path = PLACES[place]
    inside = onnx_model(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    parts = [nested(path)]
    for level, field in enumerate((*path, 13)):
        parts += [nested(path, level, spelling) for spelling in spellings(field)]
        parts += [nested(path, level, varint(field << 3 | 2), size) for size in range(2, 11)]
    parts += [varint(7 << 3 | wrong) + nested(path)[1:] for wrong in (1, 3, 4, 5, 6, 7)]
    for part in parts:
        with pytest.raises(InputError, match="ONNX model is refused"):
            onnx_runtimes.load(inside + part)


@pytest.mark.parametrize("constant", [False, True])
def test_the_runtime_finds_no_file(
    constant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = np.full(3, 7, np.float32)
    loaded = onnx_runtimes._loaded(onnx_model(numpy_helper.from_array(secret, "w"), constant), 0)
    np.testing.assert_array_equal(loaded(np.zeros((1, 3), np.uint8))[0], secret)
    monkeypatch.chdir(tmp_path)
    for name in ("secret", "./secret", "x/../secret", f"../{tmp_path.name}/secret"):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "secret").write_bytes(secret.tobytes())
        for location in (name, str(tmp_path / name), f"../../../..{tmp_path}/secret"):
            outside = TensorProto()
            outside.CopyFrom(OUTSIDE)
            outside.external_data[0].value = location
            with pytest.raises(Exception, match=r"xternal|invalid|failed"):
                onnx_runtimes._loaded(onnx_model(outside, constant), 0)


def bundle_in_torch(folder: Path, code: str = "") -> Path:
    """A bundle that only torch can compute."""
    folder.mkdir()
    (folder / bundle.PROGRAM).write_bytes(b"program")
    name = "net.py:build" if code else "cifar_resnet20"
    config = {"model_code": packed.pack(code.encode())} if code else {}
    info = ModelInfo(name, ("cat", "dog"), 32, (0.5,) * 3, (0.5,) * 3, 1, config)
    weights.write(info.network(), info, folder / bundle.WEIGHTS)
    side = {"inputs": [{"shape": ["batch", 3, 32, 32]}], "preprocessing": {"short_side": 32}}
    sealed(folder, {**DOCUMENTS, "signature.json": side})
    return folder


@pytest.mark.parametrize("own", [False, True])
def test_bundle_runs_no_code(tmp_path: Path, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: pytest.fail("loads the program"))
    made = tmp_path / "made"
    code = f"""
from pathlib import Path
from torch import nn
def build(classes):
    Path({str(made)!r}).touch()
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))
"""
    folder = str(bundle_in_torch(tmp_path / "bundle", code if own else ""))
    made.unlink(missing_ok=True)
    if own:
        with pytest.raises(InputError, match="--allow-code"):
            load(folder)
    assert not made.exists()
    model = load(folder, allow_code=own)
    assert model.runtime == "torch"
    assert model([np.zeros((40, 40, 3), np.uint8)]).shape == (1, 2)
    (Path(folder) / bundle.WEIGHTS).unlink()
    sealed(Path(folder), {})
    with pytest.raises(InputError, match="has neither"):
        load(folder, allow_code=True)
    with pytest.raises(InputError, match=r"has no model\.onnx"):
        ready(folder)


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
