"""What the address of a model means: one answer, whoever asks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from kfp_ddp import predict
from kfp_ddp.cli.models import verify
from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation import evaluator
from kfp_ddp.evaluation.gate import engine as gate
from kfp_ddp.models import bundle, weights, weights_download
from kfp_ddp.models.champion import find
from kfp_ddp.serve.served import ready
from kfp_ddp.training.state.checkpoint import ModelInfo
from tests.evaluations import written

NAMES = ("champion", "root", "below")
SIZE = 32


def onnx_model() -> bytes:
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["floats"], ["means"], axes=[2, 3], keepdims=0),
            helper.make_node("Split", ["means"], ["logits", "rest"], axis=1, split=[2, 1]),
        ],
        "means",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
    )
    opset = [helper.make_opsetid("", 11)]
    content: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return content


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles whose first class is their name."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp("made") / name
        written(folder, 3, "metrics.json", 60)
        info = ModelInfo("cifar_resnet20", (name, "z"), SIZE, (0.5,) * 3, (0.5,) * 3, 1, {})
        weights.write(info.network(), info, folder / bundle.WEIGHTS)
        (folder / bundle.ONNX).write_bytes(onnx_model())
        side = {"inputs": [{"shape": ["b", 3, SIZE, SIZE]}], "preprocessing": {"short_side": SIZE}}
        bundle.write_json(folder / bundle.CLASSES, [name, "z"])
        bundle.write_json(folder / bundle.INTERFACE, side)
        bundle.seal(folder)
        made[name] = folder
    return made


def verified(address: str) -> str:
    result = CliRunner().invoke(verify, [address, "--json"], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return class_of(json.loads(result.stdout)["uri"])


def class_of(uri: str) -> str:
    first: str = json.loads(Path(uri, bundle.CLASSES).read_text())[0]
    return first


def champion_of(address: str) -> str:
    model = find(address)
    return class_of(model.uri) if model else ""


def downloaded(address: str) -> str:
    place = Path(address).parent / "downloads"
    place.mkdir(exist_ok=True)
    path = Path(address)
    if weights_download.is_per_node(address):
        path = weights_download.download(address, place)
    if not (path / bundle.WEIGHTS).is_file():
        raise InputError("nothing")
    return weights.read(path / bundle.WEIGHTS, 0)[1].classes[0]


RESOLVERS: dict[str, Callable[[str], str]] = {
    "predict": lambda address: predict.load(address).classes[0],
    "serve": lambda address: ready(address).interface.classes[0],
    "verify": verified,
    "champion": champion_of,
    "gate": lambda uri: class_of(gate.read_bundle(uri, Path(uri).parent / "metrics.json").uri),
    "evaluate": lambda address: evaluator.read_model(address).info.classes[0],
    "pretrained": downloaded,
}
STATES = {
    "": "",
    "below": "below",
    "root": "root",
    "root below": "root",
    "champion": "champion",
    "champion below": "champion",
    "champion root": "error",
    "champion root below": "error",
    "moved": "",
    "moved below": "",
    "moved root": "error",
    "other": "error",
    "other below": "error",
    "torn below": "error",
}
"""What is in a folder, and the bundle that it means.

`moved` is for a history without a champion, `other` for a champion in the folder of another
version, `torn` for a bundle without its manifest.
"""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("who", RESOLVERS)
def test_address_is_unique(state: str, who: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "medical"
    folder.mkdir()
    shutil.copy(bundles["root"] / "metrics.json", tmp_path)
    version = bundle.version(bundles["champion"])
    for part in state.split():
        match part:
            case "champion" | "other":
                name = version if part == "champion" else "0" * 12
                (folder / "CHAMPION").write_text(name)
                shutil.copytree(bundles["champion"], folder / name)
            case "moved":
                (folder / "CHAMPIONS").write_text("")
            case "root":
                shutil.copytree(bundles["root"], folder, dirs_exist_ok=True)
            case "below":
                shutil.copytree(bundles["below"], folder / "bundle")
            case "torn":
                (folder / bundle.SUCCESS).write_text("")
    meaning = STATES[state]
    if (state, who) == ("root below", "verify"):
        meaning = "error"  # it refuses all files that are not of the bundle
    if meaning in NAMES:
        assert RESOLVERS[who](str(folder)) == meaning
    elif not meaning and who == "champion":
        assert RESOLVERS[who](str(folder)) == ""
    else:
        with pytest.raises(InputError):
            RESOLVERS[who](str(folder))


def test_a_version_in_anothers_folder_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bundles["root"], tmp_path / ("0" * 12))
    for who, resolve in RESOLVERS.items():
        if who not in ("gate", "pretrained"):  # a local bundle is read where it is
            with pytest.raises(InputError, match="is that of"):
                resolve(str(folder))
