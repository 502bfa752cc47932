"""What ranks count of a split comes to the same, however many they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.predict import Predictions, Share, merged, predict_share
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.data import fixed_batches
from kfp_ddp.training.distributed import World
from kfp_ddp.training.model import MEAN, STD, build
from kfp_ddp.training.splits import Index, scan

CLASSES = tuple(f"class{number}" for number in range(7))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """47 images of noise in seven classes, of which one is small."""
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


INFO = ModelInfo("cifar_resnet8", CLASSES, 8, MEAN, STD, 1, {})


def shares(network: Any, index: Index, world: int, size: int, bad: str = "fail") -> list[Share]:
    return [
        predict_share(network, INFO, index, size, World(rank, world, 0, world, CPU), bad)
        for rank in range(world)
    ]


def figures(found: Predictions) -> dict[str, Any]:
    """All that is told of an evaluation, to the last bit."""
    tally = found.tally
    return {
        "csv": found.to_csv(),
        "paths": found.index.paths,
        "skipped": found.skipped,
        "confusion": tally.confusion.tolist(),
        "loss": tally.loss,
        "losses": found.loss.tolist(),
        "top5": tally.top5,
        "calibration": tally.calibration(),
        "roc": tally.roc(),
        "worst": found.worst(5),
    }


@pytest.mark.parametrize("world", [2, 3, 16])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_ranks_come_to_what_one_comes_to(network: Any, index: Index, world: int, size: int) -> None:
    """With more of them than batches, too."""
    alone = merged(index, shares(network, index, 1, size))
    assert alone.tally.samples == len(index) == 47
    together = shares(network, index, world, size)
    assert sum(len(share.positions) for share in together) == 47
    assert figures(merged(index, together)) == figures(alone)
    assert figures(merged(index, together[::-1])) == figures(alone)


def test_no_batch_depends_on_the_ranks(index: Index) -> None:
    batches = {tuple(keys) for keys in fixed_batches(index, 5, 0, 1)}
    for world in (2, 3):
        dealt = [tuple(k) for rank in range(world) for k in fixed_batches(index, 5, rank, world)]
        assert len(dealt) == len(batches)
        assert set(dealt) == batches


def test_images_that_are_left_out_are_the_same_on_any_ranks(network: Any, index: Index) -> None:
    paths = (*index.paths[:9], str(index.root / "class1" / "bad.png"), *index.paths[10:])
    spoilt = Index(index.root, index.classes, paths, index.targets)
    alone = merged(spoilt, shares(network, spoilt, 1, 4, "skip"), "skip")
    assert alone.skipped == ("class1/bad.png",)
    together = merged(spoilt, shares(network, spoilt, 3, 4, "skip"), "skip")
    assert figures(together) == figures(alone)
    with pytest.raises(InputError, match=r"bad\.png"):
        shares(network, spoilt, 3, 4)


def test_a_share_that_is_missing_or_counted_twice_is_no_evaluation(
    network: Any, index: Index
) -> None:
    first, second, third = shares(network, index, 3, 5)
    for wrong in ([first, second], [first, second, third, second]):
        with pytest.raises(RuntimeError, match="of 47 samples"):
            merged(index, wrong)


def test_a_split_of_which_nothing_can_be_read_is_one_line(network: Any, tmp_path: Path) -> None:
    (tmp_path / "class0").mkdir()
    (tmp_path / "class0" / "1.png").write_bytes(b"no image")
    found = scan(tmp_path, CLASSES)
    with pytest.raises(InputError, match="none of the 1 images"):
        merged(found, shares(network, found, 2, 4, "skip"), "skip")
