"""What is measured with mirror images is what is served with them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kfp_ddp.evaluation.predict import merged, predict_share
from kfp_ddp.export.formats import Servable, trace
from kfp_ddp.models import weights
from kfp_ddp.training import model
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.data import evaluation_batches
from kfp_ddp.training.distributed import alone
from kfp_ddp.training.splits import Index
from tests.training_ranks import dataset


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return model.build("cifar_resnet8", 3).eval()


def info(flip: bool) -> ModelInfo:
    classes, config = ("class0", "class1", "class2"), {"test_time_flip": flip}
    return ModelInfo("cifar_resnet8", classes, 8, model.MEAN, model.STD, 1, config)


def test_bundle_averages_an_image_and_its_mirror_image(network: nn.Module, tmp_path: Path) -> None:
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    pixels = model.normalise(images)
    expected = (network(pixels) + network(pixels.flip(-1))) / 2
    served = trace(Servable(network, info(True)).eval(), 8).module()(images)
    torch.testing.assert_close(served, expected)
    weights.write(network, info(True), tmp_path / "weights")
    assert weights.read(tmp_path / "weights", 1)[1].test_time_flip
    plain = Servable(network, info(False)).eval()(images)
    assert torch.equal(plain, network(pixels))


def test_evaluation_averages_the_same_way(network: nn.Module, tmp_path: Path) -> None:
    root = dataset(tmp_path / "data", train=3, val=6) / "val"
    paths = tuple(str(path) for path in sorted(root.rglob("*.png")))
    index = Index(root, info(True).classes, paths, (0, 0, 1, 1, 2, 2))
    world = alone(torch.device("cpu"))
    shares = [predict_share(network, info(flip), index, 4, world) for flip in (True, False)]
    found = [merged(index, [share]) for share in shares]
    images = torch.cat([batch.clone() for batch, _, _ in evaluation_batches(index, 8, 6)])
    served = Servable(network, info(True))(images).softmax(1).max(1).values
    torch.testing.assert_close(found[0].confidence, served)
    assert not torch.allclose(found[1].confidence, served)
