"""Agreement of formats with the checkpoint, with mirror images too, and latency."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.predict import merged, predict_share
from kfp_ddp.export import prove
from kfp_ddp.export.formats import Servable, trace
from kfp_ddp.export.prove import ParityError, latency, parity, real_samples
from kfp_ddp.models import weights
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data.loader import evaluation_batches
from kfp_ddp.training.distributed import alone
from kfp_ddp.training.model import networks
from kfp_ddp.training.state.checkpoint import ModelInfo
from tests.tolerance import assert_computed_alike
from tests.training_ranks import dataset

LOGITS = torch.tensor([[4.0, 1.0, 0.0], [0.0, 2.0, 8.0], [1.0, 1.00001, -3.0]])
BOUND = 8 * prove.TOLERANCE


def reference(images: Tensor) -> Tensor:
    """Return the logits of each image, whose pixels are its number."""
    return LOGITS[images[:, 0, 0, 0].long()]


def images(count: int = 3) -> Tensor:
    return torch.arange(count)[:, None, None, None].expand(-1, 3, 2, 2)


def off(image: int, by: list[float], batch: int = 0) -> Callable[[Tensor], Tensor]:
    """Return a function that differs for one image, in batches of `batch` images or in all."""

    def predict(batch_images: Tensor) -> Tensor:
        logits = reference(batch_images).clone()
        if batch in (0, len(batch_images)):
            logits[batch_images[:, 0, 0, 0] == image] += torch.tensor(by)
        return logits

    return predict


def test_differences_are_measured() -> None:
    others = {"same": reference, "near": off(1, [BOUND / 2, 0.0, 0.0])}
    result = parity(reference, others, images())
    assert (result["samples"], result["batches"]) == (3, [1, 3])
    assert result["allowed_abs_difference"] == pytest.approx(BOUND)
    same, near = result["formats"]["same"], result["formats"]["near"]
    assert same == {"max_abs_difference": 0, "mean_abs_difference": 0, "same_top1": 1}
    assert near["max_abs_difference"] == pytest.approx(BOUND / 2, rel=1e-3)
    assert near["mean_abs_difference"] == pytest.approx(BOUND / 2 / 12, rel=1e-3)
    assert near["same_top1"] == 1
    swapped = off(2, [1e-5, -1e-5, 0.0])  # of almost equal logits
    assert parity(reference, {"x": swapped}, images())["formats"]["x"]["same_top1"] == 0.75
    small: Callable[[Tensor], Tensor] = lambda batch_images: reference(batch_images) / 100  # noqa: E731
    assert parity(small, {}, images())["allowed_abs_difference"] == prove.TOLERANCE


def test_one_image_is_compared_in_a_batch_of_two_as_well() -> None:
    def of_this_size(batch_images: Tensor) -> Tensor:
        assert batch_images.shape[1:] == (3, 2, 2)
        return reference(batch_images)

    assert parity(of_this_size, {}, images(1))["batches"] == [1, 2]
    assert parity(of_this_size, {}, images(2))["batches"] == [1, 2]
    with pytest.raises(ParityError):
        parity(reference, {"x": off(0, [1.0, 0.0, 0.0], batch=2)}, images(1))


@pytest.mark.parametrize(
    "wrong",
    [
        off(1, [BOUND * 1.01, 0.0, 0.0]),
        off(1, [0.0, 0.0, -BOUND * 1.01]),
        off(0, [0.1, 0.0, 0.0], batch=1),
        off(0, [0.1, 0.0, 0.0], batch=3),
        off(2, [float("nan"), 0.0, 0.0]),
        lambda batch_images: reference(batch_images)[:, [1, 0, 2]],
    ],
)
def test_a_format_that_differs_is_refused(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ParityError, match=r"^onnx differs from the checkpoint by ") as caught:
        parity(reference, {"fine": reference, "onnx": wrong}, images())
    assert "0.0008 is allowed" in str(caught.value)
    with pytest.raises(ParityError, match=r"x gives logits of shape \[4, 2\], the checkpoint \[4"):
        parity(reference, {"x": lambda batch_images: reference(batch_images)[:, :2]}, images())


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Forty images; the colour of each is its number."""
    for number in range(40):
        folder = tmp_path / "val" / f"class{number // 20}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:02}.png")
    return tmp_path / "val"


