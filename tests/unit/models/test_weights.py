"""Damaged or forged files of weights are refused in one line."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import weights
from kfp_ddp.training.state.checkpoint import ModelInfo


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    channels = (0.5, 0.5, 0.5)
    info = ModelInfo("cifar_resnet8", ("cat", "dog"), 32, channels, channels, 7, {})
    weights.write(info.network(), info, path)
    return path


JUNK: list[str] = [
    *("", "null", "[]", "{}", "true", "-1", "0", "1e9", "99999999999999999999", "NaN", "1e999"),
    *("[1, 2]", '["a"]', '["a", "a"]', "[1, 2, 3]", "[0, 0, 0]", '["x", "y", "z"]', "[" * 9999),
    *("[NaN, 1, 1]", "[1e999, 1, 1]", "cifar_resnet20", "../x", '[["a"], ["b"]]', '[{}, "b"]'),
]
GENERATED = settings(max_examples=50, derandomize=True, deadline=None)


def read_or_refuse(path: Path) -> None:
    """Check that a file is refused in one line, or has a network that works."""
    try:
        network, info = weights.read(path, 7)
    except InputError:
        pass
    else:
        assert 4 <= info.image_size <= 2048
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, len(info.classes))


@GENERATED
@given(data=st.data())
def test_the_description_is_validated(written: Path, data: st.DataObject) -> None:
    content = written.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    metadata = header["__metadata__"]
    metadata[data.draw(st.sampled_from(sorted(metadata)))] = data.draw(st.sampled_from(JUNK))
    if data.draw(st.booleans()):
        del metadata[data.draw(st.sampled_from(sorted(metadata)))]
    forged = json.dumps(header).encode()
    target = written.with_name("forged.safetensors")
    target.write_bytes(struct.pack("<Q", len(forged)) + forged + content[8 + size :])
    read_or_refuse(target)


@GENERATED
@given(data=st.data(), cut=st.booleans())
def test_damage_is_found(written: Path, data: st.DataObject, cut: bool) -> None:
    content = bytearray(written.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    for at, bit in data.draw(
        st.lists(st.tuples(st.integers(0, 7 + size), st.integers(0, 7)), min_size=1, max_size=3)
    ):
        content[at] ^= 1 << bit
    if cut:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    target = written.with_name("damaged.safetensors")
    target.write_bytes(content)
    read_or_refuse(target)


def test_the_same_network_is_the_same_bytes(written: Path, tmp_path: Path) -> None:
    network, info = weights.read(written, 7)
    for number in range(8):  # the library orders seven keys at random
        weights.write(network, info, tmp_path / f"{number}.safetensors")
        assert (tmp_path / f"{number}.safetensors").read_bytes() == written.read_bytes()


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"model": "regnet_y_128gf"}, "do not fit a regnet_y_128gf"),
        ({"classes": json.dumps([str(number) for number in range(1_000_000)])}, "size mismatch"),
        ({"classes": json.dumps(["x" * (17 << 20), "y"])}, "its header has"),
    ],
)
def test_a_large_description_takes_no_memory(
    written: Path, tmp_path: Path, described: dict[str, str], words: str
) -> None:
    """The process may have 1 GiB beside what it imports."""
    content = written.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    header["__metadata__"] |= described
    forged = json.dumps(header).encode()
    target = tmp_path / "forged.safetensors"
    target.write_bytes(struct.pack("<Q", len(forged)) + forged + content[8 + size :])
    script = f"""
import resource
from kfp_ddp.models import weights
from kfp_ddp.training.model.networks import build
build("resnet18", 2)
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30),) * 2)
weights.read(weights.Path({str(target)!r}), 7)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "kfp_ddp.core.errors.InputError" in result.stderr
    assert words in result.stderr
