"""Networks, convolutions, optimizer, learning rate, averages and loss, against their formulas."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchvision.models import get_model

from kfp_ddp.core.errors import InputError
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.data.transforms import mixed
from kfp_ddp.training.model import networks
from kfp_ddp.training.model.convolutions import Conv2d, use_products
from kfp_ddp.training.state import learner
from kfp_ddp.training.trainer import Loss, weights_of
from tests.training_ranks import ALONE, run


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("squeezenet1_1", "classifier.1"),  # a convolution
        ("vgg11", "classifier.6"),  # after two other linear layers
        ("efficientnet_b0", "classifier.1"),
        ("swin_t", "head"),
        ("maxvit_t", "classifier.5"),
    ],
)
def test_classifier_is_the_last_layer_with_weights(name: str, head: str) -> None:
    with torch.device("meta"):
        network = get_model(name, num_classes=7)
    assert networks.heads_of(network) == (f"{head}.",)
    layer = network.get_submodule(head)
    assert 7 in (getattr(layer, "out_features", 0), getattr(layer, "out_channels", 0))


def test_network_without_a_classifier_is_refused() -> None:
    assert networks.heads_of(networks.build("cifar_resnet8", 3)) == ("fc.",)
    with pytest.raises(InputError, match=r"^the network has no linear layer or convolution"):
        networks.heads_of(nn.Sequential(nn.Flatten(), nn.ReLU()))


@pytest.mark.parametrize(
    "name", ["inception_v3", "googlenet", "mnasnet0_5", "regnet_y_400mf", "maxvit_t"]
)
def test_special_networks_give_logits_and_load_their_weights(name: str) -> None:
    size = 224 if name == "maxvit_t" else 80
    network = networks.build(name, 3, image_size=size).eval()
    with torch.no_grad():
        assert network(torch.zeros(2, 3, size, size)).shape == (2, 3)
    network.load_state_dict(dict(network.state_dict()))  # as in a checkpoint


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "cifar_resnet14"])
def test_blur_pool_keeps_the_shape_and_the_weights(name: str) -> None:
    plain, blurred = networks.build(name, 5), networks.build(name, 5, blur_pool=True)
    assert blurred(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    shapes = [[tuple(p.shape) for p in network.parameters()] for network in (plain, blurred)]
    assert shapes[0] == shapes[1]
    assert sum(isinstance(m, networks.BlurPool) for m in blurred.modules()) >= 2


def test_images_are_normalised_as_by_torchvision() -> None:
    images = torch.randint(256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = torch.tensor(networks.MEAN).view(3, 1, 1), torch.tensor(networks.STD).view(3, 1, 1)
    torch.testing.assert_close(networks.normalise(images), (images / 255 - mean) / std)


def test_parameter_groups_have_the_settings_of_the_configuration() -> None:
    network = networks.build("cifar_resnet8", 3)
    config = run(weight_decay=0.25, momentum=0.5, learning_rate=0.75)
    optimizer = learner.optimizer_of(network, config)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    for group in (decayed, plain):
        assert (group["momentum"], group["lr"]) == (0.5, 0.75)
        assert (group["nesterov"], group["fused"]) == (True, True)
    kinds = [{p.ndim for p in group["params"]} for group in optimizer.param_groups]
    assert kinds == [{2, 4}, {1}]
    groups = learner.optimizer_of(network, run(momentum=0.0)).param_groups
    assert [(group["momentum"], group["nesterov"]) for group in groups] == [(0.0, False)] * 2


@pytest.mark.parametrize("warmup", [0, 1, 2.5])
def test_learning_rate_follows_the_batch_and_the_schedule(warmup: float) -> None:
    config = run(epochs=4, warmup_epochs=warmup, learning_rate=0.3, batch_size=512)
    assert learner.peak(config) == 0.3
    assert learner.peak(config.model_copy(update={"lr_reference_batch": 2048})) == 0.075
    config = config.model_copy(update={"lr_reference_batch": 256})
    rates = [learner.learning_rate(config, step, 6) for step in range(24)]
    rising = round(6 * warmup)
    for step in range(rising):
        assert rates[step] == pytest.approx(0.6 * (step + 1) / rising)
    for step in range(rising, 24):
        share = (step - rising) / (24 - rising)
        assert rates[step] == pytest.approx(0.3 * (1 + math.cos(math.pi * share)))
    assert rates[rising] == pytest.approx(0.6)
    assert 0 < rates[-1] < 0.02


@pytest.mark.parametrize(
    ("decay", "step", "share"),
    [
        *((0.5, 0, 0.1), (0.5, 1, 2 / 11), (0.5, 8, 0.5), (0.5, 9, 0.5)),
        *((0.9, 90, 0.9), (0.9, 7, 8 / 17)),
    ],
)
def test_averages_move_faster_at_first(decay: float, step: int, share: float) -> None:
    network = nn.Sequential(nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2)).train()
    trained = next(network.parameters())
    nn.init.constant_(trained, 3.0)
    ema = learner.Ema(network, decay)
    assert (ema.model.training, network.training) == (False, True)
    assert not any(weight.requires_grad for weight in ema.model.parameters())
    assert all(weight.requires_grad for weight in network.parameters())
    nn.init.constant_(trained, 5.0)
    ema.update(step)
    weight = next(ema.model.parameters())
    assert weight.tolist() == [[pytest.approx(3 * share + 5 * (1 - share))]] * 2
    assert trained.tolist() == [[5.0]] * 2
    network(torch.randn(8, 1))
    ema.copy_buffers(network)
    for own, theirs in zip(ema.model.buffers(), network.buffers(), strict=True):
        assert torch.equal(own, theirs)
        assert own is not theirs


def index(*targets: int) -> Index:
    return Index(Path("/d"), ("a", "b", "c"), tuple(map(str, targets)), targets)


def test_balanced_classes_have_equal_weight() -> None:
    rare = index(0, 0, 0, 0, 1, 1, 1, 1, 2)
    assert weights_of(rare, 1) == pytest.approx([9 / 12, 9 / 12, 3.0])
    loss = Loss(run(class_weights="balanced", label_smoothing=0), rare, ALONE.device)
    logits, targets = torch.randn(9, 3), torch.tensor(rare.targets)
    losses = F.cross_entropy(logits, targets, reduction="none")
    by_class = [losses[targets == number].mean() for number in range(3)]
    assert float(loss(logits, targets)) == pytest.approx(float(sum(by_class)) / 3, rel=1e-5)
    parts = [slice(at, at + 3) for at in (0, 3, 6)]  # micro-batches change nothing
    mean = torch.stack([loss(logits[part], targets[part]) for part in parts]).mean()
    torch.testing.assert_close(mean, loss(logits, targets))


def test_loss_of_mixed_images_is_that_of_mixed_targets() -> None:
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    hot = F.one_hot(targets, 3).float()
    soft = 0.3 * hot + 0.7 * hot.roll(1, 0)
    expected = F.cross_entropy(logits, soft, label_smoothing=0.2)
    loss = Loss(run(label_smoothing=0.2), index(0, 1, 2), ALONE.device)
    torch.testing.assert_close(loss(logits, targets, 0.3), expected)


def test_mixup_takes_a_share_of_the_previous_image() -> None:
    images = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    out, own = mixed(images, run(mixup=1.0), epoch=2, first=7)
    assert 0 < own < 1
    torch.testing.assert_close(out, own * images + (1 - own) * images.roll(1, 0))
    assert out.is_contiguous(memory_format=torch.channels_last)
    again, same = mixed(images, run(mixup=1.0), epoch=2, first=7)
    assert torch.equal(again, out)
    assert same == own
    assert len({mixed(images, run(mixup=1.0), e, f)[1] for e in (2, 3) for f in (7, 8)}) == 4


def test_cutmix_pastes_a_part_of_the_previous_image() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    for first in range(40):
        out, own = mixed(images, run(cutmix=1.0), epoch=0, first=first)
        pasted = out != images
        assert torch.equal(out[pasted], images.roll(1, 0)[pasted])
        assert float((~pasted).float().mean()) == pytest.approx(own)
        rows, columns = pasted[0, 0].any(1).sum(), pasted[0, 0].any(0).sum()
        assert int(pasted[0, 0].sum()) == int(rows * columns)


def test_with_mixup_and_cutmix_a_batch_gets_one_of_them() -> None:
    images = torch.rand(2, 3, 8, 8)
    both = [mixed(images, run(mixup=1.0, cutmix=1.0), 0, first)[0] for first in range(40)]
    assert 0 < sum(bool((out == images).any()) for out in both) < 40
    assert mixed(images, run(), 0, 0) == (images, 1.0)


LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "3x3": ((5, 7, 3), {"padding": 1}, (4, 4)),
    "strided": ((5, 7, 3), {"padding": 1, "stride": 2, "bias": False}, (8, 7)),
    "wide kernel": ((3, 6, (5, 3)), {"padding": (2, 0), "stride": (1, 2)}, (6, 9)),
    "rows of eight": ((4, 6, 3), {"padding": 1}, (8, 8)),
    "large": ((4, 6, 3), {"padding": 1}, (12, 12)),
    "pointwise": ((5, 7, 1), {"bias": False}, (20, 20)),
    "pointwise, strided": ((5, 7, 1), {"stride": 2}, (9, 12)),
    "pointwise, padded": ((5, 7, 1), {"padding": 1}, (3, 3)),
}


def gradients(layer: nn.Module, images: Tensor) -> list[Tensor]:
    """The output, and the gradients of its weighted sum: of the images and of the weights."""
    images = images.clone(memory_format=torch.channels_last).requires_grad_()
    out = layer(images)
    scales = torch.arange(out.numel(), dtype=out.dtype).sin().view(out.shape)
    torch.autograd.backward((out * scales).sum())
    return [out.detach(), *(t.grad for t in (images, *layer.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_product_equals_the_convolution(name: str) -> None:
    """Output and gradients in float64, whatever the kernel's shape, stride and padding."""
    torch.manual_seed(1)
    arguments, more, size = LAYERS[name]
    layer = nn.Conv2d(*arguments, **more).double().to(memory_format=torch.channels_last)
    images = torch.randn(3, arguments[0], *size, dtype=torch.float64)
    expected = gradients(copy.deepcopy(layer), images)
    use_products(layer)
    assert isinstance(layer, Conv2d)
    found = gradients(layer, images)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_have_the_type_of_the_weights() -> None:
    """As close to float32 as a convolution's own kernel is under autocast."""
    torch.manual_seed(1)
    layer = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
    images = torch.randn(8, 64, 2, 2)
    exact = gradients(copy.deepcopy(layer), images)
    with torch.autocast("cpu", torch.bfloat16):
        own = gradients(copy.deepcopy(layer), images)
        use_products(layer)
        found = gradients(layer, images)
    assert [t.dtype for t in found] == [t.dtype for t in own]
    assert found[0].dtype == torch.bfloat16
    for mine, theirs, truth in zip(found, own, exact, strict=True):
        error, usual = ((t.float() - truth).abs().max() for t in (mine, theirs))
        assert error <= 1.5 * usual + 1e-3


def test_only_plain_convolutions_are_changed() -> None:
    """Names and weights stay, and a copy computes with weights of its own."""
    plain, grouped, same = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1)
    same.padding = "same"
    network = nn.Sequential(
        plain, grouped, nn.Conv2d(4, 4, 3, dilation=2), same, nn.Conv1d(4, 4, 1)
    )
    names = list(network.state_dict())
    use_products(network)
    assert [isinstance(layer, Conv2d) for layer in network] == [True, False, False, False, False]
    assert list(network.state_dict()) == names
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.weight.zero_()
    images = torch.ones(1, 4, 2, 2)
    assert not torch.equal(plain(images), other(images))
