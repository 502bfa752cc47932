"""Export of a network of a custom file: its bundle is enough to build it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.components.export.component import export
from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError
from kfp_ddp.export.engine import make
from kfp_ddp.models import bundle, weights
from kfp_ddp.training import checkpoint
from kfp_ddp.training.config import TrainConfig
from tests.evaluations import evaluate
from tests.integration.test_export_step import arguments, run_example

CLASSES = ("blue", "green", "red")
OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features, self.fc = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, classes)

    def forward(self, x):
        features = torch.relu(self.features(x)).mean((2, 3))
        # no such operator in ONNX
        return self.fc(features + 1e-3 * torch.linalg.svdvals(x.mean(1))[:, :8])


build = Net
"""
BRANCH = OWN.replace(
    "        return",
    "        if features.sum() > 0:\n            features = 2 * features\n        return",
)


def saved(folder: Path, dataset: Path, text: str) -> Path:
    config = TrainConfig.create(
        data=str(dataset),
        output_dir=str(folder),
        model="mine.py:build",
        model_code=packed.pack(text.encode()),
        image_size=16,
        batch_size=32,
        epochs=6,
    )
    torch.manual_seed(0)
    info = checkpoint.manifest_of(config, CLASSES, epoch=6, world_size=1)
    network = checkpoint.ModelInfo(
        config.model, CLASSES, 16, (0.5,) * 3, (0.5,) * 3, 1, config.model_dump()
    ).network()
    return checkpoint.write(
        folder / "checkpoints", 40, {"model": network.state_dict(), "ema": None}, info
    )


@pytest.fixture(scope="module")
def made(trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoint, evaluation and bundle."""
    run_dir = tmp_path_factory.mktemp("own")
    path = saved(run_dir, trained_dataset, OWN)
    evaluate(path, run_dir, trained_dataset, worst=4)
    evaluation = run_dir / "evaluation" / "evaluation.json"
    make(path, run_dir, trained_dataset / "val", evaluation, "squares")
    return run_dir


def test_an_unsupported_format_is_reported_and_left_out(made: Path) -> None:
    folder = made / "bundle"
    assert bundle.intact(folder)
    names = bundle.files(folder)
    assert {"model.pt2", "model.safetensors", "network.py"} < set(names)
    assert not [name for name in names if "onnx" in name or name.startswith("serving/")]
    parity: dict[str, Any] = json.loads((folder / "parity.json").read_text())
    assert set(parity["formats"]) == {"model.safetensors", "model.pt2"}
    assert list(parity["left_out"]) == ["model.onnx"]
    assert re.search("linalg_svd", parity["left_out"]["model.onnx"])
    assert "\n" not in parity["left_out"]["model.onnx"]
    assert json.loads((folder / "signature.json").read_text())["left_out"] == parity["left_out"]
    card = (folder / "README.md").read_text()
    assert "`model.onnx` is left out, as the model cannot be written in it" in card
    assert not re.search("onnxruntime|KServe|ONNX opset", card)


@pytest.mark.slow
def test_the_example_in_the_card_runs(made: Path, trained_dataset: Path) -> None:
    run_example(made / "bundle", trained_dataset)


def test_the_bundle_is_enough_to_build_the_network(made: Path, tmp_path: Path) -> None:
    folder = made / "bundle"
    network, info = weights.read(folder / "model.safetensors", 40)
    reference, _ = checkpoint.load_model(made / "checkpoints" / "step-00000040")
    images = torch.rand(3, 3, 16, 16)
    assert torch.equal(network(images), reference(images))
    assert (info.model, info.classes) == ("mine.py:build", CLASSES)
    assert (folder / "network.py").read_text() == OWN
    digest = json.loads((folder / "config.json").read_text())["model_sha256"]
    assert f"| network.py sha256 | `{digest}` |" in (folder / "README.md").read_text()
    assert f"{digest}  network.py" in (folder / "MANIFEST.sha256").read_text()


def test_the_artifact_lists_the_formats(made: Path, trained_dataset: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(made, tmp_path / "run"))
    path = run_dir / "checkpoints" / "step-00000040"
    given = arguments(run_dir, path, trained_dataset, tmp_path)
    assert bundle.intact(Path(export.python_func(**given)))
    assert given["exported_model"].metadata["formats"] == "model.pt2, model.safetensors"
    assert "`model.onnx` is left out" in (tmp_path / "summary").read_text()


def test_an_unsupported_network_has_no_bundle(trained_dataset: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, trained_dataset, BRANCH)
    evaluate(path, tmp_path, trained_dataset, worst=4)
    evaluation = tmp_path / "evaluation" / "evaluation.json"
    with pytest.raises(InputError, match=r"^mine\.py:build can be written neither as") as caught:
        make(path, tmp_path, trained_dataset / "val", evaluation, "squares")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists()
