"""A bundle that predicts, and its model repository."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from kfp_ddp.cli import serve as predict
from kfp_ddp.core.errors import InputError
from kfp_ddp.export import contents
from kfp_ddp.export.formats import INPUT, OUTPUT
from kfp_ddp.models.interface import Interface
from kfp_ddp.pictures.reading import Fit, Reading
from kfp_ddp.predict import Model, square
from kfp_ddp.training.data import image_files, transforms
from tests import triton

CLASSES = ("daisy", "two\nlines", "Löwen zahn")


def noise(width: int, height: int, channels: int) -> Image.Image:
    draw = np.random.default_rng(width * height)
    pixels = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("wide.jpg", noise(640, 171, 3)),
        ("small.png", noise(20, 31, 3)),
        ("line.png", noise(300, 1, 3)),
        ("alpha.png", noise(80, 60, 4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_pictures_are_read_as_in_evaluation(
    name: str, image: Image.Image, fit: Fit, tmp_path: Path
) -> None:
    image.save(tmp_path / name)
    for size, background in ((16, ""), (96, "#ffffff"), (128, "#102030")):
        short = transforms.short_side(size)
        reading = Reading(background=background, fit=fit)
        pixels = image_files.read(str(tmp_path / name), reading)
        evaluated = transforms.evaluate(pixels, size, reading).numpy().astype(int)
        own = square(tmp_path / name, Interface((), short, size, reading))
        assert np.abs(own - evaluated).max() <= 2


@pytest.mark.parametrize("shape", [(1, 100_000), (300, 90_000)])
def test_only_the_centre_of_a_line_is_computed(shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "line.png"
    Image.new("RGB", shape, (10, 200, 30)).save(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pixels = square(path, Interface((), 256, 224))
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (pixels == np.array([10, 200, 30], np.uint8)[:, None, None]).all()
    assert grown_kb < 400 << 10  # the largest picture takes 108 MB when decoded


@pytest.mark.parametrize(
    "one", ["a.jpg", Path("a.jpg"), b"", noise(9, 9, 3), np.zeros((9, 9, 3), np.uint8)], ids=type
)
def test_one_picture_is_no_list(one: Any) -> None:
    model = Model(Interface(("a", "b"), 9, 9), "", lambda p: np.zeros((len(p), 2), np.float32))
    with pytest.raises(InputError, match="give a list of pictures"):
        model(one)
    assert model([np.asarray(noise(9, 9, 3))] * 2).shape == (2, 2)
    assert model([]).shape == (0, 2)


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ((64, 64), (480, 480)),
        ((30, 40), (360, 480)),
        ((900, 600), (900, 600)),
        ((1, 30_000), (1, 30_000)),
        ((1, 9), (53, 480)),
    ],
)
def test_a_photograph_is_marked_in_its_own_size(
    own: tuple[int, int], shown: tuple[int, int]
) -> None:
    """The class depends on the left upper corner of what the network sees."""

    def corner(pictures: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        bright = pictures[:, :, :2, :2].mean((1, 2, 3), dtype=np.float32)
        return np.stack([bright / 50, 0 * bright + 3], 1)

    model = Model(Interface(("a", "b"), 20, 16), "", corner)
    photograph = Image.new("RGB", own, (90, 90, 90))
    photograph.paste((200, 200, 200), (0, 0, own[0] // 2 or 1, own[1] // 2))
    marked = np.asarray(model.explain(photograph, 0)).astype(int)
    assert marked.shape == (shown[1], shown[0], 3)
    coloured = np.argwhere(marked[..., 0] - marked[..., 2] > 60)
    if min(own) > 1:
        rows, columns = coloured.min(0)
        assert min(rows / shown[1], columns / shown[0]) > 0.05, "what it does not see is grey"
        assert max(marked[0, 0]) == 100
        assert coloured.max(0)[0] < shown[1] * 0.6


def test_an_unreadable_file_is_reported_in_one_line(tmp_path: Path) -> None:
    text, cut = (tmp_path / name for name in ("notes.jpg", "cut.jpg"))
    text.write_text("hello")
    os.mkfifo(tmp_path / "pipe.jpg")
    noise(60, 60, 3).save(cut)
    cut.write_bytes(cut.read_bytes()[:500])
    reasons = {
        text: "it is not a picture",
        cut: "runcated",
        tmp_path / "none.jpg": "No such file or directory",
        tmp_path / "pipe.jpg": "not a plain file",
        Path("/dev/zero"): "not a plain file",
    }
    for path, why in reasons.items():
        with pytest.raises(InputError) as refused:
            square(path, Interface((), 16, 16))
        line = str(refused.value)
        assert str(path) in line
        assert why in line


def test_control_characters_in_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    classes = [{"class": "cat\x1b[2J", "probability": 1.0}]
    answer = {"picture": "a\x1b]0;t\x07\n.jpg", "sure": None, "classes": classes}
    predict._print_classes(answer, 10)
    predict._print_classes({"picture": "b", "error": "cannot read b\x1b[2J"}, 10)
    out, err = capsys.readouterr()
    assert out == "…x07\\n.jpg  cat\\x1b[2J 100.0%\n"
    assert err == "error: cannot read b\\x1b[2J\n"


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


def test_no_library_reports_its_use_to_its_makers(tmp_path: Path) -> None:
    """Each writes the id under which it reports to the home folder, or has a client."""
    program = """
import kfp_ddp, mlflow, onnxruntime
from mlflow.telemetry import get_telemetry_client
print(get_telemetry_client())
"""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ["None"]
    assert list(tmp_path.iterdir()) == []
