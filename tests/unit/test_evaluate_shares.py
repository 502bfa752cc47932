"""Predictions of several ranks are those of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.predict import Predictions, Share, merged, predict_share
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.config import Reading
from kfp_ddp.training.distributed import World
from kfp_ddp.training.model import MEAN, STD, build
from kfp_ddp.training.splits import Index, scan

CLASSES = tuple(f"class{number}" for number in range(7))
CPU = torch.device("cpu")
INFO = ModelInfo("cifar_resnet8", CLASSES, 8, MEAN, STD, 1, {})


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Return 47 images of noise in seven classes, one of which is small."""
    folder, draw = tmp_path_factory.mktemp("split"), torch.Generator().manual_seed(3)
    for number in range(47):
        name = CLASSES[number % 7 if number > 6 else 0]
        (folder / name).mkdir(exist_ok=True)
        pixels = torch.randint(0, 256, (8, 8, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    return scan(folder, CLASSES)


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return build("cifar_resnet8", len(CLASSES)).eval()


def shares(network: Any, index: Index, world: int, size: int, bad: str = "fail") -> list[Share]:
    return [
        predict_share(network, INFO, index, size, World(rank, world, 0, world, CPU), Reading(bad))
        for rank in range(world)
    ]


def figures(predictions: Predictions) -> dict[str, Any]:
    tally = predictions.tally
    return {
        "csv": predictions.to_csv(),
        "paths": predictions.index.paths,
        "skipped": predictions.skipped,
        "confusion": tally.confusion.tolist(),
        "loss": tally.loss,
        "losses": predictions.loss.tolist(),
        "top5": tally.top5,
        "calibration": tally.calibration(),
        "areas": tally.areas(),
        "features": predictions.features.tolist(),
        "worst": predictions.worst(5, predictions.loss),
    }


@pytest.mark.parametrize("world", [2, 3, 16])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_results_are_equal_on_all_ranks(network: Any, index: Index, world: int, size: int) -> None:
    """With up to 16 ranks, which are more than batches."""
    single = merged(index, shares(network, index, 1, size))
    assert single.tally.samples == len(index) == 47
    parts = shares(network, index, world, size)
    assert sum(len(share.positions) for share in parts) == 47
    assert figures(merged(index, parts)) == figures(single)
    assert figures(merged(index, parts[::-1])) == figures(single)


def test_any_number_of_ranks_skips_unreadable(network: Any, index: Index, tmp_path: Path) -> None:
    paths = (*index.paths[:9], str(index.root / "class1" / "bad.png"), *index.paths[10:])
    damaged = Index(index.root, index.classes, paths, index.targets)
    single = merged(damaged, shares(network, damaged, 1, 4, "skip"), "skip")
    assert single.skipped == ("class1/bad.png",)
    parts = merged(damaged, shares(network, damaged, 3, 4, "skip"), "skip")
    assert figures(parts) == figures(single)
    with pytest.raises(InputError, match=r"bad\.png"):
        shares(network, damaged, 3, 4)
    (tmp_path / "class0").mkdir()
    (tmp_path / "class0" / "1.png").write_bytes(b"no image")
    unreadable = scan(tmp_path, CLASSES)
    with pytest.raises(InputError, match="none of the 1 images"):
        merged(unreadable, shares(network, unreadable, 2, 4, "skip"), "skip")


def test_a_share_that_is_missing_or_counted_twice_is_an_error(network: Any, index: Index) -> None:
    first, second, third = shares(network, index, 3, 5)
    for wrong in ([first, second], [first, second, third, second]):
        with pytest.raises(RuntimeError, match="of 47 samples"):
            merged(index, wrong)


def test_a_network_without_linear_layer_is_evaluated(index: Index) -> None:
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool3d((1, 1, 7)), torch.nn.Flatten())
    assert merged(index, shares(network.eval(), index, 1, 5)).tally.samples == len(index)
