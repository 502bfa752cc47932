"""Networks by name: what they are made of, and where each can be taught other classes."""

import pytest
import torch
from torch import nn
from torchvision.models import get_model

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import model


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("squeezenet1_1", "classifier.1"),  # a convolution
        ("vgg11", "classifier.6"),  # two linear layers before it
        ("mobilenet_v3_small", "classifier.3"),
        ("efficientnet_b0", "classifier.1"),
        ("vit_b_32", "heads.head"),
        ("swin_t", "head"),
        ("maxvit_t", "classifier.5"),
    ],
)
def test_the_head_is_the_layer_that_tells_the_classes(name: str, head: str) -> None:
    with torch.device("meta"):
        network = get_model(name, num_classes=7)
    assert model.head_of(network) == head
    layer = network.get_submodule(head)
    assert 7 in (getattr(layer, "out_features", 0), getattr(layer, "out_channels", 0))


def test_the_head_of_a_small_resnet_and_of_a_network_without_one() -> None:
    assert model.head_of(model.build("cifar_resnet8", 3)) == "fc"
    with pytest.raises(InputError, match=r"^the network has no linear layer or convolution"):
        model.head_of(nn.Sequential(nn.Flatten(), nn.ReLU()))


@pytest.mark.parametrize(
    "name", ["inception_v3", "googlenet", "mnasnet0_5", "regnet_y_400mf", "maxvit_t"]
)
def test_networks_that_are_unlike_others_give_logits_and_take_their_weights_back(name: str) -> None:
    size = 224 if name == "maxvit_t" else 80
    network = model.build(name, 3, image_size=size).eval()
    with torch.no_grad():
        assert network(torch.zeros(2, 3, size, size)).shape == (2, 3)
    network.load_state_dict(dict(network.state_dict()))  # as a checkpoint holds it
