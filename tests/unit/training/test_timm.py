"""Networks of timm by name: what they expect of images, their weights, and their export."""

import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from kfp_ddp.core.errors import InputError
from kfp_ddp.export import formats
from kfp_ddp.export.contents import describe_signature
from kfp_ddp.models import weights_download
from kfp_ddp.training.model import networks
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.torchvision_weights import address_of, cached, file_of
from kfp_ddp.training.state.checkpoint import ModelInfo, manifest_of
from kfp_ddp.training.state.initial_weights import initialise
from kfp_ddp.training.state.learner import body_weights

CLASSES = ("a", "b", "c")
FILE = "test_vit.r160_in1k.model.safetensors"


def run(model: str, **fields: Any) -> TrainConfig:
    return TrainConfig.create(data="/d", output_dir="/o", model=model, **fields)


def info_of(config: TrainConfig) -> ModelInfo:
    fields = manifest_of(config, CLASSES)
    mean, std = tuple(fields["mean"]), tuple(fields["std"])
    return ModelInfo(config.model, CLASSES, config.image_size, mean, std, 1, fields["config"])


@pytest.mark.parametrize("network", ["test_vit", "test_efficientnet", "convnextv2_tiny"])
def test_preprocessing_is_that_of_timm(network: str) -> None:
    theirs = timm.get_pretrained_cfg(network)
    assert theirs is not None
    info = info_of(run(f"timm/{network}", image_size=224))
    assert (info.mean, info.std) == (theirs.mean, theirs.std)
    steps = describe_signature(info)["preprocessing"]
    assert steps["short_side"] == round(224 / theirs.crop_pct)
    assert steps["in_graph"]["mean"] == list(theirs.mean)
    assert run(f"timm/{network}.{theirs.tag}").reading.crop == theirs.crop_pct


@pytest.mark.parametrize("name", ["timm/test_vitt", "timm/test_vit.r9", "timm/", "test_vit"])
def test_unknown_network_is_refused_with_a_near_name(name: str) -> None:
    hint = "timm/test_vit" if name == "timm/test_vitt" else ""
    for refused in (lambda: run(name), lambda: networks.build(name, 3)):
        with pytest.raises(InputError, match=f"is unknown.*{hint}"):
            refused()


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"kfp-ddp\[timm\]"):
        networks.build("timm/test_vit", 3)


def test_weights_of_cache_mirror_or_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made here for 1,000 classes at 160 px, and adapted to 3 classes at 64 px."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/")
    assert file_of("DEFAULT", "timm/test_vit") == FILE
    hub = "https://hub.example/timm/test_vit.r160_in1k/resolve/main/model.safetensors"
    assert address_of(FILE) == hub
    monkeypatch.setenv(weights_download.SOURCE, "off")
    with pytest.raises(InputError, match="cannot be had"):
        weights_download.find("true", "timm/test_vit")
    monkeypatch.setenv(weights_download.SOURCE, str(tmp_path))
    torch.manual_seed(1)
    theirs = networks.build("timm/test_vit", 1000, image_size=160).state_dict()
    save_file(theirs, tmp_path / FILE)
    start = weights_download.find("auto", "timm/test_vit")
    assert start[:2] == (str(tmp_path / FILE), "timm/test_vit")
    cached(FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).rename(cached(FILE))
    assert weights_download.find("auto", "timm/test_vit.r160_in1k").pretrained == "true"
    config = run("timm/test_vit", image_size=64, pretrained="true")
    network = networks.build_for(config, 3)
    initialise(network, config, CLASSES, report=False)
    own = network.state_dict()
    assert own["pos_embed"].shape != theirs["pos_embed"].shape
    assert torch.equal(own["blocks.0.attn.qkv.weight"], theirs["blocks.0.attn.qkv.weight"])
    assert len(own["head.weight"]) == 3


@pytest.mark.parametrize("network", ["test_vit", "test_resnet"])
def test_exported_forms_agree(network: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    info = info_of(run(f"{timm_networks.PREFIX}{network}", image_size=64))
    model = info.network().eval()
    assert formats.write_all(model, info, tmp_path) == {}
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    expected = model(networks.normalise(images, info.mean, info.std)).detach()
    for predict in formats.from_bundle(tmp_path).values():
        torch.testing.assert_close(predict(images), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("test_vit", ("head.",)),
        ("deit_tiny_distilled_patch16_224", ("head.", "head_dist.")),
        ("levit_384_s8", ("head.linear.", "head_dist.linear.")),
        ("repvit_m0_9", ("head.head.l.", "head.head_dist.l.")),
        ("crossvit_tiny_240", ("head.0.", "head.1.")),
        ("volo_d1_224", ("aux_head.", "head.")),
    ],
)
def test_all_layers_of_a_classifier_are_known(name: str, heads: tuple[str, ...]) -> None:
    with networks.without_memory():
        network = timm.create_model(name, num_classes=7)
    assert networks.heads_of(network) == heads
    by_shape = [k for k, p in network.named_parameters() if p.ndim > 1 and len(p) == 7]
    assert by_shape == [f"{head}weight" for head in heads]
    assert not {7} & {len(weight) for weight in body_weights(network)}


@pytest.mark.parametrize("classes", [CLASSES, ("a", "b", "c", "d")])
def test_weights_of_two_classifiers_are_for_other_classes(
    tmp_path: Path, classes: tuple[str, ...]
) -> None:
    torch.manual_seed(1)
    name = "timm/levit_128s"
    theirs = networks.build(name, 4).state_dict()
    save_file({k: v.contiguous() for k, v in theirs.items()}, tmp_path / "w.safetensors")
    config = run(name, image_size=224, pretrained=str(tmp_path / "w.safetensors"))
    network = networks.build_for(config, len(classes))
    initialise(network, config, classes, report=False)
    own = network.state_dict()
    assert torch.equal(own["stem.conv1.linear.weight"], theirs["stem.conv1.linear.weight"])
    for head in ("head.linear.weight", "head_dist.linear.weight"):
        assert len(own[head]) == len(classes)
        assert torch.equal(own[head], theirs[head]) == (len(classes) == 4)