def info(**config: object) -> ModelInfo:
    classes = ("class0", "class1")
    return ModelInfo("cifar_resnet8", classes, 8, (0.0,) * 3, (1.0,) * 3, 1, dict(config))


def test_samples_are_evenly_spaced(split: Path) -> None:
    result = real_samples(split, info())
    assert result[:, 0, 0, 0].tolist() == [at * 40 // 16 for at in range(16)]
    assert result.shape == (16, 3, 8, 8)
    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    for path in sorted(split.rglob("*.png"))[5:]:
        path.unlink()
    assert real_samples(split, info())[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_unreadable_samples_are_left_out_as_in_training(split: Path) -> None:
    with pytest.raises(InputError, match="more than max_pixels=63"):
        real_samples(split, info(max_pixels=63))
    paths = sorted(split.rglob("*.png"))
    paths[0].write_bytes(b"broken")
    with pytest.raises(InputError, match="cannot decode"):
        real_samples(split, info())
    result = real_samples(split, info(on_bad_image="skip"))
    assert result[:, 0, 0, 0].tolist() == [at * 40 // 16 for at in range(1, 16)]
    for path in [*paths[:21], *paths[22:]]:
        path.write_bytes(b"broken")
    result = real_samples(split, info(on_bad_image="skip"))
    assert result[:, 0, 0, 0].tolist() == [21], "not one of those that are evenly spaced"
    paths[21].write_bytes(b"broken")
    with pytest.raises(InputError, match="none of the 40 images"):
        real_samples(split, info(on_bad_image="skip"))


def test_latency_is_measured_for_each_size_and_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by 123.4568 ms per call."""
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 8.1)
    seen: dict[str, list[Any]] = {"a": [], "b": []}

    def timed(name: str) -> Callable[[Tensor], Tensor]:
        def predict(batch_images: Tensor) -> Tensor:
            seen[name].append((batch_images.shape, batch_images.dtype))
            return batch_images

        return predict

    result = latency({name: timed(name) for name in seen}, 6)
    shapes = [(1, 3, 6, 6)] * 4 + [(8, 3, 6, 6)] * 4
    assert seen["a"] == seen["b"] == [(shape, torch.uint8) for shape in shapes]
    assert list(result["runtimes"]) == ["a", "b"]
    one = {"median_ms": 123.4568, "min_ms": 123.4568, "images_per_s": 8.1, "calls": 3}
    assert result["runtimes"]["a"] == {"batch_1": one, "batch_8": {**one, "images_per_s": 64.8}}
    assert result["threads"] == torch.get_num_threads()
    assert " CPUs" in result["machine"]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return networks.build("cifar_resnet8", 3).eval()


def flipping(flip: bool) -> ModelInfo:
    classes, config = ("class0", "class1", "class2"), {"test_time_flip": flip}
    return ModelInfo("cifar_resnet8", classes, 8, networks.MEAN, networks.STD, 1, config)


def test_bundle_averages_an_image_and_its_mirror_image(network: nn.Module, tmp_path: Path) -> None:
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    pixels = networks.normalise(images)
    expected = (network(pixels) + network(pixels.flip(-1))) / 2
    served = trace(Servable(network, flipping(True)).eval(), 8).module()(images)
    assert_computed_alike(served, expected)
    weights.write(network, flipping(True), tmp_path / "weights")
    assert weights.read(tmp_path / "weights", 1)[1].test_time_flip
    plain = Servable(network, flipping(False)).eval()(images)
    assert_computed_alike(plain, network(pixels))


def test_evaluation_averages_the_same_way(network: nn.Module, tmp_path: Path) -> None:
    root = dataset(tmp_path / "data", train=3, val=6) / "val"
    paths = tuple(str(path) for path in sorted(root.rglob("*.png")))
    index = Index(root, flipping(True).classes, paths, (0, 0, 1, 1, 2, 2))
    world = alone(torch.device("cpu"))
    shares = [predict_share(network, flipping(flip), index, 4, world) for flip in (True, False)]
    flipped, plain = (
        torch.from_numpy(merged(index, [share]).tally.column("confidence")) for share in shares
    )
    images = torch.cat([batch.images for batch in evaluation_batches(index, 8, 6)])
    served = Servable(network, flipping(True))(images).softmax(1).max(1).values
    assert_computed_alike(flipped, served)
    assert not torch.allclose(plain, served)
