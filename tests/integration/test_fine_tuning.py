"""A network that has seen digits learns four of them sooner than one from random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.recipes import configured
from tests.training_ranks import newest, trainer

OLD, NEW = range(10), range(6, 10)
COMMON: dict[str, Any] = {
    "model": "cifar_resnet8",
    "image_size": 16,
    "batch_size": 16,
    "workers": 0,
    "device": "cpu",
    "augment": "shift",
}


def write(root: Path, digits: range, first: int, train: int, val: int) -> Path:
    """Some of scikit-learn's digits, 8x8, as image folders: of each those from `first` on."""
    found = load_digits()
    for digit in digits:
        pictures = found.images[found.target == digit]
        for number, picture in enumerate(pictures[first : first + train + val]):
            folder = root / ("train" if number < train else "val") / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((picture * 15.9).astype("uint8"))
            image.convert("RGB").save(folder / f"{number}.png")
    return root


def accuracy(run: TrainConfig) -> float:
    loop = trainer(run)
    assert loop.fit()
    return float(loop.saving.latest["accuracy"])


@pytest.mark.slow
def test_fine_tuning_beats_training_from_scratch(tmp_path: Path) -> None:
    before = write(tmp_path / "old", OLD, 0, train=60, val=10)
    given = {**COMMON, "data": str(before), "output_dir": str(tmp_path / "before")}
    assert accuracy(configured("none", {**given, "epochs": 3, "learning_rate": 0.1})) > 0.9
    weights = newest(tmp_path / "before").state()["model"]
    state = {f"module.{name}": value for name, value in weights.items()}
    start = tmp_path / "theirs.pth"
    torch.save({"state_dict": state, "epoch": 5}, start)
    few = write(tmp_path / "new", NEW, 70, train=16, val=60)
    same = {**COMMON, "data": str(few), "epochs": 4, "learning_rate": 0.1, "lr_reference_batch": 0}
    tuned = configured(
        "none", {**same, "output_dir": str(tmp_path / "t"), "pretrained": str(start)}
    )
    assert (tuned.freeze_epochs, tuned.body_lr_factor) == (1, 0.1)  # finetune is the default then
    scratch = configured("none", {**same, "output_dir": str(tmp_path / "s")})
    found = accuracy(tuned), accuracy(scratch)
    assert found[0] > found[1] + 0.1, found
