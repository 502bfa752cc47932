"""The graph that resizes and crops images gives the pixels of the evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from kfp_ddp.export import formats, onnx_forms
from kfp_ddp.training import transforms


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
