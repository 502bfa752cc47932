"""A file of weights that was damaged or forged is refused in one line."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import weights
from kfp_ddp.training.checkpoint import ModelInfo


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    channels = (0.5, 0.5, 0.5)
    info = ModelInfo("cifar_resnet8", ("cat", "dog"), 32, channels, channels, 7, {})
    weights.write(info.network(), info, path)
    return path


def test_a_network_comes_back(written: Path) -> None:
    network, info = weights.read(written, 7)
    assert (info.model, info.classes, info.image_size, info.step) == (
        "cifar_resnet8", ("cat", "dog"), 32, 7,
    )  # fmt: skip
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


JUNK: list[str] = [
    *("", "null", "[]", "{}", "true", "-1", "0", "1e9", "99999999999999999999", "NaN", "1e999"),
    *("[1, 2]", '["a"]', '["a", "a"]', "[1, 2, 3]", "[0, 0, 0]", '["x", "y", "z"]', "[" * 9999),
    *("[NaN, 1, 1]", "[1e999, 1, 1]", "cifar_resnet20", "../x", '[["a"], ["b"]]', '[{}, "b"]'),
]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_said_of_it_is_checked(written: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = written.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    target = tmp_path / "model.safetensors"
    for _ in range(50):
        said = dict(header["__metadata__"])
        name = draw.choice(sorted(said))
        if draw.random() < 0.1:
            del said[name]
        else:
            said[name] = draw.choice(JUNK)
        forged = json.dumps({**header, "__metadata__": said}).encode()
        target.write_bytes(struct.pack("<Q", len(forged)) + forged + content[8 + size :])
        taken(target)


def test_the_same_network_is_the_same_bytes(written: Path, tmp_path: Path) -> None:
    network, info = weights.read(written, 7)
    for number in range(8):  # the library orders seven keys as chance has it
        weights.write(network, info, tmp_path / f"{number}.safetensors")
        assert (tmp_path / f"{number}.safetensors").read_bytes() == written.read_bytes()


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_one_line(written: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = written.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    target = tmp_path / "model.safetensors"
    for _ in range(50):
        spoilt = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            spoilt[draw.randrange(8 + size)] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            del spoilt[draw.randrange(len(spoilt)) :]
        target.write_bytes(spoilt)
        taken(target)


def taken(path: Path) -> None:
    """Either the file is refused in one line, or it is a network that works."""
    try:
        network, info = weights.read(path, 7)
    except InputError as error:
        line = str(error)
    else:
        line = ""
        assert 4 <= info.image_size <= 2048
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, len(info.classes))
    assert "\n" not in line
